"""Simulated runs over several hosts: the real agreement, joining, state transfer and incarnations, all from one seed.

Real are ``Agreement``, ``Beacon``, ``Members``, ``World``, ``Gloo``, ``Distributed`` and ``Loop``. Below them are a
simulated net (``net``) and folder (``disk``), and in place of training a machine of integers (``training``).
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import gc
import itertools
import math
import signal
from types import SimpleNamespace

from greenlet import getcurrent

from phalanx.checkpoint import directory
from phalanx.definition.described import CODE, OPTIONS
from phalanx.definition.evaluation import Evaluation
from phalanx.engines.hosts import beacon, driver, gloo, members, stores, world
from phalanx.errors import PhalanxError
from phalanx.plan.membership import quorum
from phalanx.plan.rounds import Rounds
from phalanx.run.loop import Loop
from phalanx.seams import Observer
from phalanx.seams.records import Progress, RunOptions, Seen
from phalanx.surroundings import interrupts
from tests.simulation.disk import MOUNTS, Disk, Path
from tests.simulation.net import Group, Net, Process, Store, address_of
from tests.simulation.replacing import replaced
from tests.simulation.schedule import Schedule
from tests.simulation.training import REPLICAS, SECONDS, Framework, Machine, sequence

PORT = 29500
IMPORT = 0.25  # seconds until a process that starts again asks for the others; its predecessor's port is free then
LOST_AFTER = 1.0  # seconds
WATCHED = 2  # steps from one evaluation to the next
EVALUATION = Evaluation({"state": abs}, [0], every_steps=WATCHED)  # its value is the state
THAWED = 12.0  # seconds after which what is frozen goes on, so that it can say why it ends
LONGEST = 120.0  # seconds until everybody has ended
MOST_ACTIONS, FAULTS = 6_000, 3  # of a run; with a seed
CALM = 5.0  # seconds without trouble after which nobody may be lost: as long as a connection takes, and a silence
MODULES = beacon, members, gloo, stores, world, driver, Machine, Store, Group
# Waits are longer here, so that there are fewer actions to strike at.
COARSE = {
    "BEATS": 4, "PINGS": 2, "FAREWELLS": 2, "FAREWELL_SECONDS": 0.1, "TICK_SECONDS": 0.2, "BRIEF_SECONDS": 0.2,
    "POLL_SECONDS": 0.2, "CONNECTED": datetime.timedelta(seconds=3), "ANSWER_SECONDS": 1.0, "WAKING_SECONDS": 0.2,
}  # fmt: skip
HOST = "caller", "worker", "beacon"  # processes of a host
STRUCK = {  # by each fault of a host
    "kill": HOST[:2],
    "crash": HOST,  # so that nobody says that they ended
    "mute": ("beacon",),
    "halt": ("beacon",),  # stopped, alone
    "fall": ("worker",),
    "freeze": ("caller",),
    "stop": HOST,
    "leave": ("caller",),  # SIGTERM came: it leaves after its step
    "interrupt": ("caller",),  # Ctrl-C is pressed
    "thaw": HOST,
    "start": ("caller",),  # if it has ended
}
ALONE = list(STRUCK)[:9]
# Faults of a datagram: lost, malformed, again, late, and of another version.
ONE = {"lose": "losing", "garble": "garbling", "repeat": "repeating", "delay": "delaying", "outdate": "outdating"}
LINKS = "cut", "deaf", "slow", "halve", *ONE  # faults of a link, both ways or one; two hosts are cut off from others
RARE = {  # drawn in place of others, so that those do not get rarer
    "halt": "mute", **dict.fromkeys(list(ONE)[1:], "lose"), "halve": "cut", **dict.fromkeys(MOUNTS[1:], MOUNTS[0]),
}  # fmt: skip
MENDS = {
    "start": "kill crash mute", "thaw": "freeze stop", "heal": "cut deaf slow", "unite": "halve",
    "remount": " ".join(MOUNTS),
}  # fmt: skip
FOLDER = {0: ("folder",)}  # in a script: all hosts see one


class Simulation(Observer):
    """A run over hosts, and all that befalls it.

    Parameters
    ----------
    size, steps : int
    script, seed
        As ``Schedule`` takes them. With every other seed there is a folder.
    """

    def __init__(self, size, steps, script, seed=None):
        self.size, self.steps = size, steps
        if seed is not None and seed % 2:
            script |= FOLDER
        self.schedule = Schedule(script, self.strike, seed, self.draw, most=MOST_ACTIONS)
        self.net, self.disk, self.states = Net(self.schedule), Disk(self.schedule), sequence(steps)
        self.folder = Path(self.disk) if 0 in script else None
        self.lives = [-1] * size
        self.runs = {}  # by process: what it has, what it was told, and how it ended
        self.leaving, self.interrupted, self.victims = set(), set(), set()
        self.signals = Own(self.schedule, interruptible)
        self.troubles = {}  # when something befell a host, or a link, last
        self.definition = SimpleNamespace(
            replicas=REPLICAS, total=steps, updates=steps, epochs=None, phases=None, rounds=Rounds(), stream=False,
            over_batch=bool, source=None, plan=SimpleNamespace(steps=steps), schedule_on=None, batch_size=8, seed=0,
            epoch_ended=bool, **dict.fromkeys((*CODE, *OPTIONS)),
        )  # fmt: skip

    def run(self):
        """Run until all have ended."""
        threads = SimpleNamespace(
            get_ident=lambda: getcurrent().name, main_thread=lambda: SimpleNamespace(ident="main")
        )
        few = {"_listening": lambda *_: None, "PROCESS": self.signals, "threading": threads}
        gc.disable()  # so that what is collected does not depend on what ran before
        try:
            with (
                replaced(MODULES, self.names()), replaced((interrupts, stores), few),
                replaced((directory,), self.disk.names()),
            ):  # fmt: skip
                for rank in range(self.size):
                    self.begin(rank)
                self.schedule.start(Process(-1, 0), "warden", self.ward)
                self.schedule.run()
        finally:
            gc.enable()
        return self

    def names(self):
        """What stands for what the code of this package imports, so that it meets the simulated net."""
        schedule, rank = self.schedule, lambda: self.schedule.process.rank
        return {
            **COARSE, **self.net.names(), "simulation": self, "Processes": Machine, "LEFT": [],
            "os": SimpleNamespace(
                environ={}, getpid=lambda: schedule.process.life, getppid=lambda: schedule.lives(self.parent())
            ),
            "state": lambda _: b"T" if self.parent() in schedule.frozen else b"S",
            "STORES": Own(schedule, collections.Counter), "RUNS": Own(schedule, collections.Counter),
            "newest_step": self.disk.newest_step,
            "surroundings": lambda: (rank(), self.size, address_of(0), PORT), "towards": lambda _: "",
            "ends": lambda address: (address_of(rank()), address), "host_name": lambda: f"host{rank()}",
            "open_framework": lambda *_, **__: self.runs[schedule.process].framework,
            "checks": SimpleNamespace(warn=bool), "presence": SimpleNamespace(own=bool),
            "recorded_environment": dict, "shared": lambda _: ({}, {}),
            "WARM": SimpleNamespace(prepare=bool, awake=True), "say": bool,
        }  # fmt: skip

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
        run = self.runs[process] = SimpleNamespace(
            world=None, engine=None, framework=Framework(), begun=math.inf, ended=math.inf,
            told=[], evaluated=[], computes=False, end=None, well=None,
        )  # fmt: skip
        self.schedule.wait(seconds=IMPORT if process.life else 0)
        try:
            run.world = world.World(SECONDS, LOST_AFTER)
            with contextlib.ExitStack() as undo:
                undo.push(run.world.failed)
                if self.folder is not None:
                    run.world.elect(self.folder)
                facts = self.definition, None, (), (0,), run.world, lambda _: Seen(Progress()), RunOptions()
                run.engine = driver.open_distributed(*facts)
                undo.pop_all()
            run.begun = self.schedule.now
            self.steps_of(process, run)
        except PhalanxError as error:
            run.end, run.well = error, self.wrongly_lost(process)
        except KeyboardInterrupt:
            run.end = "interrupted"
        run.ended = self.schedule.now
        for each in [process, *self.processes(process.rank, "worker")]:  # its threads and workers end with it
            self.schedule.kill(each)

    def steps_of(self, process, run):
        loop = Loop(self.definition, run.engine, (EVALUATION,), (self,))
        try:
            loop.complete()  # who joins may have a step to complete
            while not loop.finished and not run.engine.seen.leaving:
                loop.advance(None, watched=False)
                if process in self.leaving and run.engine.pause():
                    run.engine.seen.leaving = "SIGTERM came"
        finally:
            with interrupts.held():
                loop.end()
        run.end = "done" if loop.finished else "left"

    def step(self, report):
        """A caller is told of a step."""
        run = self.runs[self.schedule.process]
        self.schedule.wait()
        run.told.append((report.step, report.loss, run.world.members.number))

    def evaluated(self, metrics):
        """A caller is told of an evaluation."""
        self.runs[self.schedule.process].evaluated.append(metrics["state"])

    def wrongly_lost(self, process):
        """So many members that may go on with this one, all well for a while, while no others could go on instead."""
        mine = self.runs[process]
        if mine.engine is None:
            return None
        ranks = mine.world.members.ranks
        sets = [set(some) for size in range(len(ranks) + 1) for some in itertools.combinations(ranks, size)]
        apart = {link for link in self.net.cut if self.since(link) >= CALM}
        sets = [some for some in sets if not apart & set(itertools.permutations(some, 2))]
        able = [some for some in sets if self.may_go_on(mine.world.members, some)]
        for some in able:
            instead = process.rank not in some and all(self.takes_part(rank, mine, CALM) for rank in some)
            if instead and not self.well(some | {process.rank}):  # they could not hear this one
                return None
        with_me = [some for some in able if process.rank in some and self.well(some)]
        return next((some for some in with_me if all(self.takes_part(rank, mine) for rank in some)), None)

    def may_go_on(self, members, some):
        """Whether some members may go on without the others."""
        if members.folder is None or 2 * len(some) != len(members.ranks):
            return quorum(members.ranks, some)
        half = " ".join(map(str, sorted(some)))
        claim = self.disk.claim(members.run, members.number) or half
        return claim == half and not any(self.disk.faults[rank] for rank in some)

    def well(self, ranks):
        """Whether nothing befell these hosts, and the links between them, for a while, and they began together."""
        things = [(rank,) for rank in ranks] + list(itertools.permutations(ranks, 2))
        calm = min(map(self.since, things)) >= CALM
        newest = [self.runs.get(Process(rank, self.lives[rank])) for rank in ranks]
        begun = [math.inf if run is None else run.begun for run in newest]
        together = max(begun) - min(begun) < LOST_AFTER / 2 or self.schedule.now - max(begun) >= CALM
        return calm and together and not set(things) & (self.net.cut | self.net.slow)

    def since(self, thing):
        """Seconds since something befell a host or a link."""
        return self.schedule.now - self.troubles.get(thing, -math.inf)

    def takes_part(self, rank, mine, ago=0.0):
        """Whether the process of a host is in the same run, and lives, or did some seconds ago, or has done it."""
        lives = [Process(rank, life) for life in range(self.lives[rank] + 1)]
        worlds = [(process, self.runs[process].world) for process in lives if process in self.runs]
        same = [process for process, world in worlds if world and world.members.run == mine.world.members.run]
        if self.since((rank,)) < ago or lives[-1] not in same:  # it may have been started again meanwhile
            return self.since((rank,)) < ago and bool(same)
        process, run = lives[-1], self.runs[lives[-1]]
        parts = [each for each in self.processes(rank, "caller", "beacon") if each.life == process.life]
        moving = process in parts and not self.schedule.frozen & set(parts)
        recently = 0 <= self.schedule.now - run.ended < ago
        return run is mine or moving or recently or run.end == "done"

    def parent(self):
        """The caller of the beacon that acts."""
        return self.schedule.process._replace(part="caller")

    def strike(self, fault, *what):
        """Do a fault; returns whether it met anything."""
        struck = [what]
        if fault in ("halve", "unite"):
            struck = list(itertools.product(what, set(range(self.size)) - set(what)))
        if fault in STRUCK:
            strike = self.strike_host
        else:
            strike = self.disk.strike if fault in (*MOUNTS, "remount") else self.strike_link
        done = [each for each in struck if strike(fault, *each)]
        for each in done:
            self.troubles[each] = self.troubles[each[::-1]] = self.schedule.now
        return bool(done)

    def draw(self, random, _):
        """A fault now and then, until there were enough; what was done is often undone."""
        if random.random() > 0.012 or len(self.schedule.struck) >= FAULTS:
            return None
        undoing = [(mend, *done[1:]) for _, done in self.schedule.struck for mend, of in MENDS.items() if done[0] in of]
        if undoing and random.random() < 0.4:
            return random.choice(undoing)
        rank = random.randrange(self.size)
        other = (rank + random.randrange(1, self.size)) % self.size
        mounts = MOUNTS if self.folder is not None else ()
        fault = random.choice([fault for fault in (*ALONE, *LINKS, *mounts) if fault not in RARE])
        fault = random.choice((fault, *(rare for rare, like in RARE.items() if like == fault)))
        return (fault, rank, other) if fault in LINKS else (fault, rank)

    def processes(self, rank, *parts):
        """Processes of a host that live."""
        return sorted(each for each in self.schedule.living if each.rank == rank and each.part.split()[0] in parts)

    def strike_host(self, fault, rank):
        """Do a fault to processes of a host, or undo it."""
        struck = self.processes(rank, *STRUCK[fault])
        if fault == "start":
            if not struck:
                self.begin(rank)
            return not struck
        if fault in ("freeze", "stop", "halt", "thaw"):
            struck = [each for each in struck if (each in self.schedule.frozen) == (fault == "thaw")]
            self.schedule.frozen ^= set(struck)
        elif fault == "leave":
            self.leaving.update(struck)
        elif fault == "interrupt":
            self.interrupted.update(struck)
            for process in struck:
                self.signals.each[process].received(signal.SIGINT, None)
        else:
            self.victims.update(struck)
            for process in struck:
                self.schedule.kill(process)
        return bool(struck)

    def strike_link(self, fault, one, other):
        """Do a fault to what one host sends to another, or what both send, or undo it."""
        net, both = self.net, {(one, other), (other, one)}
        if fault in ONE:
            getattr(net, ONE[fault])[one, other] += 1
            return True
        if fault in ("heal", "unite"):
            struck = both & (net.cut | net.slow)
            net.cut -= both
            net.slow -= both
        else:
            broken = net.slow if fault == "slow" else net.cut
            struck = (both if fault in ("cut", "halve") else {(one, other)}) - broken
            broken |= struck
        return bool(struck)


def interruptible():
    """What a process knows of SIGINT when its run begins."""
    process = interrupts._Process()
    process.installed, process.before = True, signal.default_int_handler
    return process


class Own:
    """Of each simulated process its own, with its attributes and items; ``make`` makes it."""

    def __init__(self, schedule, make):
        vars(self).update(schedule=schedule, each=collections.defaultdict(make))

    def __getattr__(self, name):
        return getattr(self.each[self.schedule.process], name)

    def __setattr__(self, name, value):
        setattr(self.each[self.schedule.process], name, value)

    def __contains__(self, key):
        return key in self.each[self.schedule.process]

    def __getitem__(self, key):
        return self.each[self.schedule.process][key]

    def __setitem__(self, key, value):
        self.each[self.schedule.process][key] = value
