"""Simulated runs over several hosts: the real agreement, joining, state transfer and incarnations, all from one seed.

Real are ``Agreement``, ``Beacon``, ``Members``, ``World``, ``Gloo``, ``Distributed`` and ``Loop``. Below them is a
simulated net (``net``), and in place of training a machine of integers (``training``).
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import signal
import threading
from types import SimpleNamespace

from greenlet import getcurrent

from phalanx.engines.hosts import beacon, driver, gloo, members, stores, world
from phalanx.errors import PhalanxError
from phalanx.plan import Rounds
from phalanx.plan.membership import quorum
from phalanx.run.loop import Loop
from phalanx.seams import Observer
from phalanx.seams.records import RunState
from phalanx.surroundings import interrupts
from tests.simulation import schedule
from tests.simulation.net import Group, Net, PrefixStore, Process, Store, address_of
from tests.simulation.training import REPLICAS, SECONDS, Framework, Machine, sequence

PORT = 29500
IMPORT = 0.25  # seconds until a process that starts again asks for the others; its predecessor's port is free then
LOST_AFTER = 1.0  # seconds
WATCHED = 2  # steps from one evaluation to the next
THAWED = 12.0  # seconds after which what is frozen goes on, so that it can say why it ends
INFINITE = float("inf")
LONGEST = 120.0  # seconds until everybody has ended
MOST_ACTIONS = 6_000  # of a run
CALM = 5.0  # seconds without trouble after which nobody may be lost: as long as a connection takes, and a silence
# Waits are longer here, so that there are fewer actions to strike at.
COARSE = [
    (beacon, "BEATS", 4), (beacon, "FAREWELLS", 2), (beacon, "FAREWELL_SECONDS", 0.1), (members, "TICK_SECONDS", 0.2),
    (world, "BRIEF_SECONDS", 0.2), (world, "CONNECTED", datetime.timedelta(seconds=3)), (world, "POLL_SECONDS", 0.2),
    (stores, "POLL_SECONDS", 0.2), (stores, "ANSWER_SECONDS", 1.0), (driver, "WAKING_SECONDS", 0.2),
]  # fmt: skip
ALONE = "kill", "crash", "mute", "fall", "freeze", "stop", "leave", "interrupt"  # faults of a host
LINKS = "cut", "deaf", "slow", "lose"  # faults of a link
MENDS = {"start": "kill crash mute", "thaw": "freeze stop", "heal": "cut deaf slow"}


class Simulation(Observer):
    """A run over hosts, and all that befalls it.

    Parameters
    ----------
    size, steps : int
    script, seed
        As ``Schedule`` takes them.
    faults : int
        How many are drawn at most.
    """

    def __init__(self, size, steps, script, seed=None, faults=3):
        self.size, self.steps, self.faults = size, steps, faults
        self.schedule = schedule.Schedule(script, self.strike, seed, self.draw, most=MOST_ACTIONS)
        self.net, self.states = Net(self.schedule), sequence(steps)
        self.lives = [-1] * size
        self.runs, self.told, self.ends = {}, {}, {}  # by process: what it has, the steps it was told, how it ended
        self.wrong = {}  # by process that ended by an error: members that were well, so that it need not have
        self.leaving, self.victims = set(), set()
        self.interrupted, self.signals = set(), Signals(self.schedule)
        self.troubles = {}  # when something befell a host, or a link, last
        self.definition = SimpleNamespace(
            replicas=REPLICAS, total=steps, updates=steps, epochs=None, phases=None, rounds=Rounds(), stream=False,
            source=None, plan=SimpleNamespace(steps=steps), schedule_on=None, batch_size=8, epoch_ended=bool,
        )  # fmt: skip

    def run(self):
        """Run until all have ended."""
        with self.simulated():
            for rank in range(self.size):
                self.begin(rank)
            self.schedule.start(Process(-1, 0), "warden", self.ward)
            self.schedule.run()
        return self

    def begin(self, rank):
        """Start the process of a host."""
        self.lives[rank] += 1
        process = Process(rank, self.lives[rank])
        self.schedule.start(process, "main", lambda: self.train(process))

    def worker(self, body):
        """Start a worker of the process that acts."""
        caller = self.schedule.process
        self.runs[caller].computes = True
        process = Process(caller.rank, next(self.net.count), f"worker of {caller.life}")
        self.schedule.start(process, "main", body)
        return process

    def ward(self):
        """Let go on what is frozen for long."""
        while any(self.schedule.lives(Process(rank, life)) for rank, life in enumerate(self.lives)):
            self.schedule.wait(seconds=THAWED)
            for rank in range(self.size):
                self.strike("thaw", rank)

    def train(self, process):
        """What a caller does: as ``Recipe.train``."""
        run = SimpleNamespace(world=None, engine=None, framework=Framework(), begun=INFINITE, ended=INFINITE)
        run.computes, run.evaluated = False, []
        self.told[process], self.runs[process] = [], run
        self.schedule.wait(seconds=IMPORT if process.life else 0)
        try:
            run.world = world.World(SECONDS, LOST_AFTER)
            with contextlib.ExitStack() as undo:
                undo.push(run.world.failed)
                run.engine = driver.open_distributed(self.definition, None, (), (0,), run.world, lambda _: RunState())
                undo.pop_all()
            run.begun = self.schedule.now
            self.steps_of(process, run)
        except PhalanxError as error:
            self.ends[process] = error
            self.wrong[process] = self.wrongly_lost(process)
        except KeyboardInterrupt:
            self.ends[process] = "interrupted"
        run.ended = self.schedule.now
        for each in [process, *self.processes(process.rank, "worker")]:  # its threads and workers end with it
            self.schedule.kill(each)

    def steps_of(self, process, run):
        loop = Loop(self.definition, run.engine, (Watch(),), (self,))
        try:
            loop.complete()  # who joins may have a step to complete
            while not loop.finished and not run.engine.run_state.leaving:
                loop.advance(None, watched=False)
                if process in self.leaving and run.engine.pause():
                    run.engine.run_state.leaving = "SIGTERM came"
        finally:
            with interrupts.held():
                loop.end()
        self.ends[process] = "done" if loop.finished else "left"

    def step(self, report):
        """A caller is told of a step."""
        process = self.schedule.process
        self.schedule.wait()
        self.told[process].append((report.step, report.loss, self.runs[process].world.members.number))

    def evaluated(self, metrics):
        """A caller is told of an evaluation."""
        self.runs[self.schedule.process].evaluated.append(metrics["state"])

    def happened(self, incident):
        """Nothing is to be done."""

    def wrongly_lost(self, process):
        """So many members that may go on with this one, all well for a while, while no others could go on instead."""
        mine = self.runs[process]
        if mine.engine is None:
            return None
        ranks = mine.world.members.ranks
        sets = [set(some) for size in range(len(ranks) + 1) for some in itertools.combinations(ranks, size)]
        apart = {link for link in self.net.cut if self.since(link) >= CALM}
        able = [some for some in sets if quorum(ranks, some) and not apart & set(itertools.permutations(some, 2))]
        for some in able:
            instead = process.rank not in some and all(self.takes_part(rank, mine, CALM) for rank in some)
            if instead and not self.well(some | {process.rank}):  # they could not hear this one
                return None
        with_me = [some for some in able if process.rank in some and self.well(some)]
        return next((some for some in with_me if all(self.takes_part(rank, mine) for rank in some)), None)

    def well(self, ranks):
        """Whether nothing befell these hosts, and the links between them, for a while, and they began together."""
        things = [(rank,) for rank in ranks] + list(itertools.permutations(ranks, 2))
        calm = min(map(self.since, things)) >= CALM
        newest = [self.runs.get(Process(rank, self.lives[rank])) for rank in ranks]
        begun = [INFINITE if run is None else run.begun for run in newest]
        together = max(begun) - min(begun) < LOST_AFTER / 2 or self.schedule.now - max(begun) >= CALM
        return calm and together and not set(things) & (self.net.cut | self.net.slow)

    def since(self, thing):
        """Seconds since something befell a host or a link."""
        return self.schedule.now - self.troubles.get(thing, -INFINITE)

    def takes_part(self, rank, mine, ago=0.0):
        """Whether the process of a host is in the same run, and lives, or did some seconds ago, or has done it."""
        process = Process(rank, self.lives[rank])
        run = self.runs.get(process)
        if self.since((rank,)) < ago:  # also one that was started again meanwhile
            return True
        if run is None or run.world is None or run.world.members.run != mine.world.members.run:
            return False
        parts = [each for each in self.processes(rank, "caller", "beacon") if each.life == process.life]
        moving = process in parts and not self.schedule.frozen & set(parts)
        recently = 0 <= self.schedule.now - run.ended < ago
        return run is mine or moving or recently or self.ends.get(process) == "done"

    def surroundings(self):
        return self.schedule.process.rank, self.size, address_of(0), PORT

    def getpid(self):
        return self.schedule.process.life + 1000 * self.schedule.process.rank

    def getppid(self):
        """For a beacon: its parent's number, 1 if that has ended."""
        parent = self.schedule.process._replace(part="caller")
        return 100_000 + parent.life if self.schedule.lives(parent) else 1

    @contextlib.contextmanager
    def simulated(self):
        """Inside, the code of this package that speaks to others meets the simulated net."""
        net, rank = self.net, lambda: self.schedule.process.rank
        torches = SimpleNamespace(PrefixStore=PrefixStore)
        things = [
            *COARSE, (Store, "net", net), (Group, "net", net), (Machine, "simulation", self), (gloo, "GROUP", Group),
            *[(module, "time", net.time) for module in (beacon, members, gloo, stores, world, driver)],
            *[(module, "select", net.select) for module in (beacon, members)],
            *[(module, "socket", net.socket) for module in (beacon, members)],
            *[(module, "c10d", torches) for module in (stores, world)],
            *[(module, "TCP", Store) for module in (stores, world)],
            (beacon, "os", SimpleNamespace(getpid=self.getpid, getppid=self.getppid)),
            (beacon, "stopped", lambda _: self.schedule.process._replace(part="caller") in self.schedule.frozen),
            (members, "subprocess", net.subprocess), (members, "presence", SimpleNamespace(own=bool)),
            (gloo, "LEFT", []), (stores, "secrets", net.secrets), (stores, "_listening", lambda *_: None),
            (stores, "STORES", Own(self.schedule)),
            (interrupts, "PROCESS", self.signals),
            (world, "RUNS", Own(self.schedule)), (world, "surroundings", self.surroundings),
            (world, "ends", lambda address: (address_of(rank()), address)), (world, "towards", lambda _: ""),
            (world, "_host", lambda: f"host{rank()}"), (world, "threading", net.threading),
            (driver, "Processes", Machine),
            (driver, "open_framework", lambda *_, **__: self.runs[self.schedule.process].framework),
            (driver, "checks", SimpleNamespace(warn=bool)), (driver, "recorded_environment", dict),
            (driver, "shared", lambda _: ({}, {})), (driver, "WARM", SimpleNamespace(prepare=bool, awake=True)),
        ]  # fmt: skip
        before = [(module, name, getattr(module, name)) for module, name, _ in things]
        gc.disable()  # so that what is collected does not depend on what ran before
        try:
            for module, name, thing in things:
                setattr(module, name, thing)
            yield
        finally:
            for module, name, thing in before:
                setattr(module, name, thing)
            gc.enable()

    def strike(self, fault, *what):
        """Do a fault; returns whether it met anything."""
        done = getattr(self, fault)(*what)
        if done:
            self.troubles[what] = self.troubles[what[::-1]] = self.schedule.now
        return done

    def draw(self, random, _):
        """A fault now and then, until there were enough; what was done is often undone."""
        if random.random() > 0.012 or len(self.schedule.struck) >= self.faults:
            return None
        undoing = [(mend, *done[1:]) for _, done in self.schedule.struck for mend, of in MENDS.items() if done[0] in of]
        if undoing and random.random() < 0.4:
            return random.choice(undoing)
        rank = random.randrange(self.size)
        other = (rank + random.randrange(1, self.size)) % self.size
        fault = random.choice((*ALONE, *LINKS))
        return (fault, rank, other) if fault in LINKS else (fault, rank)

    def processes(self, rank, *parts):
        """Processes of a host that live."""
        return sorted(each for each in self.schedule.living if each.rank == rank and each.part.split()[0] in parts)

    def killed(self, rank, *parts):
        found = self.processes(rank, *parts)
        self.victims.update(found)
        for process in found:
            self.schedule.kill(process)
        return bool(found)

    def kill(self, rank):
        """The caller, and its workers with it."""
        return bool(self.processes(rank, "caller")) and self.killed(rank, "caller", "worker")

    def crash(self, rank):
        """All processes of a host, so that nobody says that they ended."""
        return self.killed(rank, "caller", "worker", "beacon")

    def mute(self, rank):
        """The process beside a caller."""
        return self.killed(rank, "beacon")

    def fall(self, rank):
        """A worker."""
        return self.killed(rank, "worker")

    def frozen(self, frozen, rank, *parts):
        found = [each for each in self.processes(rank, *parts) if (each in self.schedule.frozen) != frozen]
        (self.schedule.frozen.update if frozen else self.schedule.frozen.difference_update)(found)
        return bool(found)

    def freeze(self, rank):
        """A caller is stopped."""
        return self.frozen(True, rank, "caller")

    def stop(self, rank):
        """All processes of a host are stopped."""
        return self.frozen(True, rank, "caller", "worker", "beacon")

    def thaw(self, rank):
        """They go on."""
        return self.frozen(False, rank, "caller", "worker", "beacon")

    def start(self, rank):
        """A process that has ended is started again."""
        if self.processes(rank, "caller"):
            return False
        self.begin(rank)
        return True

    def leave(self, rank):
        """SIGTERM came: the caller leaves after its step."""
        self.leaving.update(self.processes(rank, "caller"))
        return bool(self.processes(rank, "caller"))

    def interrupt(self, rank):
        """Ctrl-C is pressed."""
        found = self.processes(rank, "caller")
        for process in found:
            self.interrupted.add(process)
            self.signals.of(process).received(signal.SIGINT, None)
        return bool(found)

    def cut(self, one, other):
        """Nothing passes between two hosts."""
        return self.deaf(one, other) | self.deaf(other, one)

    def deaf(self, one, other):
        """Nothing passes from one host to another."""
        new = (one, other) not in self.net.cut
        self.net.cut.add((one, other))
        return new

    def slow(self, one, other):
        """What one host sends to another is late."""
        new = (one, other) not in self.net.slow
        self.net.slow.add((one, other))
        return new

    def lose(self, one, other):
        """One datagram is lost."""
        self.net.losing[one, other] += 1
        return True

    def heal(self, one, other):
        """The link is as before."""
        links = {(one, other), (other, one)}
        broken = links & (self.net.cut | self.net.slow)
        self.net.cut -= links
        self.net.slow -= links
        return bool(broken)


class Watch:
    """An evaluation every so many steps: its value is the state."""

    data, batch_size = (), 1

    def is_due(self, steps, epoch, *, epoch_ended):
        return steps % WATCHED == 0

    def following(self, steps, plan):
        return steps - steps % WATCHED + WATCHED

    def metrics(self, *, single):
        return SimpleNamespace(fold=lambda value: {"state": value})

    def full(self, name):
        return name


class Signals:
    """In place of ``interrupts.PROCESS``: of each simulated process its own."""

    def __init__(self, schedule):
        vars(self).update(schedule=schedule, each={})

    def of(self, process):
        """What a process knows of SIGINT."""
        if process not in self.each:
            own = self.each[process] = interrupts._Process()
            own.installed, own.before = True, signal.default_int_handler
        return self.each[process]

    def _mine(self):
        own = self.of(self.schedule.process)
        own.main = threading.get_ident() if getcurrent().name == "main" else None
        return own

    def __getattr__(self, name):
        return getattr(self._mine(), name)

    def __setattr__(self, name, value):
        setattr(self._mine(), name, value)


class Own(dict):
    """Of each simulated process its own; what is counted begins at 0."""

    def __init__(self, schedule):
        super().__init__()
        self.schedule = schedule

    def __contains__(self, key):
        return super().__contains__((self.schedule.process, key))

    def __getitem__(self, key):
        return self.get((self.schedule.process, key), 0)

    def __setitem__(self, key, value):
        super().__setitem__((self.schedule.process, key), value)
