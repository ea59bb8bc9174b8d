"""Image classifiers: one plain LightningModule, and the nets that it trains."""

from lockstep.models.classifier import ImageClassifier
from lockstep.models.fast_cnn import FastCNN
from lockstep.models.mnist_cnn import MnistCNN
from lockstep.models.resnet18 import ResNet18

__all__ = ["FastCNN", "ImageClassifier", "MnistCNN", "ResNet18"]
