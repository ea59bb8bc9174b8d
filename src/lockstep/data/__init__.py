"""The data room: data sets, and the DataModule that cuts them into optimizer steps."""

from lockstep.data.datasets import ArrayDataset, Source, Spec, Splits
from lockstep.data.embedded import digits, synthetic
from lockstep.data.files import cifar10, fashion_mnist, mnist
from lockstep.data.folder import ImageFiles, image_folder
from lockstep.data.module import DataModule
from lockstep.data.opening import open_data
from lockstep.data.share import Share, Turn

__all__ = [
    "ArrayDataset",
    "DataModule",
    "ImageFiles",
    "Share",
    "Source",
    "Spec",
    "Splits",
    "Turn",
    "cifar10",
    "digits",
    "fashion_mnist",
    "image_folder",
    "mnist",
    "open_data",
    "synthetic",
]
