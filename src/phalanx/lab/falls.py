"""Chaos over hosts: hosts fall and come back while a recipe trains, and the digest must be what it would have been.

Each host is a process with its workers, in a network namespace of its own where those can be made, else on loopback. A
fault counts once others have noticed it, and a recovery once the host has joined again: a campaign whose faults miss
proves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from phalanx.checkpoint.directory import newest_step
from phalanx.definition.plain import hashed
from phalanx.errors import RunError
from phalanx.lab.network import Network, why_not
from phalanx.recipe import Recipe

LOST_AFTER = 2.0
SECONDS = 90.0  # for anything that has to happen
MARGIN = 25  # steps before the end, in which no fault begins
MARK = "PHALANX_CAMPAIGN"
HOLD, ENOUGH = "hold", "enough"  # files that a member looks for: go slowly, as a host is down; nothing more comes
FULL, WORKER, LEAVES = "disk is full", "worker killed", "told to leave"
ON_HOSTS = ("killed", "process killed", "stopped", "process stopped", WORKER, LEAVES, FULL)
ON_LINKS = CUT, ONE_WAY = "cut off", "cut one way"
SNAPSHOT_EVERY = 5


class Fault(NamedTuple):
    """One fault of a run over hosts.

    Attributes
    ----------
    what : str
        One of ``ON_HOSTS`` and ``ON_LINKS``.
    host, step : int
        Whom it struck, and after which step.
    seconds : float
        Until the others had gone on.
    """

    what: str
    host: int
    step: int
    seconds: float


@dataclass
class Campaign:
    """A run over hosts under fire.

    Attributes
    ----------
    faults : list of Fault
        Those that others noticed, after which the run went on.
    joined : int
        Hosts that came back and were let in.
    right : bool
        Whether digest and losses are those of the undisturbed run, in every process that finished.
    problem : str
    """

    faults: list[Fault] = field(default_factory=list[Fault])
    joined: int = 0
    right: bool = False
    problem: str = ""


class Host:
    """A process of the run, and the lines that it has printed."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], errors: IO[bytes]) -> None:
        variables = {**os.environ, **environment}
        self.process = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL
        )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout, contextlib.suppress(ValueError):  # its last line was cut
            self.lines.extend(map(json.loads, self.process.stdout))

    @property
    def step(self) -> int:
        """The last one that it told of."""
        return max((line["step"] for line in list(self.lines) if "step" in line), default=-1)

    @property
    def workers(self) -> list[int]:
        """The processes of its workers."""
        return next((line["workers"] for line in reversed(list(self.lines)) if "workers" in line), [])

    def end(self) -> dict[str, Any]:
        """How it ended, once it has."""
        self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return self.lines[-1] if self.lines else {}


class Hosts:
    """All of them, to be struck."""

    def __init__(self, given: dict[str, Any], count: int, network: Network | None, folder: pathlib.Path) -> None:
        self._given, self._network, self._folder = json.dumps(given), network, folder
        self._errors = (folder / "errors").open("wb")
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        address = "127.0.0.1" if network is None else "10.77.0.1"
        self._world = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
        self.all = [self.begin(number) for number in range(count)]

    def begin(self, number: int) -> Host:
        """Start a host's process."""
        inside = self._network.inside(number) if self._network else []
        command = [*inside, sys.executable, "-m", "phalanx.cli.member", self._given]
        return Host(command, {**self._world, "RANK": str(number), MARK: f"{self._mark}-{number}-"}, self._errors)

    @property
    def step(self) -> int:
        """The newest that anybody told of."""
        return max(host.step for host in self.all)

    def heard(self) -> set[tuple[str, int, int]]:
        """All incidents that anybody told of: kind, who, and at which step."""
        lines = [line for host in self.all for line in list(host.lines) if "kind" in line]
        return {(line["kind"], line["who"], line["at"]) for line in lines}

    def pids(self, number: int | str = "") -> list[int]:
        """All processes of a host, or of all hosts."""
        found, mark = [], f"{MARK}={self._mark}-{number}{'-' if number != '' else ''}".encode()
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += [int(path.parent.name)] if mark in path.read_bytes() else []
        return found

    def signal(self, pids: Sequence[int], number: int) -> None:
        """Send a signal to processes at once."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def strike(self, what: str, host: int, other: int) -> Callable[[], object]:
        """Do a fault; returns what undoes it."""
        process, network = self.all[host].process.pid, self._network
        if what in ("killed", "process killed", WORKER, LEAVES):
            whom = {"killed": self.pids(host), WORKER: self.all[host].workers[:1]}.get(what, [process])
            self.signal(whom, signal.SIGTERM if what == LEAVES else signal.SIGKILL)
            return bool
        if what in ("stopped", "process stopped"):
            whom = self.pids(host) if what == "stopped" else [process]
            self.signal(whom, signal.SIGSTOP)
            return lambda: self.signal(whom, signal.SIGCONT)
        assert network is not None, "links are cut in namespaces only"
        if what == CUT:
            network.cut(host)
            return lambda: network.cut(host, heal=True)
        network.cut_one_way(host, other)
        return lambda: network.cut_one_way(host, other, heal=True)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something."""
        end = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > end:
                raise RunError(f"{what}: it did not happen within {SECONDS:.0f} s, at step {self.step}")
            time.sleep(0.02)

    def close(self) -> list[int]:
        """End what is left; returns what should not have been."""
        end = time.monotonic() + 5.0
        while (left := self.pids()) and time.monotonic() < end:
            time.sleep(0.05)
        self.signal(left, signal.SIGKILL)
        for host in self.all:
            host.process.wait()
        self._errors.close()
        return left


def trial(
    given: dict[str, Any], wanted: dict[str, str], steps: int, seed: int, count: int, most: int,
    show: Callable[[str], None] = lambda _: None,
) -> Campaign:  # fmt: skip
    """Train over ``count`` hosts while they are struck up to ``most`` times, and compare with the undisturbed result.

    Parameters
    ----------
    given : dict
        file, arguments and workers, as ``phalanx.cli.member`` takes them.
    wanted : dict
        digest and losses of the undisturbed run.
    steps : int
        How many it has.
    seed, count, most : int
    show : callable
        Gets a line for each fault.
    """
    done, draw = Campaign(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="phalanx-") as name, contextlib.ExitStack() as undo:
        network = None if why_not() else undo.enter_context(Network(count))
        folder = pathlib.Path(name)
        hosts = Hosts({**given, "folder": name, "lost_after": LOST_AFTER}, count, network, folder)
        try:
            hosts.until(lambda: hosts.step >= 0, "the first step")
            while len(done.faults) < most and hosts.step < steps - MARGIN:
                what = draw.choice(ON_HOSTS if network is None else ON_HOSTS + ON_LINKS)
                host, other = draw.sample(range(count), 2)
                begin = hosts.step + draw.randrange(1, 8)
                hosts.until(lambda begin=begin: hosts.step >= begin, f"step {begin}")
                _fill(hosts, done, folder) if what == FULL else _strike(hosts, done, folder, what, host, other)
                struck = done.faults[-1]
                show(f"seed {seed}, step {struck.step}: host {struck.host} {struck.what}, {struck.seconds:.1f} s")
            (folder / ENOUGH).touch()
            ends = [host.end() for host in hosts.all]
            done.right = all({**end, **wanted} == end for end in ends)
            done.problem = "" if done.right else f"the processes ended so: {ends}"
        except (RunError, OSError, subprocess.TimeoutExpired) as error:
            done.problem = f"{error}; {' '.join((folder / 'errors').read_text().split()[-60:])}"
        finally:
            if done.problem:
                hosts.signal(hosts.pids(), signal.SIGKILL)
            left = hosts.close()
        done.problem += f" processes {left} are left" if left and not done.problem else ""
    return done


def _strike(hosts: Hosts, done: Campaign, folder: pathlib.Path, what: str, host: int, other: int) -> None:
    """Strike once, see that others go on, and have who fell come back."""
    hold, began, step, before = folder / HOLD, time.monotonic(), hosts.step, hosts.heard()
    hold.touch()
    undone = hosts.strike(what, host, other)
    kind, whom = ("again", {-1}) if what == WORKER else ("lost", {host, other} if what == ONE_WAY else {host})
    hosts.until(lambda: any(new[0] == kind and new[1] in whom for new in hosts.heard() - before), f"{what}, noticed")
    who = next(new[1] for new in hosts.heard() - before if new[0] == kind and new[1] in whom)
    noticed = hosts.step
    hosts.until(lambda: hosts.step > noticed, f"{what} at host {host}: a step after it")
    done.faults.append(Fault(what, host, step, time.monotonic() - began))
    undone()
    if what != WORKER:
        hosts.all[who].end()
        before = hosts.heard()
        hosts.all[who] = hosts.begin(who)
        hosts.until(lambda: ("joined", who) in {new[:2] for new in hosts.heard() - before}, f"host {who} joins again")
        done.joined += 1
    hold.unlink()


def _fill(hosts: Hosts, done: Campaign, folder: pathlib.Path) -> None:
    """Have every write to a file fail, as on a full disk; see that the run goes on, and saves once there is room."""
    step = hosts.step  # the limit counts shared memory, too, which the first snapshot of an incarnation makes
    hosts.until(lambda: newest_step(folder / "run") > step, "a snapshot")
    began, step, saved = time.monotonic(), hosts.step, newest_step(folder / "run")
    limits = {host.process.pid: resource.prlimit(host.process.pid, resource.RLIMIT_FSIZE) for host in hosts.all}
    for pid, (_, most) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
    hosts.until(lambda: hosts.step > step + 2 * SNAPSHOT_EVERY, "going on without snapshots")
    if newest_step(folder / "run") > saved + SNAPSHOT_EVERY:  # one may have been under way
        raise RunError(f"{FULL}: snapshots were written all the same")
    for pid, limit in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    hosts.until(lambda: newest_step(folder / "run") > step + 2 * SNAPSHOT_EVERY, "a snapshot once there is room")
    done.faults.append(Fault(FULL, 0, step, time.monotonic() - began))


def campaign(
    recipe: Recipe, given: dict[str, Any], faults: int, seed: int, count: int, show: Callable[[str], None],
    evaluation: Any = None,
) -> list[Campaign]:  # fmt: skip
    """Runs with the seeds ``seed``, ``seed + 1``, ... until so many faults have struck, or one run went wrong."""
    quiet = recipe.train(engine="inline", progress=False, evaluation=evaluation)
    wanted = {"digest": quiet.digest, "losses": hashed(json.dumps(quiet.loss_history)).hex()}
    done: list[Campaign] = []
    while (remaining := faults - sum(len(one.faults) for one in done)) > 0:
        done.append(trial(given, wanted, quiet.steps, seed + len(done), count, remaining, show))
        if not done[-1].faults and not done[-1].problem:
            done[-1].problem = f"nothing struck: the recipe has {quiet.steps} steps; give it some {4 * MARGIN}"
        if done[-1].problem:
            break
    return done


def without_links() -> str:
    """Why links cannot be cut here; "" if they can."""
    return f"Hosts are processes, and links cannot be cut: {why}." if (why := why_not()) else ""
