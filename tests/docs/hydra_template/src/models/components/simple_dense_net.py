"""A net with the interface of lightning-hydra-template's `SimpleDenseNet`."""

from itertools import pairwise

from torch import nn


class SimpleDenseNet(nn.Module):
    def __init__(self, input_size=784, lin1_size=256, lin2_size=256, lin3_size=256, output_size=10):
        super().__init__()
        sizes = [input_size, lin1_size, lin2_size, lin3_size]
        hidden = [
            layer
            for inputs, outputs in pairwise(sizes)
            for layer in (nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU())
        ]
        self.model = nn.Sequential(*hidden, nn.Linear(lin3_size, output_size))

    def forward(self, x):
        return self.model(x.view(x.size(0), -1))
