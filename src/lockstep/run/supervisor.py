"""See `lockstep.job.supervisor`."""

from lockstep.job.supervisor import check_start_files as check_start_files
from lockstep.job.supervisor import run_in_workers as run_in_workers
