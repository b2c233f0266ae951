"""Hosts add up in groups, and a worker or a host dies in the middle of that: others go on to one process's digest."""

import json
import os
import pathlib
import signal
import sys

import pytest

from phalanx.engines.hosts.board import Network
from phalanx.engines.hosts.gloo import Gloo
from phalanx.engines.hosts.pieces import Pieces
from phalanx.plan import levels
from tests.devices.planting import CALLER
from tests.families import FAMILIES
from tests.hosts.network import output
from tests.hosts.test_falls import OneHost
from tests.hosts.worlds import free_port

pytestmark = pytest.mark.timeout(240)
HOSTS, REPLICAS, STEPS, STRUCK = 4, 5, 12, 5  # a group of two hosts has two sums, so groups gather, too
JOB = """
import json, sys
import phalanx
from phalanx.plan import levels
from tests.devices.planting import Planted
from tests.hosts import test_groups_fall
levels.MANY = test_groups_fall.HOSTS  # planted
recipe = test_groups_fall.recipe()
recipe = recipe.replace(make_model=Planted(recipe.make_model, test_groups_fall.Dies(*sys.argv[1:])))
try:
    result = recipe.train(workers=4, lost_after=2.0, deadline_seconds=20.0)
    print(json.dumps([result.digest, [each.kind for each in result.incidents]]))
except phalanx.PhalanxError as error:
    print(json.dumps([str(error), []]))
"""


def recipe():
    return FAMILIES["conv_norm"].recipe(REPLICAS, steps=STEPS)


class Dies:
    """A fault of workers: hosts are many, and at a moment of a step one of them dies, once.

    ``moment``: in which level, and what it does; ``before`` or ``after`` it sends; ``whole``: with its host.
    """

    def __init__(self, moment, when, whole, folder):
        self.moment, self.when, self.whole, self.folder = moment, when, whole, folder

    def __call__(self, patch):
        patch.setattr(levels, "MANY", HOSTS)
        level, _, name = self.moment.rpartition(" ")
        owner = {"deal": Pieces, "gather": Pieces, "tell": Gloo, "note": Network}[name]
        name = "_gather_by_doubling" if name == "tell" else name
        original, calls = getattr(owner, name), []

        def struck(own, *arguments):
            if owner is Pieces and (own._level.ranks in ((0, 1), (2, 3))) != (level == "inner"):
                return original(own, *arguments)
            calls.append(1)
            found = original(own, *arguments) if self.when == "after" else None
            if os.environ["RANK"] == "1" and len(calls) > STRUCK:
                self.die()
            return original(own, *arguments) if self.when == "before" else found

        patch.setattr(owner, name, struck)

    def die(self):
        try:
            (pathlib.Path(self.folder) / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        if self.whole == "host":
            os.kill(int(os.environ[CALLER]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.longest
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("moment", "when", "whole"),
    [
        ("tell", "before", "worker"), ("inner deal", "after", "worker"), ("outer deal", "before", "worker"),
        ("outer deal", "after", "host"), ("outer gather", "before", "worker"), ("outer gather", "after", "worker"),
        ("inner gather", "before", "host"), ("inner gather", "after", "worker"), ("note", "before", "worker"),
    ],
)  # fmt: skip
def test_a_death_in_each_level(tmp_path, moment, when, whole):
    """In what hosts tell, in the sums of a group and between groups, and once the norm is there."""
    told = {"WORLD_SIZE": str(HOSTS), "MASTER_PORT": free_port()}
    with OneHost() as here:
        command = [sys.executable, "-c", JOB, moment, when, whole, str(tmp_path)]
        processes = [here.start(rank, *command, RANK=str(rank), **told) for rank in range(HOSTS)]
        living = [rank for rank in range(HOSTS) if whole == "worker" or rank != 1]
        found = {rank: json.loads(output(processes[rank], 200)[1].splitlines()[-1]) for rank in living}
    assert (tmp_path / "struck").exists()
    wanted = recipe().train(engine="inline").digest
    for digest, kinds in found.values():
        assert digest == wanted, found
        assert ("lost" if whole == "host" else "again") in kinds, found
