"""An automatic engine that moves as soon as it can."""

from phalanx.engines import selection
from phalanx.engines.processes.starter import WARM
from phalanx.frameworks.registry import open_framework


def hurry(monkeypatch, recipe):
    """Let runs of such recipes move to two workers after their first steps, however slowly the zygote imports."""
    prepare = WARM.prepare

    def prepare_and_wait(*given):
        prepare(*given)
        WARM.zygote()._ask({"end": 0})  # answered once it has imported what it was told to

    monkeypatch.setattr(selection, "START_SECONDS", 0.0)
    monkeypatch.setattr(type(open_framework(recipe).sharing), "moving_seconds", -1.0)
    monkeypatch.setattr("phalanx.engines.selection.usable_cores", lambda: 2)
    monkeypatch.setattr(WARM, "prepare", prepare_and_wait)


def turn_back(monkeypatch):
    """Let workers seem slower than one process."""
    monkeypatch.setattr(selection.Auto, "_alone", property(lambda self: -1.0, lambda self, value: None), raising=False)


def moves(recipe, **options):
    """How many workers each step had, and the result."""
    with recipe.start(**options) as run:
        counts = [run._engine.workers for _ in run]
    return counts, run.result()
