"""Open a data set that needs no download: the digits of scikit-learn."""

from lockstep import ArrayDataset, Source, Spec
from lockstep.vision.data import read_digits


def digits() -> Source:
    """Open 1,797 handwritten digits: arrays of images and labels, and what a net must know of them."""
    images, labels, test = read_digits()  # uint8 [1797, 1, 28, 28], int64 [1797], bool [1797]
    spec = Spec(channels=1, image_size=28, classes=tuple("0123456789"), mean=(0.3056,), std=(0.3248,))
    return Source(ArrayDataset(images[~test], labels[~test]), ArrayDataset(images[test], labels[test]), spec)
