"""Recipes for accelerators, and what runs on the fake ones of ``tests.accelerator`` end in."""

import dataclasses
import pathlib

import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.engines.devices import buckets
from phalanx.engines.devices.transport import Transport
from tests.families import ADAMW, FAMILIES

MLP = FAMILIES["mlp"]


def named(count):
    return [f"fake:{number}" for number in range(count)]


def trained(recipe, count, **options):
    """Digest and losses of a run on so many devices."""
    result = recipe.train(devices=named(count), **options)
    return result.digest, result.loss_history


def deep(width=48, layers=8):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)], nn.Linear(width, 3))


def deep_norm():
    return nn.Sequential(nn.BatchNorm1d(48), *deep())


def deep_recipe(replicas, **more):
    x = torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
    given = {"make_model": deep, "data": (x, torch.arange(48) % 3), "loss_fn": F.cross_entropy}
    return phalanx.Recipe(**{**given, "replicas": replicas, "batch_size": 24, "steps": 6, **more})


def dropping():
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


def noisy(replicas=6):
    return MLP.recipe(replicas, batch_size=18, steps=3, drop_last=True, make_model=dropping, max_norm=0.1)


def notes(folder):
    """What workers noted, by the device that they compute on."""
    return {path.name: path.read_text().splitlines() for path in pathlib.Path(folder).iterdir()}


class Noting:
    """A loss that notes things of its process in a file for each device, at the first replica of a step there."""

    def __init__(self, folder, look, loss_fn=F.cross_entropy):
        self.folder, self.look, self.loss_fn, self.step = str(folder), look, loss_fn, -1

    def __call__(self, output, target):
        if phalanx.current_step() > self.step:
            self.step = phalanx.current_step()
            with (pathlib.Path(self.folder) / str(output.device)).open("a") as file:
                file.write(f"{self.look()}\n")
        return self.loss_fn(output, target)


class Done:
    """A work that nobody has to wait for."""

    def wait(self):
        pass


def gathered_and_not_waited_for(patch):
    """The mean is used before it has come from all."""
    gather = Transport.gather

    def begun(*facts):
        gather(*facts)
        return Done(), None, None

    patch.setattr(Transport, "gather", begun)


def noisy_adam(make_model=dropping):
    return dataclasses.replace(noisy(), make_model=make_model, optimizer=ADAMW, steps=5)


def with_names(output, target):
    loss = F.cross_entropy(output, target)
    return {"loss": loss, "twice": 2 * loss.detach()}


def many_buckets(patch):
    """No fault."""
    patch.setattr(buckets, "BUCKET", 4 * 48 * 48)
