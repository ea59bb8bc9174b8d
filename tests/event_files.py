"""What a run has written for TensorBoard, read back."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

KINDS = ("scalars", "images", "tensors")


class Board:
    """A folder of event files."""

    def __init__(self, folder: Path) -> None:
        self.events = EventAccumulator(str(folder), size_guidance=dict.fromkeys(KINDS, 0)).Reload()
        self.tags: dict[str, Any] = self.events.Tags()

    def curve(self, tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in self.events.Scalars(tag)]

    def tensor(self, tag: str) -> NDArray[Any]:
        return np.asarray(tensor_util.make_ndarray(self.events.Tensors(tag)[-1].tensor_proto))

    def image(self, tag: str) -> NDArray[Any]:
        return np.asarray(Image.open(io.BytesIO(self.events.Images(tag)[-1].encoded_image_string)))
