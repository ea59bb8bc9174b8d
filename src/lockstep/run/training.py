"""See `lockstep.job.training`."""

from lockstep.job.training import fit_and_test as fit_and_test
