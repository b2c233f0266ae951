"""Random rounds against processes: zygotes and workers are killed, stopped forked from; bits must not depend on it."""

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import phalanx
from phalanx.engines.processes.handle import WorkerHandle
from phalanx.engines.processes.starter import WARM
from phalanx.surroundings import interrupts
from tests.families import ADAMW, FAMILIES

STEPS = 40
REPLICAS = 4
WHYS = ("was killed by SIGKILL", "ended with the process that started it")
SECONDS = 60  # that a round may take on a busy machine, for what is a matter of seconds
_QUIET = {}


def quiet(family):
    """The recipe, and what it ends in when nobody disturbs it."""
    if family not in _QUIET:
        recipe = FAMILIES[family].recipe(REPLICAS, steps=STEPS, optimizer=ADAMW)
        _QUIET[family] = recipe, recipe.train(engine="inline", progress=False)
    return _QUIET[family]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def children():
    """Processes below this one."""
    path = pathlib.Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, path.read_text().split()))


def kill(pid, number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


@contextlib.contextmanager
def meanwhile(act):
    """Inside, ``act(stopped)`` runs in a thread; ``stopped`` is set at the end."""
    stopped = threading.Event()
    thread = threading.Thread(target=act, args=[stopped])
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def odd(result, wanted, incidents, struck):
    """What is wrong with a run that was disturbed; ``struck``: how many workers may have ended."""
    deaths = [one for one in incidents if one.kind == "death"]
    if (result.digest, result.loss_history) != (wanted.digest, wanted.loss_history):
        return f"digest {result.digest}, not {wanted.digest}"
    if len(deaths) > struck:
        return f"{len(deaths)} deaths are told, but {struck} workers can have died at most: {deaths}"
    strange = {one.why for one in deaths} - set(WHYS)
    return f"deaths of another cause than they had: {strange}" if strange else None


def disturbed(rng, act, most=lambda: 1 << 30, **options):
    """One run while ``act(run, stopped)`` goes on; a sentence about what is wrong, or None."""
    family, workers = rng.choice(("mlp", "conv_norm", "counting")), rng.choice((1, 2, 3))
    recipe, wanted = quiet(family)
    WARM.zygote()
    before, began = descriptors(), time.monotonic()
    found = under_fire(recipe, wanted, workers, act, most, options)
    WARM.zygote()
    gc.collect()  # a run that is dropped holds its arena's map
    if found is None and descriptors() > before:
        found = f"{descriptors() - before} descriptors are left"
    if found is None and time.monotonic() - began > SECONDS:
        found = f"it took {time.monotonic() - began:.0f} s"
    return found and f"{family}, {workers} workers: {found}"


def under_fire(recipe, wanted, workers, act, most, options):
    try:
        with recipe.start(workers=workers, engine="processes", progress=False, **options) as run:
            with meanwhile(lambda stopped: act(run, stopped)):
                run.finish()
            result = run.result()
    except (phalanx.PhalanxError, OSError) as error:
        return f"the run ended: {error!r}"
    left = run.worker_pids
    return f"workers {left} are left" if left else odd(result, wanted, run.incidents, most())


def starter():
    """The pid of the process that starts workers, without starting one; None if there is none."""
    zygote = WARM._zygote
    return None if zygote is None else zygote._process.pid


def killed_together(rng):
    """SIGKILL of the zygote, with none, some or all of the workers, before or after it, at random moments."""
    kills = [(rng.uniform(0, 0.6), rng.choice(("zygote", "first", "last", "only workers"))) for _ in range(2)]
    struck = [0]

    def act(run, stopped):
        for pause, how in kills:
            stopped.wait(pause)
            pids = list(run.worker_pids)
            victims = rng.sample(pids, rng.randint(0, len(pids)))
            zygote = [] if how == "only workers" or starter() is None else [starter()]
            struck[0] += len(victims) + 2 * 3 * len(zygote)  # those that live then, and those that are about to start
            for pid in [*zygote, *victims] if how == "first" else [*victims, *zygote]:
                kill(pid)

    return disturbed(rng, act, lambda: struck[0])


def stopped_zygote(rng):
    """SIGSTOP of the zygote before a start, in a run while workers die, or before the end; a deadline; Ctrl-C."""
    moment, deadline = rng.choice(("start", "run", "close", "ctrl-c")), rng.choice(("auto", 5.0))
    WARM.zygote()._ask({"end": 0})
    if moment == "ctrl-c":
        return interrupted_request(rng)
    if moment == "start":
        kill(starter(), signal.SIGSTOP)

    def act(run, stopped):
        stopped.wait(rng.uniform(0, 0.3))
        if moment != "start":
            kill(starter(), signal.SIGSTOP)
        if moment == "run":
            for pid in rng.sample(run.worker_pids, min(1, len(run.worker_pids))):
                kill(pid)

    found = disturbed(rng, act, deadline_seconds=deadline)
    if found is None and rng.random() < 0.3:
        pid, began = starter(), time.monotonic()
        kill(pid, signal.SIGSTOP)
        phalanx.close()
        if time.monotonic() - began > SECONDS or pid in children():
            return f"close() took {time.monotonic() - began:.0f} s; left: {children() & {pid}}"
    return found


def interrupted_request(rng):
    """Ctrl-C while a stopped zygote is waited for: it comes at once, and later requests get their own answers."""
    began = time.monotonic()
    for _ in range(rng.randint(1, 3)):
        kill(starter(), signal.SIGSTOP)
        timer = threading.Timer(rng.uniform(0, 0.5), kill, [os.getpid(), signal.SIGINT])
        try:
            with interrupts.guarded():
                timer.start()
                WorkerHandle(0, [])  # no worker either: it ends as it finds no memories
                timer.join()
            return "SIGINT was not delivered"
        except KeyboardInterrupt:
            timer.join()
        if time.monotonic() - began > SECONDS:
            return f"Ctrl-C was delivered after {time.monotonic() - began:.0f} s"
    return disturbed(rng, lambda run, stopped: None, lambda: 0)


def storm(rng):
    """SIGKILL of random workers at a random rate, from slow to faster than a start, for seconds: the run goes on.

    As its messages advise where others end workers, ``max_failures`` is more than all kills.
    """
    pause, together, most = 10 ** rng.uniform(-2.3, -0.7), rng.choice((0, 0.1, 0.5)), rng.randint(10, 60)
    struck = [0]

    def act(run, stopped):
        end = time.monotonic() + 6
        while struck[0] < most and time.monotonic() < end and not stopped.wait(rng.expovariate(1 / pause)):
            pids = list(run.worker_pids)
            for pid in pids if rng.random() < together else rng.sample(pids, min(1, len(pids))):
                struck[0] += kill(pid)

    return disturbed(rng, act, lambda: struck[0], max_failures=1000)


FORKING = """
import os, sys, random, time
sys.path.insert(0, {root!r})
from tests.attacks import deaths
rng = random.Random({seed})
recipe, wanted = deaths.quiet("mlp")
run = None
def end():
    how = rng.choice(["raise", "exit", "_exit", "SIGKILL", "use", "train", "sleep"])
    if how == "raise": raise LookupError("in the child")
    if how == "exit": sys.exit(3)
    if how == "SIGKILL": os.kill(os.getpid(), 9)
    if how == "use": run.step()
    if how == "sleep": time.sleep(1)
    if how == "train":
        again = recipe.train(workers=2, engine="processes", progress=False)
        os._exit(0 if again.digest == wanted.digest else 99)
    os._exit(0)
def fork(report):
    if rng.random() < 0.1:
        seed = rng.random()
        pid = os.fork()
        if pid == 0:
            rng.seed(seed)
            end()
        if rng.random() < 0.7 and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 99:
            print("a child that trained by itself got another digest")
with recipe.start(workers=2, engine="processes", callbacks=[fork], progress=False) as run:
    run.finish()
    print("verdict", run.result().digest == wanted.digest, len(run.incidents), flush=True)
"""


def forked(rng):
    """Callbacks fork, and the children end in random ways, or live on: no worker dies of it."""
    root = str(pathlib.Path(__file__).resolve().parent.parent.parent)
    code = FORKING.format(root=root, seed=rng.randrange(1 << 30))
    command = [sys.executable, "-W", "ignore", "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as script:
        try:
            out, errors = script.communicate(timeout=2 * SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(script.pid, signal.SIGKILL)
            return "a program whose callback forks did not end"
    if script.returncode or "another digest" in out or "verdict True 0" not in out.splitlines():
        return f"status {script.returncode}, it said {out!r} {errors[-500:]!r}"
    return None


ARMS = {
    "zygote and workers killed": killed_together,
    "zygote stopped": stopped_zygote,
    "forks in callbacks": forked,
    "storm of SIGKILL": storm,
}
