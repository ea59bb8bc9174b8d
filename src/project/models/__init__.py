"""The nets of this project, as image classifiers."""

from project.models.mnist_cnn import MnistCNN
from project.models.resnet18 import ResNet18

__all__ = ["MnistCNN", "ResNet18"]
