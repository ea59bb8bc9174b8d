"""Open data sets. Each opener returns a `lockstep.Source`, and a page of conf/data/ names it."""

from lockstep.vision.data.digits import read_digits
from lockstep.vision.data.files import cifar10, fashion_mnist, mnist
from lockstep.vision.data.folders import ImageFiles, image_folder
from lockstep.vision.data.huggingface import huggingface
from lockstep.vision.data.image_list import image_list
from lockstep.vision.data.synthetic import synthetic

__all__ = [
    "ImageFiles",
    "cifar10",
    "fashion_mnist",
    "huggingface",
    "image_folder",
    "image_list",
    "mnist",
    "read_digits",
    "synthetic",
]
