"""See `lockstep.job.evaluation`."""

from lockstep.job.evaluation import check_same_images as check_same_images
from lockstep.job.evaluation import choose_test_images as choose_test_images
from lockstep.job.evaluation import config_of as config_of
from lockstep.job.evaluation import evaluate as evaluate
from lockstep.job.evaluation import find_checkpoint_and_record as find_checkpoint_and_record
from lockstep.job.evaluation import spec_of as spec_of
