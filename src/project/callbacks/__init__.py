"""Show a run: curves, TensorBoard's first page, pictures of the classifier's mistakes."""

from project.callbacks.dashboard import Dashboard
from project.callbacks.first_page import TensorBoard
from project.callbacks.golden import Golden
from project.callbacks.pictures import Pictures

__all__ = ["Dashboard", "Golden", "Pictures", "TensorBoard"]
