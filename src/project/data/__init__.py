"""Open data sets. Each opener returns a `lockstep.Source`, and conf/data/ names it."""

from project.data.digits import digits, synthetic
from project.data.files import cifar10, fashion_mnist, mnist
from project.data.folders import ImageFiles, image_folder
from project.data.huggingface import huggingface
from project.data.image_list import image_list
from project.data.shards import shards

__all__ = [
    "ImageFiles",
    "cifar10",
    "digits",
    "fashion_mnist",
    "huggingface",
    "image_folder",
    "image_list",
    "mnist",
    "shards",
    "synthetic",
]
