"""Data: from a data set to the samples of a piece."""

from lockstep.data.data_module import ImageDataModule, StepDataModule
from lockstep.data.datasets import ArrayDataset, SampleSets, Source, Spec, Splits

__all__ = ["ArrayDataset", "ImageDataModule", "SampleSets", "Source", "Spec", "Splits", "StepDataModule"]
