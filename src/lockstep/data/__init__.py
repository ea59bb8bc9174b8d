"""From a data set to a rank's part of a step."""

from lockstep.data.data_module import DataModule
from lockstep.data.datasets import ArrayDataset, Source, Spec, Splits

__all__ = ["ArrayDataset", "DataModule", "Source", "Spec", "Splits"]
