"""Plain LightningModules, one for each task, and nets of the image classifier."""

from lockstep.vision.models.classifier import ImageClassifier
from lockstep.vision.models.fast_cnn import FastCNN
from lockstep.vision.models.multi_label import MultiLabel
from lockstep.vision.models.published import Timm, Torchvision, segmentation_net, torchvision_net
from lockstep.vision.models.regression import Regression
from lockstep.vision.models.resnet9 import ResNet9
from lockstep.vision.models.segmentation import Segmentation
from lockstep.vision.models.small_cnn import SmallCNN
from lockstep.vision.models.small_resnet18 import SmallResNet18

__all__ = [
    "FastCNN",
    "ImageClassifier",
    "MultiLabel",
    "Regression",
    "ResNet9",
    "Segmentation",
    "SmallCNN",
    "SmallResNet18",
    "Timm",
    "Torchvision",
    "segmentation_net",
    "torchvision_net",
]
