"""A job that stops early, keeps the best weights, averages them and writes a log; and ways to look at what it left."""

import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import EMA, EarlyStopping, Log, SaveBest

EPOCHS = 40


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, HELD_OUT = normal(150, 6, seed=0), normal(60, 6, seed=5)
Y, TARGETS = (X[:, 0] * X[:, 1] > 0).long(), (HELD_OUT[:, 0] * HELD_OUT[:, 1] > 0).long()


def make_model():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def recipe(**changes):
    given = {"replicas": 3, "batch_size": 32, "epochs": EPOCHS, "lr": 1e-2}
    return phalanx.Recipe(make_model, (X, Y), F.cross_entropy, **(given | changes))


def evaluation(**changes):
    return phalanx.Evaluation(accuracy, (HELD_OUT, TARGETS), **changes)


def callbacks():
    return [EarlyStopping("accuracy", patience=3), SaveBest("accuracy", keep=2), EMA(0.9), Log("csv")]


def left(result, folder):
    """What a finished job left, as values that can be compared."""
    best = result.best
    files = {path.name: path.read_bytes() for path in (folder / "best").iterdir()}
    averaged = {name: value.numpy().tobytes() for name, value in result.averaged.items()}
    history = [(item.steps, item.value, item.name) for item in result.metric_history]
    log = (folder / "log.csv").read_text()
    return result.steps, result.digest, (best.value, best.steps), files, averaged, history, log
