"""Data: an opener returns a `Source`, which becomes `Splits`, of which `StepData` gives the samples of a piece."""

from lockstep.data.datasets import ArrayDataset
from lockstep.data.splits import Source, Spec, Splits
from lockstep.data.step_data import StepData

__all__ = ["ArrayDataset", "Source", "Spec", "Splits", "StepData"]
