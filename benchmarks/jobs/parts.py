"""What the three jobs share: data and model. Not counted."""

import sklearn.datasets
import torch
from torch import nn

data = sklearn.datasets.load_digits()
x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
train, test = (x[:1437], y[:1437]), (x[1437:], y[1437:])


def make_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
