"""Deaths at chosen places in a worker's life: a model factory that, in a worker, lies in wait there.

What a recipe brings runs in the worker before its first step, so it can put traps where no user could.
"""

import contextlib
import functools
import importlib
import os
import pathlib
import signal

from phalanx.plan.lifecycle import Stage

HALVES = ("half saved", "half updated")  # beside the points, which lie between two things
PLACES = (*(point.name for point in Stage), *HALVES)


def once(folder, name):
    """True for the first who asks, in whatever process."""
    try:
        os.close(os.open(pathlib.Path(folder) / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def strike(how):
    """End this process, or stop it."""
    if how == "exit":
        os._exit(0)
    os.kill(os.getpid(), how)


class Trapped:
    """Makes the model; in worker ``number`` of a run it also sets a trap, for ``times`` deaths.

    Parameters
    ----------
    make_model : callable
    folder : path
        Where it is noted that a trap has sprung.
    number, step, place
        Which worker, in which step, where: one of ``PLACES``.
    how : int or "exit"
        A signal, or ``os._exit(0)``.
    framework : str
        Whose copies are watched.
    """

    def __init__(self, make_model, folder, number, step, place, how=signal.SIGKILL, times=1, framework="torch"):
        self.make_model = make_model
        self.folder, self.number, self.step, self.place = str(folder), number, step, place
        self.how, self.times, self.framework = how, times, framework
        self.parent = os.getpid()

    def __call__(self):
        if os.getpid() != self.parent:
            self.set()
        return self.make_model()

    def set(self):
        from phalanx.shared.counters import Barrier

        trap, at = self, Barrier.at

        def watched(barrier, stage):
            at(barrier, stage)
            trap.seen = (barrier.worker, barrier.step)
            if trap.place == stage.name:
                trap.spring()

        Barrier.at = watched
        if self.place in HALVES:
            self.watch_copies()

    def watch_copies(self):
        from phalanx.shared.state import Shard

        update = importlib.import_module(f"phalanx.frameworks.{self.framework}.optimizer").Update
        applied = {"torch": "apply", "jax": "step"}[self.framework]
        owner, name = (Shard, "_kept") if self.place == "half saved" else (update, applied)
        original, trap = getattr(owner, name), self

        def kept(shard):
            for count, pair in enumerate(original(shard)):
                if count == 1:
                    trap.spring()
                yield pair

        def apply(update, step, gradient):
            original(update, step, gradient)
            trap.spring()

        setattr(owner, name, kept if name == "_kept" else functools.wraps(original)(apply))

    def spring(self):
        if self.seen == (self.number, self.step):
            for count in range(self.times):
                if once(self.folder, f"{self.number} {count}"):
                    strike(self.how)


def sprung(folder):
    """How many traps have."""
    return len(list(pathlib.Path(folder).iterdir()))


@contextlib.contextmanager
def hunted(run, pause, most=40):
    """Inside, up to ``most`` workers are ended, as ``pause()`` returns; yields the list of those that were.

    Between two of them the run has done a step, however slow the machine is: a run in which nobody gets anything done
    is ended on purpose.
    """
    import threading

    ended, stop = [], threading.Event()

    def hunt():
        before = -1
        while len(ended) < most and not stop.is_set():
            pids, steps = run.worker_pids, run.steps
            if pids and steps > before:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[len(ended) % len(pids)], signal.SIGKILL)
                    ended.append(pids)
                    before = steps
            stop.wait(pause())

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        yield ended
    finally:
        stop.set()
        hunter.join()
