"""What functools wraps travels to workers from a script, too, where nothing of it can be imported."""

import subprocess
import sys

import pytest

SCRIPT = """
import functools, torch, phalanx
from torch import nn

@functools.lru_cache
def table(count):
    return table(count - 1) * 2.0 if count > 3 else torch.ones(6)

class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 3)

    @functools.cached_property
    def scale(self):
        return torch.cos(torch.arange(6.0))

    def forward(self, x):
        return self.body(x * self.scale)

@functools.singledispatch
def doubled(value):
    return value

@doubled.register
def _(value: torch.Tensor):
    return value * 2

x, y = torch.randn(48, 6, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3
recipe = phalanx.Recipe(
    {model}, (x, y), None, forward_fn=lambda model, batch: nn.functional.cross_entropy(model({inputs}), batch[1]),
    replicas=3, batch_size=12, steps=4,
)
print(*(recipe.train(workers=workers, engine=engine, progress=False).digest for engine, workers in {ways}))
"""
LINEAR = "lambda: nn.Linear(6, 3)"
WAYS = [("inline", 1), ("processes", 2)]


def digests(model, inputs):
    """What a script ends in inline and with two workers."""
    code = SCRIPT.format(model=model, inputs=inputs, ways=WAYS)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert not run.returncode, run.stderr
    return run.stdout.split()


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "inputs"),
    [(LINEAR, "batch[0] * table(6)"), ("Wrapped", "batch[0]"), (LINEAR, "doubled(batch[0])")],
    ids=["lru_cache", "cached_property", "singledispatch"],
)
def test_what_functools_wraps_travels(model, inputs):
    """A recursive cached function, a cached property and a dispatching function of a script: one digest."""
    one, two = digests(model, inputs)
    assert one == two


@pytest.mark.long
def test_another_factor_is_another_digest():
    """The same script without the cached function's values ends elsewhere: the digests above can differ."""
    assert digests(LINEAR, "batch[0] * table(6)") != digests(LINEAR, "batch[0] * table(3)")
