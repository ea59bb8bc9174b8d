"""Image classifiers: one plain LightningModule, and the nets that it trains."""

from project.models.classifier import ImageClassifier
from project.models.fast_cnn import FastCNN
from project.models.mnist_cnn import MnistCNN
from project.models.published import Timm, Torchvision
from project.models.resnet9 import ResNet9
from project.models.resnet18 import ResNet18

__all__ = ["FastCNN", "ImageClassifier", "MnistCNN", "ResNet9", "ResNet18", "Timm", "Torchvision"]
