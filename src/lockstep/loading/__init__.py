"""From a data set to a rank's part of a step."""

from lockstep.loading.data_module import DataModule
from lockstep.loading.datasets import ArrayDataset, Source, Spec, Splits
from lockstep.loading.opening import open_data

__all__ = ["ArrayDataset", "DataModule", "Source", "Spec", "Splits", "open_data"]
