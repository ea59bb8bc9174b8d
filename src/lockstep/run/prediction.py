"""See `lockstep.job.prediction`."""

from lockstep.job.prediction import as_splits as as_splits
from lockstep.job.prediction import config_and_spec as config_and_spec
from lockstep.job.prediction import predict as predict
