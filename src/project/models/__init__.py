"""Plain LightningModules, one for each task, and the nets of the image classifier."""

from project.models.classifier import ImageClassifier
from project.models.fast_cnn import FastCNN
from project.models.mnist_cnn import MnistCNN
from project.models.multi_label import MultiLabel
from project.models.published import Timm, Torchvision, segmentation_net, torchvision_net
from project.models.regression import Regression
from project.models.resnet9 import ResNet9
from project.models.resnet18 import ResNet18
from project.models.segmentation import Segmentation

__all__ = [
    "FastCNN",
    "ImageClassifier",
    "MnistCNN",
    "MultiLabel",
    "Regression",
    "ResNet9",
    "ResNet18",
    "Segmentation",
    "Timm",
    "Torchvision",
    "segmentation_net",
    "torchvision_net",
]
