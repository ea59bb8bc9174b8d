"""Show a run: curves, TensorBoard's first page, pictures of the classifier's mistakes."""

from lockstep.vision.callbacks.dashboard import Dashboard
from lockstep.vision.callbacks.first_page import TensorBoard
from lockstep.vision.callbacks.golden import Golden
from lockstep.vision.callbacks.pictures import Pictures

__all__ = ["Dashboard", "Golden", "Pictures", "TensorBoard"]
