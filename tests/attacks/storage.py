"""Attacks on what a run keeps on disk: forged snapshots, disks that are full for a while, deaths at any time."""

import functools
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import phalanx
from tests.state.runs import NEWER, ROOT, folder_of, norm_recipe
from tests.state.test_directory import FULL, events
from tests.state.test_shapes import strike

STEPS = 40
SECONDS = 60  # that a child may take on a busy machine
RESUME = """
import sys, warnings
import phalanx
from tests.state.runs import NEWER, norm_recipe
warnings.simplefilter("ignore")
try:
    phalanx.load(sys.argv[1])
    norm_recipe(NEWER + 1).train(run_dir=sys.argv[1], engine="inline")
except phalanx.PhalanxError:
    pass
"""
TRAIN = """
import sys
from tests.state.runs import norm_recipe
print("begins", flush=True)
norm_recipe(40).train(run_dir=sys.argv[1], snapshot_every=1, engine="inline")
"""


@functools.cache
def _wanted() -> str:
    return norm_recipe(STEPS).train(engine="inline").digest


def _started(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ended(script: str, *arguments: object) -> tuple[int, str, str]:
    with _started(script, *arguments) as child:
        try:
            out, err = child.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            return -9, "", f"took more than {SECONDS} s"
        return child.returncode, out, err


def forged(rng: random.Random) -> str | None:
    """Something in a snapshot is changed, with right checksums: it is read and resumed from, or refused."""
    with tempfile.TemporaryDirectory() as place:
        run_dir = pathlib.Path(place) / "run"
        norm_recipe(NEWER).train(run_dir=run_dir, engine="inline")
        for _ in range(rng.randint(1, 2)):
            try:
                strike(rng, folder_of(run_dir, NEWER))
            except (KeyError, TypeError, IndexError):  # the first change left nothing for another
                break
        kept = (folder_of(run_dir, NEWER) / "state.json").read_text()
        code, _, err = _ended(RESUME, run_dir)
    return None if not code else f"a forged snapshot ended a process with {code}: {err[-300:]}; its state: {kept}"


def full_disk(rng: random.Random) -> str | None:
    """No file may grow for some steps: the run ends in its digest, and its log has whole lines."""
    with tempfile.TemporaryDirectory() as place:
        room = rng.choice([0, 1, rng.randrange(400), rng.randrange(4000)])
        code, out, err = _ended(FULL, place, room)
        if code or out.split() != [_wanted()]:
            return f"with room for {room} bytes the run ended with {code}, {out!r}: {err[-300:]}"
        try:
            events(pathlib.Path(place) / "events.jsonl")
            found = phalanx.load(place).step
        except (ValueError, phalanx.PhalanxError) as error:
            return f"with room for {room} bytes: {error}"
    return None if found == STEPS else f"with room for {room} bytes the newest snapshot is of step {found}"


def killed(rng: random.Random) -> str | None:
    """The process is killed at any time, once or more: the next one ends in the digest, and the log can be read."""
    with tempfile.TemporaryDirectory() as place:
        run_dir = pathlib.Path(place) / "run"
        for _ in range(rng.randint(1, 2)):
            with _started(TRAIN, run_dir) as child:
                assert child.stdout is not None
                child.stdout.readline()
                time.sleep(rng.uniform(0, 1.5))
                child.kill()
        result = norm_recipe(STEPS).train(run_dir=run_dir, snapshot_every=1, engine="inline")
        if result.digest != _wanted():
            return f"resumed from {result.resumed_from}, the digest is another"
        lines = (run_dir / "events.jsonl").read_bytes().splitlines()
        torn = sum(not _whole(line) for line in lines)
        left = list((run_dir / "snapshots").glob(".tmp-*"))
        shutil.rmtree(run_dir)
    return None if torn <= 2 and not left else f"{torn} lines are torn, and {left} are left"


def _whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


ARMS: dict[str, Callable[[random.Random], str | None]] = {"forged": forged, "full_disk": full_disk, "killed": killed}
