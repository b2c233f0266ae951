"""Of a long list of cases every run tries some, drawn by a seed that is printed; a campaign tries all of them.

The cases that were drawn are marked "sampled", the others "campaign": ``make test`` leaves the latter out, and
``make chaos`` runs both, whatever the seed. ``PHALANX_SEED=... make test`` draws the same cases again. So it is with
tests that take long, as they start interpreters, hosts or compilers: of those of a folder that take more than a second
(marked "long") every run tries one in twelve, of all that take more than eight (marked "longest") one in sixteen, and
of their cases one in four. Of a test marked ``cases(count)`` every run tries so many cases. A file that is named on the
command line runs all of them.
"""

import itertools
import os
import random

import pytest

# In the environment, so that every process of pytest-xdist collects the same cases.
SEED = int(os.environ.get("PHALANX_SEED") or random.SystemRandom().randrange(1 << 30))
os.environ["PHALANX_SEED"] = str(SEED)
LONG, LONGEST, CASES = 12, 16, 4  # one in so many is drawn


def generator(name):
    """Random numbers that follow from the seed and from what they are for."""
    return random.Random(f"{SEED} {name}")


def marked(case, drawn):
    """A case, which may be several values or a ``pytest.param``, with the mark that says whether it was drawn."""
    mark = pytest.mark.sampled if drawn else pytest.mark.campaign
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, mark], id=case.id)
    return pytest.param(*values(case), marks=mark)


def sample(name, cases, count):
    """All cases, so many of them drawn; a case that is a tuple has several values."""
    cases = list(cases)
    chosen = set(generator(name).sample(range(len(cases)), count))
    return [marked(case, index in chosen) for index, case in enumerate(cases)]


def rotate(items):
    """Draw tests that take long, and cases of those and of long lists; see the head of this file.

    Cases that an earlier draw has left out stay so.
    """
    groups = {}
    for item in items:
        if any(map(item.get_closest_marker, ("longest", "long", "cases"))) and not left_out(item):
            test = item.nodeid.split("[")[0]
            groups.setdefault(group(item, test), {}).setdefault(test, []).append(item)
    for name, tests in groups.items():
        rate = {"listed": 1, "longest": LONGEST}.get(name.removeprefix("accelerator: "), LONG)
        drawn = generator(name).sample(sorted(tests), -(-len(tests) // rate))
        for test, cases in tests.items():
            chosen = some(test, cases) if test in drawn else []
            for case in cases:
                case.add_marker("sampled" if case in chosen else "campaign")


def group(item, test):
    """What a test is drawn from: what takes longest, what takes long in its folder, or "listed", all of which run."""
    if item.get_closest_marker("longest"):
        name = "longest"
    else:
        name = test.split("::")[0].rpartition("/")[0] if item.get_closest_marker("long") else "listed"
    return f"accelerator: {name}" if item.get_closest_marker("accelerator") else name  # these run apart


def left_out(item):
    """Whether only campaigns try it."""
    return item.get_closest_marker("campaign")


def some(test, cases):
    """Of the cases of a test as many as its mark ``cases`` says, or one in four."""
    mark = cases[0].get_closest_marker("cases")
    count = mark.args[0] if mark else -(-len(cases) // CASES)
    cases = sorted(cases, key=lambda case: case.nodeid)
    return generator(test).sample(cases, min(count, len(cases)))


def cover(name, rows, columns):
    """All pairs; as few of them are drawn as have each row and each column at least once.

    A row, or a column, that is a tuple has several values.
    """
    rows, columns = list(rows), list(columns)
    draw, count = generator(name), max(len(rows), len(columns))
    chosen = set(zip(repeated(draw, len(rows), count), repeated(draw, len(columns), count), strict=True))
    return [
        marked((*values(rows[row]), *values(columns[column])), (row, column) in chosen)
        for row, column in itertools.product(range(len(rows)), range(len(columns)))
    ]


def repeated(draw, size, count):
    """``count`` numbers below ``size``, each as often as any other, give or take one, in an order that is drawn."""
    numbers = []
    while len(numbers) < count:
        numbers += draw.sample(range(size), size)
    return numbers[:count]


def values(case):
    """The values of a case, of a row or of a column."""
    return case if isinstance(case, tuple) else (case,)
