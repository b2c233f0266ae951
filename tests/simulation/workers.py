"""A simulated host: the real engine, supervisor, pool and workers over simulated processes, memory, kernel and time.

Real: ``engines.processes`` (driver, pool, link, worker), ``engines.recovery``, ``plan.lifecycle``, ``step``,
``shared.counters``, ``shared.state`` and ``shared.layout``. Simulated: processes, channels, ``poll``, clocks, memory
and the order in which it is seen, how recipes travel. A machine of whole numbers stands for a framework and its data.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
from types import SimpleNamespace
from unittest import mock

import numpy

from phalanx.engines.processes import driver, pool, worker
from phalanx.engines.recovery import failures, supervisor
from phalanx.engines.recovery.failures import Deadline
from phalanx.errors import RunError, WorkerError
from phalanx.plan import Rounds
from phalanx.plan.fold import place
from phalanx.plan.lifecycle import OWN
from phalanx.seams.records import RunState
from phalanx.shared import counters, layout, state
from tests.simulation.machine import Dealer, Machine, sequence
from tests.simulation.memory import Memory, Numpy, Words, pack, unpack, viewed
from tests.simulation.schedule import Schedule

CALLER = "caller"
HOST = []  # the one that is being simulated
DEADLINE = 0.4  # seconds that a worker may be silent
POLL = 0.05  # seconds: longer than any wait, unless somebody was not woken


class Host:
    """One run on a simulated host.

    Parameters
    ----------
    script, seed, draw, restless
        As of ``Schedule``.
    workers, replicas, steps : int
    weak : bool
        Whether memory is ordered as on ARM.
    share : float
        Of the time that may go into snapshots.
    captures : sequence of int
        After which steps the caller takes a snapshot, which it reads two steps later.
    hasty : bool
        Whether the caller's waits end at once, so that it looks at the counters again and again.
    most : int
        Deaths in a row at one place that end the run.
    brought : sequence of int
        Steps whose batch the caller brings.
    raises : (int, int), optional
        A step and a replica that raises.
    leaves : int, optional
        After how many steps the caller breaks the run off.
    portable : bool
        Whether the first worker keeps no part of the state to itself.
    """

    def __init__(
        self, script, seed=None, draw=None, *, workers=2, replicas=3, steps=3, weak=False, share=2.0, captures=(),
        restless=0.05, most=10, hasty=False, brought=(), raises=None, portable=True, leaves=None,
    ):  # fmt: skip
        self.schedule = Schedule(script, self.strike, seed, draw, restless)
        self.words = Words(self.schedule, weak=weak)
        self.count, self.replicas, self.steps, self.captures = workers, replicas, steps, captures
        self.share, self.most, self.poll = share, most, -1 if hasty else 1000 * POLL
        self.tokens, self.births = itertools.count(), itertools.count()
        self.leaves = leaves
        self.brought, self.raises, self.portable = brought, raises, portable
        self.held = self.error = None  # a snapshot that the caller reads; why the run ended early
        self.workers, self.readable = {}, {}  # the newest process of each; descriptors
        self.spans, self.kills, self.frozen, self.finished = {}, 0, 0, False

    def run(self):
        """Train; raises an AssertionError for whatever must not be."""
        HOST.append(self)
        try:
            with simulated(self):
                self.schedule.start(CALLER, "main", self._train)
                self.schedule.run()
        finally:
            HOST.remove(self)
        assert self.finished

    @property
    def clock(self):
        """Seconds; every action takes some."""
        return self.schedule.now + self.schedule.actions * 1e-8

    def strike(self, kind, *facts):
        """A fault, or a late access."""
        if kind == "late":
            return self.words.late(*facts)
        process = self.workers.get(facts[0])
        if process is None or not self.schedule.lives(process):
            return False
        if kind == "kill":
            self.kills += 1
            self.kill(process)
        elif self.poll < 0:  # the caller never waits, so no time passes
            return False
        else:
            self.frozen += 1
            self.schedule.frozen.add(process)
        return True

    def kill(self, process):
        """A process ends; what it has written is visible before anybody learns that."""
        self.words.drain(process)
        self.schedule.kill(process)

    def spawn(self, number, memories, channel):
        """Start the process of a worker; returns its name."""
        process = self.workers[number] = f"worker {number}, {next(self.births)}"

        def live():
            self.words.order()
            with contextlib.suppress(SystemExit):
                worker.live(channel, memories, number)

        self.schedule.start(process, "main", live)
        return process

    def _train(self):
        definition = SimpleNamespace(
            replicas=self.replicas, rounds=Rounds(), phases=None, micro_batches=1, updates=self.steps, seed=0,
            on_nonfinite="stop", source=None, epoch_of=lambda step: 0,
            plan=SimpleNamespace(shares=lambda _: [numpy.array([each]) for each in range(self.replicas)]),
        )  # fmt: skip
        self.framework, self.run_state = Machine(self), RunState(max_failures=self.most, allow=None)
        placed = place(self.replicas, self.count)
        engine = driver.Processes(definition, self.framework, placed, self.run_state, Deadline(DEADLINE))
        states, reports = sequence(self.replicas, self.steps)
        try:
            self._do_steps(engine, states, reports)
        except RunError as error:
            self._check_error(error)
        else:
            assert self.raises is None or self.leaves is not None
        self._release(states)
        (engine.close if self.leaves is None else engine.break_off)()
        self.lost = engine.lost
        if engine.lost:
            assert self._may_be_lost, engine.ended
        else:
            check_state(self.framework.state, states[len(self.run_state.loss_history)])
        late = POLL + self.frozen * (3 * DEADLINE)
        assert self.schedule.now < late, f"somebody was not woken: it took {self.schedule.now} s"
        self.finished = True

    def _do_steps(self, engine, states, reports):
        unseen = self.run_state.unseen
        for told in range(self.steps if self.leaves is None else self.leaves):
            ahead = min([step for step in self.brought if step > told], default=self.steps)
            batch = told if told in self.brought else None
            self._check_report(told, unseen.popleft() if unseen else engine.advance(batch, ahead), reports[told])
            if self.held is not None and (self.held[0] < told or told in self.captures):
                self._release(states)
            if told in self.captures:
                captured = engine.capture()
                self.held = len(self.run_state.loss_history), captured

    @property
    def _may_be_lost(self):
        """Whether the state may be lost: the deaths that allow it are none, one, or several in a row."""
        breakable = (self.leaves is not None) + (not self.portable)
        return self.kills + self.frozen >= (min(OWN, self.most), 1, 0)[breakable]

    def _check_error(self, error):
        """The run may end by what a replica raised, or where the table of recovery says so."""
        self.error = error
        if isinstance(error, WorkerError):
            assert (error.step, error.replica) == self.raises == (len(self.run_state.loss_history), error.replica)
        else:
            assert self._may_be_lost, error

    def _release(self, states):
        """What the caller has held of a snapshot must be as it was when it was taken."""
        if self.held is not None:
            at, captured = self.held
            check_state(captured.facts["state"], states[at])
            captured.release()
            self.held = None

    def _check_report(self, told, report, expected):
        """A report is that of the next step, and what the sequence says."""
        assert report.step == told
        assert (report.loss, report.grad_norm, report.lr, report.parts) == expected
        if not self.kills and not self.frozen:
            started, ended = self.spans[told]
            assert report.seconds == ended - started, "a report was read before it was whole"


def check_state(found, expected):
    """All words of a state."""
    assert list(map(list, found.weights)) == expected.weights
    assert {piece: list(value) for piece, value in found.momenta.items()} == expected.momenta
    assert list(found.buffer) == expected.buffer
    assert found.option == expected.option


class Handle:
    """In place of ``WorkerHandle``: a process of the schedule, and a channel to it."""

    def __init__(self, number, memories):
        host = self._host = HOST[0]
        host.words.fence()
        self.number, self.ended, self.ready, self.pipes = number, False, False, []
        self.channel, self.pidfd = Channel(host), next(host.tokens)
        self.process = self.channel.process = host.spawn(number, memories, self.channel)
        host.readable[self.pidfd] = lambda: not host.schedule.lives(self.process)
        host.readable[self.channel.token] = lambda: self.channel.told or not host.schedule.lives(self.process)
        self.watched = [self.channel.token, self.pidfd]

    def heard(self):
        """Messages, and whether there may be more."""
        told, self.channel.told = self.channel.told, []
        return [message for message in told if message is not None], self._host.schedule.lives(self.process)

    def wake(self):
        self._host.words.fence()
        self.channel.woken = True

    def dismiss(self):
        self.channel.closed = True

    def end(self):
        """Its wait status."""
        if self.ended:
            return None
        self.ended = True
        if self._host.schedule.lives(self.process):
            self._host.kill(self.process)
        self._host.words.order()
        return signal.SIGKILL

    def kill(self):
        """Nothing outlives a simulation."""


class Channel:
    """Both ends of a worker's channel; in place of ``DriverChannel``, too."""

    def __init__(self, host):
        self._host, self.token, self.told, self.woken, self.closed = host, next(host.tokens), [], False, False

    def fileno(self):
        return self.token

    def tell(self, *message):
        self._host.words.fence()
        self.told.append(message)

    def wake(self):
        self._host.words.fence()
        self.told.append(None)

    def sleep(self, milliseconds):
        self._host.words.fence()
        self._host.schedule.wait(lambda: self.woken or self.closed, milliseconds / 1000)
        self._host.words.order()
        if not self.woken and self.closed:
            raise SystemExit
        self.woken = False


class Poller:
    """In place of ``select.poll``."""

    def __init__(self):
        self._fds = set()

    def register(self, fd, _):
        self._fds.add(fd)

    def unregister(self, fd):
        self._fds.remove(fd)

    def poll(self, milliseconds):
        host = HOST[0]
        host.words.fence()
        if milliseconds:
            host.schedule.wait(lambda: any(host.readable[fd]() for fd in self._fds), max(milliseconds, 0) / 1000)
        host.words.order()
        return [(fd, 1) for fd in sorted(self._fds) if host.readable[fd]()]


class Quiet:
    """In place of ``Output``: workers print nothing."""

    open = False

    def follow(self, pipes): ...

    def forget(self, pipes): ...

    def carry(self, fds):
        return []


class Noted(counters.Reports):
    """Reports, with a note of when each step began and ended."""

    def write(self, step, parts, named, *report):
        HOST[0].spans[step] = list(report[-2:])
        super().write(step, parts, named, *report)

    def correct_end(self, step, ended):
        HOST[0].spans[step][1] = ended
        super().correct_end(step, ended)


def _slept(seconds):
    HOST[0].words.fence()
    HOST[0].schedule.wait(seconds=seconds)


def _recipe(definition, name, environment, parcel, facts):
    environment.write({"threads": 1})
    parcel.write({**facts, "definition": definition})


CLOCK = SimpleNamespace(perf_counter=lambda: HOST[0].clock, monotonic=lambda: HOST[0].clock, sleep=_slept)
SYSTEM = SimpleNamespace(sched_yield=lambda: HOST[0].words.spin())
ORDERED = {"order": lambda: HOST[0].words.order(), "fence": lambda: HOST[0].words.fence()}
REPLACED = {
    counters: {"order": ORDERED["order"], "os": SYSTEM, "time": CLOCK, "Reports": Noted},
    layout: {"memoryview": viewed},
    state: {"memoryview": viewed, "np": Numpy()},
    worker: {
        **ORDERED, "os": SYSTEM, "time": CLOCK, "warnings": SimpleNamespace(), "signal": SimpleNamespace(
            SIGINT=2, signal=lambda *_: None), "Memory": lambda _, fd: fd, "DriverChannel": lambda channel: channel,
        "unpack": unpack, "adopt_environment": lambda _: None, "starting": contextlib.nullcontext,
        "unpacked": lambda setup: setup["definition"], "open_framework": lambda *_, **__: Machine(HOST[0]),
        "give_back": lambda: None, "BatchShares": Dealer, "IDLE_YIELDS": 2,
    },
    pool: {
        **ORDERED, "time": CLOCK, "select": SimpleNamespace(poll=Poller, POLLIN=1), "WorkerHandle": Handle,
        "Output": Quiet,
    },
    failures: {"time": CLOCK, "STARTING": DEADLINE, "BatchShares": Dealer},
    supervisor: {"pack": pack},
    driver: {
        "Memory": lambda _: Memory(HOST[0].words, next(HOST[0].tokens)), "check_room": lambda *_: None,
        "pack_recipe": _recipe,
    },
}  # fmt: skip


@contextlib.contextmanager
def simulated(host):
    """For the time of a run, what the real code calls of the system is simulated."""
    replaced = {**REPLACED, worker: {**REPLACED[worker], "SHARE": host.share}}
    replaced[pool] = {**REPLACED[pool], "POLL_MILLISECONDS": host.poll}
    with contextlib.ExitStack() as undo:
        for module, names in replaced.items():
            undo.enter_context(mock.patch.multiple(module, create=True, **names))
        yield
