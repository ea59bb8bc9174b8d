"""From a data set to a rank's part of a step."""

from lockstep.loading.data_module import DataModule
from lockstep.loading.datasets import ArrayDataset, Source, Spec, Splits

__all__ = ["ArrayDataset", "DataModule", "Source", "Spec", "Splits"]
