"""Losses over the whole batch over hosts: all that can be seen is as in one process, whoever falls."""

import pytest

import phalanx
from tests.exactness.test_over_batch import RECIPES, seen_of
from tests.hosts.worlds import world
from tests.over_batch import KINDS, recipe, trained
from tests.sampling import sample
from tests.seen import compare

CODE = """
from tests.exactness.test_over_batch import RECIPES, seen_of
from tests.hosts.test_seen import Falls
from tests.over_batch import KINDS, recipe, trained
kind, replicas, changes = RECIPES[{name!r}]
happens, options = Falls({kill}), dict(workers={workers}, deadline_seconds=30.0)
tried(lambda: seen_of(recipe(kind, replicas, **changes), happens, **options).rows)
"""
CASES = {
    "moco": (2, 4, []),
    "clip": (2, 2, []),
    "contrasted": (3, 3, []),
    "parts": (3, 3, []),
    "empty": (3, 6, []),  # hosts and workers without a sample
    "killed": (2, 4, [(1, 1, 0), (0, 2, 1)]),
}


@pytest.mark.longest
@pytest.mark.filterwarnings("ignore:batch_size is")
@pytest.mark.parametrize("case", sample("over the batch on hosts", CASES, 2))
def test_hosts(case):
    """Two and three hosts, with a worker or several each, with empty replicas, and with workers that are killed."""
    size, workers, kill = CASES[case]
    name = "moco" if case == "killed" else case
    kind, replicas, changes = RECIPES[name]
    wanted = seen_of(recipe(kind, replicas, **changes), engine="inline")
    for [rows] in world(CODE.format(name=name, kill=kill, workers=workers), size):
        assert isinstance(rows, dict), rows
        assert compare(rows, wanted) == []


def uneven(kind, few):
    """A recipe whose first two replicas have six samples of an epoch each, and the other two so ``few``."""

    def rows(shard, shards):
        for at in range(few if int(shard) > 1 else 6):
            yield tuple(column[shards * at + int(shard)] for column in KINDS[kind]["data"])

    return recipe(kind, 4, data=phalanx.Stream(rows, shards=4), batch_size=8, steps=None, epochs=2)


UNEVEN = """
from tests.hosts.test_over_batch import uneven
from tests.over_batch import trained
tried(lambda: trained(uneven({kind!r}, {few}), workers={workers}, deadline_seconds=30.0))
"""


@pytest.mark.longest
@pytest.mark.parametrize(("kind", "few", "workers"), [("contrasted", 2, 4), ("simclr", 2, 2), ("contrasted", 0, 2)])
def test_a_host_whose_shards_end_first(pair, kind, few, workers):
    """It has no sample of the last steps, or of none, and computes the loss of all all the same."""
    assert pair(UNEVEN.format(kind=kind, few=few, workers=workers)) == [[[*trained(uneven(kind, few))]]] * 2
