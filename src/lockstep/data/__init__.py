"""Data: from a data set to the samples of a piece."""

from lockstep.data.data_module import DataModule
from lockstep.data.datasets import ArrayDataset, Source, Spec, Splits

__all__ = ["ArrayDataset", "DataModule", "Source", "Spec", "Splits"]
