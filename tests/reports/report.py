"""What a report is, the list of all, and how a situation is tried: in every engine, killed and resumed.

A situation is written anew: it has the cause that the report names, and none of its code.
"""

import functools
import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import phalanx
from tests.seen import checksum
from tests.state.runs import killed

THEMES = (
    "Workers", "Gradients", "Samples", "Random numbers", "Schedules", "Buffers", "Evaluations", "Resuming", "Code",
    "Errors", "Ends",
)  # fmt: skip
REPORTS = []
ROUNDING = 1e-12  # of float64, where a sum is added in another order: any other mistake is larger by far


@dataclass(frozen=True)
class Report:
    """One report, or several of the same cause.

    Parameters
    ----------
    theme : str
        One of ``THEMES``.
    close : float or None
        How near to the right value a situation's has to be; 0: its bits. None: a test, which has no value.
    links : str
        As "owner/repository#number", with blanks between them.
    program : callable
        A situation, or the test of a refusal or of an end; ``wrong`` and ``here`` say what went wrong there, and what
        phalanx does.
    """

    theme: str
    close: float | None
    links: str
    program: Callable[..., Any]

    @property
    def name(self):
        """Of the program, as words."""
        return self.program.__name__.removeprefix("test_").replace("_", " ")


@dataclass(frozen=True)
class Case:
    """A recipe and its right value, which was made without it.

    Parameters
    ----------
    recipe : Recipe
    right : Any
        Numbers, tensors, and containers of them.
    seen : callable
        ``seen(result, options)``: the value of a run.
    options : callable
        Returns what ``train`` is given, anew for each run.
    stops : tuple of int
        After so many steps the run goes on from a snapshot; after the first a worker is killed, too.
    """

    recipe: phalanx.Recipe
    right: Any
    seen: Callable[..., Any] = field(default=lambda result, options: outcome(result.model, result.loss_history))
    options: Callable[[], dict[str, Any]] = dict
    stops: tuple[int, ...] = (3,)


def outcome(model, losses):
    """What a loop and a run both come to."""
    return {"losses": list(losses), "weights": {name: each.detach() for name, each in model.named_parameters()}}


def report(theme, close, links):
    """Note a function as the program of a report."""
    assert theme in THEMES

    def noted(program):
        REPORTS.append(Report(theme, close, links, program))
        return program

    return noted


def said(name, text):
    """A decorator that writes a sentence to a function."""

    def write(program):
        setattr(program, name, text)
        return program

    return write


wrong, here, not_yet = (functools.partial(said, name) for name in ("wrong", "here", "not_yet"))


class Noted:
    """A callback that notes something of each step, and goes on with its list when the run does."""

    def __init__(self, what):
        self.what, self.rows, self.loaded = what, [], []

    def begin(self, run):
        self.rows, self.loaded = self.loaded, []

    def step(self, report):
        self.rows.append(self.what(report))

    def state(self):
        return {"rows": list(self.rows)}

    def load(self, state):
        self.loaded = list(state["rows"])


def noting(what):
    """Options and value of a situation that is about something of each step."""
    return {
        "options": lambda: {"callbacks": [Noted(what)]},
        "seen": lambda result, options: options["callbacks"][0].rows,
    }


def leaves(value, path=""):
    """What a value consists of, by path."""
    if isinstance(value, Mapping):
        value = list(value.items())
        yield from ((f"{path}.{name}{rest}", leaf) for name, each in value for rest, leaf in leaves(each))
    elif isinstance(value, (list, tuple)):
        yield f"{path}.length", len(value)
        yield from (
            (f"{path}[{number}]{rest}", leaf) for number, each in enumerate(value) for rest, leaf in leaves(each)
        )
    else:
        yield path, value


def differences(value, right, close=0.0):
    """The paths at which two values are farther apart than ``close``, or have other bits."""
    mine, wanted = dict(leaves(value)), dict(leaves(right))
    paths = {**mine, **wanted}
    return [path for path in paths if not alike(mine.get(path), wanted.get(path), close)]


def alike(one, other, close):
    """Whether two leaves are the same, or near enough."""
    if checksum(one) == checksum(other):
        return True
    if not close or type(one) is not type(other) or getattr(one, "shape", ()) != getattr(other, "shape", ()):
        return False
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=close, abs_tol=close)
    return hasattr(one, "shape") and bool(((one - other).abs() <= close * (1 + other.abs())).all())


def ways(case, folder):
    """Each way to do it, with its result and the options that it had."""
    alone = {"engine": "inline"}
    for name, given in {"inline": alone, "two workers": in_workers(2), "three workers": in_workers(3)}.items():
        options = case.options()
        yield name, case.recipe.train(**given, **options), options
    options = case.options()
    yield "a worker killed", bereft(case, options), options
    options = case.options()
    yield "killed and resumed", resumed(case, folder, options), options


def in_workers(count):
    """Options for so many worker processes."""
    return {"engine": "processes", "workers": count}


def bereft(case, options, how=signal.SIGKILL):
    """A run that loses a worker in its middle."""
    with case.recipe.start(**in_workers(3), **options) as run:
        for told in run:
            if told.step == case.stops[0] - 1:
                os.kill(run.worker_pids[1], how)
        result = run.result()
    assert any(each.kind == "death" for each in result.incidents), "nobody died"
    return result


def resumed(case, folder, options):
    """A run that is left as SIGKILL leaves it, a step behind its own chain, and goes on with other workers."""
    for stop in case.stops:
        with case.recipe.start(**in_workers(2), run_dir=folder, snapshot_every=case.stops[0], **case.options()) as run:
            for told in run:
                if told.step == stop:
                    break
        killed(folder, stop)
    return case.recipe.train(**in_workers(3), run_dir=folder, **options)


def check(case, folder, close):
    """Fail where a way comes to another value than the right one, or to other bits than inline."""
    first = None
    for way, result, options in ways(case, folder):
        value = case.seen(result, options)
        bits = {"digest": result.digest, "losses": result.loss_history, "value": value}
        assert differences(value, case.right, close) == [], f"{way}: {value} is not {case.right}"
        first = first or bits
        assert differences(bits, first) == [], f"{way} and inline are not the same run"
