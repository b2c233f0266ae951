"""A GAN, whose discriminator and generator take turns within each step: two phases, one digest for any W.

python examples/gan.py
"""

import functools

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import phalanx

NOISE = 4
adam = functools.partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.999))


class Gan(nn.Module):
    """Learns a ring of points in the plane."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def judged(self, points: torch.Tensor, *, real: bool) -> torch.Tensor:
        logits = self.discriminator(points)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def discriminator_loss(model: Gan, batch: tuple[torch.Tensor]) -> torch.Tensor:
    (real,) = batch
    fake = model.generator(torch.randn(len(real), NOISE)).detach()
    return model.judged(real, real=True) + model.judged(fake, real=False)


def generator_loss(model: Gan, batch: tuple[torch.Tensor]) -> torch.Tensor:
    (real,) = batch
    return model.judged(model.generator(torch.randn(len(real), NOISE)), real=True)


angles = torch.rand(2048, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
ring = torch.stack([angles.cos(), angles.sin()], dim=1)
phases = [
    phalanx.Phase(discriminator_loss, parameters="discriminator", optimizer=adam, loss_takes="model"),
    phalanx.Phase(generator_loss, parameters="generator", optimizer=adam, loss_takes="model"),
]
recipe = phalanx.Recipe(Gan, (ring,), phases=phases, replicas=4, batch_size=256, epochs=100)

if __name__ == "__main__":
    alone, together = recipe.train(workers=1), recipe.train(workers=2)
    radius = alone.model.generator(torch.randn(1000, NOISE)).norm(dim=1)
    print(f"radius of what is drawn: {radius.mean():.2f} +- {radius.std():.2f}, of the ring: 1.00")
    print(f"losses: {', '.join(f'{name} {losses[-1]:.2f}' for name, losses in alone.phase_history.items())}")
    print(f"1 worker:  {alone.digest[:16]}\n2 workers: {together.digest[:16]}")
