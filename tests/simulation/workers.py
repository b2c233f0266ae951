"""A simulated host: the real engine, supervisor, pool and workers over simulated processes, memory, kernel and time.

Real: ``engines.processes`` (driver, pool, link, worker), ``engines.recovery``, ``plan.lifecycle``, ``step``,
``shared.counters``, ``shared.state`` and ``shared.layout``. Simulated: processes, channels, ``poll``, clocks, memory
and the order in which it is seen, how recipes travel. A machine of whole numbers stands for a framework and its data.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
from types import SimpleNamespace

import numpy

from phalanx.engines.processes import driver, pool, worker
from phalanx.engines.recovery import failures, supervisor
from phalanx.engines.recovery.failures import Deadline
from phalanx.errors import RunError, WorkerError
from phalanx.plan.fold import place
from phalanx.plan.lifecycle import OWN
from phalanx.plan.rounds import Rounds
from phalanx.seams.records import Progress, Records, RunOptions, Seen
from phalanx.shared import counters, layout, state
from tests.simulation.machine import Dealer, Machine, sequence
from tests.simulation.memory import Memory, Words, frombuffer, pack, unpack, viewed
from tests.simulation.replacing import Poller, altered, replaced
from tests.simulation.schedule import Schedule

CALLER = "caller"
MODULES = counters, layout, state, worker, pool, failures, supervisor, driver
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
        self.share, self.most, self.hasty, self.leaves = share, most, hasty, leaves
        self.brought, self.raises, self.portable = brought, raises, portable
        self.numbers, self.workers = itertools.count(), {}  # of memories and processes; the newest process of each
        self.kills = self.frozen = 0
        self.held = self.lost = None  # a snapshot that the caller reads; at the end, whether the state is lost

    def run(self):
        """Train; raises an AssertionError for whatever must not be."""
        with self.simulated():
            self.schedule.start(CALLER, "main", self._train)
            self.schedule.run()
        assert self.lost is not None

    def clock(self):
        """Seconds; every action takes some."""
        return self.schedule.now + self.schedule.actions * 1e-8

    def sleep(self, seconds):
        """Let others act for some time."""
        self.words.fence()
        self.schedule.wait(seconds=seconds)

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
        elif self.hasty:  # the caller never waits, so no time passes
            return False
        else:
            self.frozen += 1
            self.schedule.frozen.add(process)
        return True

    def kill(self, process):
        """A process ends; what it has written is visible before anybody learns that."""
        self.words.drain(process)
        self.schedule.kill(process)

    def simulated(self):
        """Inside, what the real code calls of the system is simulated."""
        words = self.words
        names = {
            "order": words.order, "fence": words.fence, "memoryview": viewed, "give_back": bool,
            "Memory": lambda _, memory=None: memory or Memory(words, next(self.numbers)), "check_room": lambda *_: None,
            "time": SimpleNamespace(perf_counter=self.clock, monotonic=self.clock, sleep=self.sleep),
            "select": SimpleNamespace(poll=lambda: OrderedPoller(words), POLLIN=1),
            "signal": SimpleNamespace(SIGINT=2, signal=lambda *_: None), "warnings": SimpleNamespace(),
            "np": altered(numpy, frombuffer=frombuffer), "os": altered(os, sched_yield=words.spin),
            "WorkerHandle": functools.partial(Handle, self), "DriverChannel": lambda channel: channel,
            "Output": lambda: SimpleNamespace(open=False, follow=bool, forget=bool, carry=lambda _: []),
            "pack": pack, "unpack": unpack, "pack_recipe": pack_recipe, "unpacked": lambda _: self.definition,
            "adopt_environment": bool, "starting": contextlib.nullcontext, "BatchShares": Dealer, "Reports": Noted,
            "open_framework": lambda *_, **__: Machine(self), "STARTING": DEADLINE, "SHARE": self.share,
            "IDLE_YIELDS": 2, "POLL_MILLISECONDS": -1 if self.hasty else 1000 * POLL,
        }  # fmt: skip
        return replaced(MODULES, names)

    def _train(self):
        self.definition = SimpleNamespace(
            replicas=self.replicas, rounds=Rounds(), phases=None, micro_batches=1, updates=self.steps, seed=0,
            on_nonfinite="stop", over_batch=lambda phase: False, source=None, epoch_of=lambda step: 0,
            plan=SimpleNamespace(shares=lambda _: [numpy.array([each]) for each in range(self.replicas)]),
        )  # fmt: skip
        self.framework, self.progress = Machine(self), Progress()
        records = Records(RunOptions(max_failures=self.most, allow=None), self.progress, Seen(self.progress))
        placed, deadline = place(self.replicas, self.count), Deadline(DEADLINE)
        engine = driver.Processes(self.definition, self.framework, placed, records, deadline)
        states, reports = sequence(self.replicas, self.steps)
        try:
            self._do_steps(engine, states, reports)
        except RunError as error:
            self._check_error(error)
        else:
            assert self.raises is None or self.leaves is not None
        self._release(states)
        (engine.close if self.leaves is None else engine.break_off)()
        if engine.lost:
            assert self._may_be_lost, engine.ended
        else:
            check_state(self.framework.state, states[len(self.progress.loss_history)])
        late = POLL + self.frozen * (3 * DEADLINE)
        assert self.schedule.now < late, f"somebody was not woken: it took {self.schedule.now} s"
        self.lost = engine.lost

    def _do_steps(self, engine, states, reports):
        unseen = self.progress.unseen
        for told in range(self.steps if self.leaves is None else self.leaves):
            ahead = min([step for step in self.brought if step > told], default=self.steps)
            batch = told if told in self.brought else None
            self._check_report(told, unseen.popleft() if unseen else engine.advance(batch, ahead), reports[told])
            if self.held is not None and (self.held[0] < told or told in self.captures):
                self._release(states)
            if told in self.captures:
                captured = engine.capture()
                self.held = len(self.progress.loss_history), captured

    @property
    def _may_be_lost(self):
        """Whether the state may be lost: the deaths that allow it are none, one, or several in a row."""
        breakable = (self.leaves is not None) + (not self.portable)
        return self.kills + self.frozen >= (min(OWN, self.most), 1, 0)[breakable]

    def _check_error(self, error):
        """The run may end by what a replica raised, or where the table of recovery says so."""
        if isinstance(error, WorkerError):
            assert (error.step, error.replica) == self.raises == (len(self.progress.loss_history), error.replica)
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
            started, ended = Noted.spans[told]
            assert report.seconds == ended - started, "a report was read before it was whole"


def check_state(found, expected):
    """All words of a state."""
    assert list(map(list, found.weights)) == expected.weights
    assert {piece: list(value) for piece, value in found.momenta.items()} == expected.momenta
    assert list(found.buffer) == expected.buffer
    assert found.option == expected.option


class Handle:
    """In place of ``WorkerHandle``: a process of the schedule. It is its own pidfd, which is readable at its end."""

    def __init__(self, host, number, memories):
        host.words.fence()
        self._host, self.number, self.ended, self.ready, self.pipes = host, number, False, False, []
        self.channel, self.pidfd = Channel(self, host), self
        self.watched = [self.channel, self]
        self.process = host.workers[number] = f"worker {number}, {next(host.numbers)}"
        host.schedule.start(self.process, "main", lambda: self.live(memories))

    def live(self, memories):
        self._host.words.order()
        worker.live(self.channel, memories, self.number)

    def readable(self):
        return not self._host.schedule.lives(self.process)

    def heard(self):
        """Messages, and whether there may be more."""
        sent, self.channel.sent = self.channel.sent, []
        return [message for message in sent if message is not None], not self.readable()

    def wake(self):
        self._host.words.fence()
        self.channel.woken = True

    def dismiss(self):
        """Its end follows at once."""

    def end(self):
        """Its wait status."""
        if self.ended:
            return None
        self.ended = True
        if not self.readable():
            self._host.kill(self.process)
        self._host.words.order()
        return signal.SIGKILL

    def kill(self):
        """Nothing outlives a simulation."""


class Channel:
    """Both ends of a worker's channel; in place of ``DriverChannel``, too."""

    def __init__(self, handle, host):
        self._handle, self._host, self.sent, self.woken = handle, host, [], False

    def fileno(self):
        return self

    def readable(self):
        return self.sent or self._handle.readable()

    def tell(self, *message):
        self._host.words.fence()
        self.sent.append(message)

    def wake(self):
        self._host.words.fence()
        self.sent.append(None)

    def sleep(self, milliseconds):
        self._host.words.fence()
        self._host.schedule.wait(lambda: self.woken, milliseconds / 1000)
        self._host.words.order()
        self.woken = False


class OrderedPoller(Poller):
    """A poller that goes through the kernel, which orders memory."""

    def __init__(self, words):
        super().__init__(words.schedule)
        self.words = words

    def poll(self, milliseconds):
        self.words.fence()
        if milliseconds:
            self.schedule.wait(self.readable, max(milliseconds, 0) / 1000)
        self.words.order()
        return self.readable()


class Noted(counters.Reports):
    """Reports, with a note of when each step began and ended."""

    spans = {}  # noqa: RUF012  by step

    def write(self, step, parts, named, *report):
        self.spans[step] = report[-2:]
        super().write(step, parts, named, *report)

    def correct_end(self, step, ended):
        self.spans[step] = self.spans[step][0], ended
        super().correct_end(step, ended)


def pack_recipe(definition, name, environment, recipe_memory, facts):
    """In place of that of ``serialization``: the recipe itself stays where it is."""
    pack({"threads": 1}, environment)
    pack(facts, recipe_memory)
