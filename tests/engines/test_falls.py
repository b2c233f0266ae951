"""When a worker falls, the next steps forward: the same digest, every step seen once, nothing done that need not be."""

import collections
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import signal
import time
import types

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import phalanx
from phalanx.engines.processes.tasks import Begin, Resume
from phalanx.engines.recovery import failures, supervisor
from phalanx.engines.recovery.supervisor import Supervisor
from tests.engines.deaths import HALVES, PLACES, Trapped, hunted, once, sprung, strike
from tests.families import ADAMW, FAMILIES, FEATURES, SGD, Elsewhere, conv_norm, mlp
from tests.sampling import cover, generator, sample

STEPS = 8
COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)
FIRST, LATER = 0, 4  # before anything was saved, and after


def norm_recipe(make_model=conv_norm, **changes):
    """Buffers, clipping, a schedule and uneven shares: everything that has to be put back right."""
    given = {"optimizer": ADAMW, "scheduler": COSINE, "max_norm": 0.5, "steps": STEPS}
    return FAMILIES["conv_norm"].recipe(4, make_model=make_model, **(given | changes))


def assert_same(one, other):
    assert (one.digest, one.loss_history) == (other.digest, other.loss_history)


@pytest.fixture(scope="module")
def wanted():
    """What the run would have been."""
    return norm_recipe().train(engine="inline")


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "worker", "step"), cover("deaths", PLACES, itertools.product((0, 1, 2), (FIRST, LATER)))
)
def test_a_death_at_every_named_point(tmp_path, wanted, worker, place, step):
    """SIGKILL of each worker at each point of the protocol, early and late: the digest is that of a quiet run."""
    if place == "half saved":
        step = 1  # the first snapshot is always due there
    seen = []
    recipe = norm_recipe(Trapped(conv_norm, tmp_path, worker, step, place))
    result = recipe.train(workers=3, engine="processes", callbacks=[lambda report: seen.append(report.step)])
    assert_same(result, wanted)
    assert seen == list(range(STEPS))
    assert sprung(tmp_path) == 1


@pytest.mark.parametrize("how", sample("other ways to end", [signal.SIGSEGV, signal.SIGTERM, "exit"], 1))
def test_other_ways_to_end(tmp_path, wanted, how):
    """A crash, a signal, an exit that says all is well."""
    recipe = norm_recipe(Trapped(conv_norm, tmp_path, 1, LATER, "COMPUTING", how))
    assert_same(recipe.train(workers=2, engine="processes"), wanted)
    assert sprung(tmp_path) == 1


@pytest.mark.long
@pytest.mark.parametrize("place", sample("hanging", ["COMPUTING", "COMPUTED", "FOLDED", "UPDATING", "UPDATED"], 2))
def test_a_worker_that_hangs_is_ended_and_replaced(tmp_path, wanted, place):
    """A stopped worker counts as dead after ``deadline_seconds``."""
    recipe = norm_recipe(Trapped(conv_norm, tmp_path, 1, LATER, place, signal.SIGSTOP))
    assert_same(recipe.train(workers=3, engine="processes", deadline_seconds=1.0), wanted)
    assert sprung(tmp_path) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "place"), cover("all workers at once", [1, 2, 3], ["COMPUTING", "FOLDING", "UPDATING"])
)
def test_all_workers_at_once(wanted, tmp_path, workers, place):
    """Everybody is ended in the same step: the arena is all that is left, and it is enough."""
    make_model = conv_norm
    for number in range(workers):
        make_model = Trapped(make_model, tmp_path, number, LATER, place)
    assert_same(norm_recipe(make_model).train(workers=workers, engine="processes"), wanted)
    assert sprung(tmp_path) >= 1


def test_a_death_after_a_snapshot_that_was_broken_off(tmp_path, wanted, monkeypatch):
    """Ctrl-C before the first step, when workers are about to save: they save in that step, and go back to that."""

    def interrupted(own, options):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with norm_recipe(Trapped(conv_norm, tmp_path, 1, 0, "half updated")).start(workers=3, engine="processes") as run:
        monkeypatch.setattr(Supervisor, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.result()
        run.finish()
        assert_same(run.result(), wanted)
    assert sprung(tmp_path) == 1


@pytest.mark.long
def test_deaths_in_a_replay(tmp_path, wanted):
    """A worker dies in its update, and another while that is made good again."""
    make_model = Trapped(conv_norm, tmp_path / "one", 1, 5, "half updated")
    make_model = Trapped(make_model, tmp_path / "two", 0, 5, "half updated", times=2)
    make_model = Trapped(make_model, tmp_path / "three", 2, 5, "FOLDING")
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    assert_same(norm_recipe(make_model).train(workers=3, engine="processes"), wanted)
    assert [sprung(tmp_path / name) for name in ("one", "two", "three")] == [1, 2, 1]


@pytest.mark.long
@pytest.mark.parametrize("whom", ["all", "others"])
def test_deaths_while_the_state_is_taken_back(tmp_path, wanted, monkeypatch, whom):
    """After a broken update, workers die when replacements are there but nobody has the old state yet."""
    recipe = norm_recipe(Trapped(conv_norm, tmp_path, 1, LATER, "half updated"))
    done_by_all, struck = Supervisor._done_by_all, []

    def fatal(supervisor, task):
        if isinstance(task, Begin) and len(struck) < 2:
            struck.append(run.worker_pids)
            for pid in struck[-1] if whom == "all" else [pid for pid in struck[-1] if pid in before]:
                os.kill(pid, signal.SIGKILL)
        return done_by_all(supervisor, task)

    monkeypatch.setattr(Supervisor, "_done_by_all", fatal)
    with recipe.start(workers=3, engine="processes") as run:
        before = run.worker_pids
        run.finish()
        result = run.result()
    assert len(struck) == 2
    assert_same(result, wanted)


@pytest.mark.long
@pytest.mark.parametrize("flipped", [False, True])
def test_a_snapshot_in_memory_is_checked(tmp_path, wanted, monkeypatch, flipped):
    """A bit of it flips before it is needed: the run ends with an error that says so; without, it goes on."""
    done_by_all = Supervisor._done_by_all

    def flip(supervisor, task):
        if isinstance(task, Begin) and flipped:
            mirror = supervisor._mirror  # planted
            mirror._arena[mirror._layout.snapshot[0][0]] ^= 4  # planted
        return done_by_all(supervisor, task)

    monkeypatch.setattr(Supervisor, "_done_by_all", flip)
    recipe = norm_recipe(Trapped(conv_norm, tmp_path, 1, LATER, "half updated"))
    if flipped:
        with pytest.raises(phalanx.RunError, match="snapshot in memory is damaged, or"):
            recipe.train(workers=3, engine="processes")
    else:
        assert_same(recipe.train(workers=3, engine="processes"), wanted)


@pytest.mark.long
@pytest.mark.parametrize(("place", "task"), [("COMPUTING", Resume), ("UPDATED", Resume), ("half updated", Begin)])
def test_a_repair_that_ctrl_c_breaks_off_is_finished(tmp_path, wanted, monkeypatch, place, task):
    """Ctrl-C when the replacement is there and nobody was told: the next call tells them, and goes on."""
    done_by_all, struck = Supervisor._done_by_all, []

    def interrupted(supervisor, given):
        if isinstance(given, task) and not struck:
            struck.append(task)
            raise KeyboardInterrupt
        return done_by_all(supervisor, given)

    monkeypatch.setattr(Supervisor, "_joined", lambda supervisor: False)  # nobody steps in: all leave the step
    monkeypatch.setattr(Supervisor, "_done_by_all", interrupted)
    with norm_recipe(Trapped(conv_norm, tmp_path, 1, LATER, place)).start(workers=3, engine="processes") as run:
        with pytest.raises(KeyboardInterrupt):
            run.finish()
        run.finish()
        result = run.result()
    assert struck == [task]
    assert_same(result, wanted)


class Noting:
    """A loss that notes in a file which step it computes what for, as far as the first sample tells."""

    def __init__(self, path, fatal):
        self.path, self.fatal = str(path), fatal

    def __call__(self, output, target):
        with pathlib.Path(self.path).open("a") as file:
            file.write(f"{int(target[0])}\n")
        if int(target[0]) == self.fatal and once(pathlib.Path(self.path).parent, "sprung"):
            strike(signal.SIGKILL)
        return F.mse_loss(output.sum(1), target.float())


@pytest.mark.long
def test_only_the_dead_workers_replicas_are_computed_again(tmp_path):
    """Of six replicas on three workers, each is computed once, but for those of the worker that was ended.

    The first replica of a worker is computed twice in steps 0 and 1; here one has two first workers in step 0.
    That of the last worker is computed by another one, too, in step 0. There the loss of replica 0 is asked about its
    two samples, and about each of them.
    """
    x, y = FEATURES[0][:12], torch.arange(12)
    replicas, steps = 6, 3
    give = functools.partial(
        phalanx.Recipe, mlp, (x, y), replicas=replicas, batch_size=12, steps=steps, shuffle=False, optimizer=SGD
    )
    fatal = 6  # the first sample of replica 3, the second of worker 1's
    noting = Noting(tmp_path / "computed", fatal)
    result = give(loss_fn=noting).train(workers=3, engine="processes")
    counts = collections.Counter(map(int, (tmp_path / "computed").read_text().split()))
    assert counts == {0: steps + 4, 1: 1, 2: steps, 4: steps + 4, 6: steps + 1, 8: steps + 3, 10: steps}
    assert_same(result, give(loss_fn=Noting(tmp_path / "again", -1)).train(engine="inline"))


@pytest.mark.parametrize("place", sample("brought", ["COMPUTING", "UPDATING", "half updated", "UPDATED"], 2))
def test_batches_that_the_caller_brought_are_kept(tmp_path, place):
    """They cannot be read again, so they are kept until a snapshot covers them, even if the caller writes over them."""

    def train(make_model, **options):
        generator = torch.Generator().manual_seed(3)
        batch = torch.empty(9, 5)
        recipe = phalanx.Recipe(make_model, None, F.cross_entropy, replicas=3, optimizer=ADAMW)
        with recipe.start(**options) as run:
            losses = []
            for _ in range(7):
                batch.normal_(generator=generator)
                losses.append(run.step((batch, FEATURES[1][:9])))
            return losses, run.result().digest

    wanted = train(mlp, engine="inline")
    assert train(Trapped(mlp, tmp_path, 1, 5, place), engine="processes", workers=2) == wanted
    assert sprung(tmp_path) == 1


@pytest.mark.parametrize(("most", "eager"), [(1 << 28, False), (1000, True)])
def test_batches_are_not_kept_without_bound(monkeypatch, most, eager):
    """Past so many bytes of them a snapshot is taken at once, and those that it covers are let go."""
    monkeypatch.setattr(supervisor, "MOST_BATCHES", most)
    recipe = phalanx.Recipe(mlp, None, F.cross_entropy, replicas=3, optimizer=ADAMW)
    with recipe.start(engine="processes", workers=2) as run:
        for _ in range(7):
            run.step((FEATURES[0][:9], FEATURES[1][:9]))
        assert (run._engine.counters.eager > 0) == eager
        assert not eager or len(run._engine.supervisor._batches) <= 3  # one more than it takes to be told of


def fatal_accuracy(folder, output, target):
    """A metric that ends the first worker that computes it, once."""
    if once(folder, "sprung"):
        strike(signal.SIGKILL)
    return (output.argmax(1) == target).float().mean()


def test_a_death_in_an_evaluation(tmp_path):
    """The evaluation is done again, by everybody; the run goes on."""
    recipe = FAMILIES["mlp"].recipe(4, steps=6)
    found = []
    for folder, options in ((tmp_path, {"engine": "processes", "workers": 2}), ("/dev", {"engine": "inline"})):
        with recipe.start(**options) as run:
            next(run)
            metric = functools.partial(fatal_accuracy, folder) if folder == tmp_path else accuracy
            found.append([run.evaluate(metric, FEATURES, batch_size=4)])
            run.finish()
            found[-1].append(run.result().digest)
    assert found[0] == found[1]
    assert sprung(tmp_path) == 1


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def test_deaths_while_nothing_is_done():
    """Workers that are ended while the caller looks at a report are replaced when there is something to do again."""
    recipe = FAMILIES["mlp"].recipe(4, steps=6, optimizer=ADAMW)
    with recipe.start(workers=2, engine="processes") as run:
        for report in run:
            if report.step in (1, 3):
                for pid in run.worker_pids:
                    os.kill(pid, signal.SIGKILL)
        for pid in run.worker_pids:
            os.kill(pid, signal.SIGKILL)
        result = run.result()
    assert_same(result, recipe.train(engine="inline"))


@pytest.mark.long
@pytest.mark.parametrize("family", sample("deaths at random", ["conv_norm", "two_groups", "embedding", "counting"], 2))
def test_deaths_at_random(family):
    """A worker is ended every few steps while the run goes freely."""
    recipe = FAMILIES[family].recipe(4, steps=160)
    rng = generator(f"deaths at random in {family}")
    with recipe.start(workers=3, engine="processes") as run:
        with hunted(run, lambda: rng.uniform(0.005, 0.05)) as ended:
            run.finish()
        result = run.result()
    assert ended
    assert_same(result, recipe.train(engine="inline"))


class Poisonous:
    """A loss that ends whoever computes a certain sample."""

    def __init__(self, parent, sample):
        self.parent, self.sample = parent, sample

    def __call__(self, output, target):
        if os.getpid() != self.parent and self.sample in target.tolist():
            strike(signal.SIGKILL)
        return F.mse_loss(output.sum(1), target.float())


@pytest.mark.long
@pytest.mark.parametrize("most", [3, 10])
def test_what_ends_every_worker_ends_the_run(most):
    """A poisonous sample: after ten deaths, or as many as one likes, an error names step, replica, samples, signals."""
    x, y = FEATURES[0][:12], torch.arange(12)
    give = functools.partial(phalanx.Recipe, mlp, (x, y), replicas=4, batch_size=4, shuffle=False, optimizer=SGD)
    recipe = give(loss_fn=Poisonous(os.getpid(), 6), steps=3)
    with pytest.raises(phalanx.RunError, match=r"replica 2 of step 1.*SIGKILL, .*SIGKILL, .*SIGKILL.*\[6\]") as caught:
        recipe.train(workers=2, engine="processes", **({} if most == 10 else {"max_failures": most}))
    error = caught.value
    assert (error.step, error.replica, error.samples) == (1, 2, (6,))
    assert sum(one.kind == "death" for one in error.result.incidents) == most
    assert f"ended {most} workers in a row" in str(error)
    assert "raise max_failures" in str(error)
    assert_same(error.result, give(loss_fn=Poisonous(os.getpid(), 6), steps=1).train(engine="inline"))


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True])
def test_how_many_deaths_are_too_many_is_a_count(value):
    """Anything but a positive integer is refused by name."""
    with pytest.raises(phalanx.UsageError, match="max_failures is "):
        norm_recipe().train(workers=2, max_failures=value)


def suicidal(parent, how):
    """A model that cannot be made in a worker."""
    if os.getpid() != parent:
        strike(how)
    return mlp()


@pytest.mark.longest
def test_workers_that_cannot_start_end_the_run():
    """They exit before they have done anything, again and again: three times are enough, of SIGKILL ten."""
    for how, told in (("exit", r"3 times .*status 0"), (signal.SIGKILL, r"10 times .*SIGKILL, .* and 7 more")):
        recipe = FAMILIES["mlp"].recipe(2, make_model=functools.partial(suicidal, os.getpid(), how))
        with pytest.raises(phalanx.RunError, match=told + ".*look at what it printed"):
            recipe.train(workers=2, engine="processes")


@pytest.mark.long
def test_workers_that_are_ended_while_they_start_do_not_end_the_run(tmp_path, wanted):
    """Five SIGKILLs in a row, with nothing done between them, may be anybody's: the run goes on."""
    assert_same(norm_recipe(Struck(conv_norm, tmp_path, 5)).train(workers=1, engine="processes"), wanted)
    assert sprung(tmp_path) == 5


class Struck:
    """Makes the model, but in the first workers that do."""

    def __init__(self, make_model, folder, times):
        self.make_model, self.folder, self.times, self.parent = make_model, folder, times, os.getpid()

    def __call__(self):
        for count in range(self.times if os.getpid() != self.parent else 0):
            if once(self.folder, str(count)):
                strike(signal.SIGKILL)
        return self.make_model()


@pytest.mark.long
def test_state_that_only_one_worker_knows(tmp_path):
    """With an optimizer from elsewhere, the others can be replaced while they compute; the first one cannot."""
    for name in ("1", "0"):
        (tmp_path / name).mkdir()
    recipe = FAMILIES["mlp"].recipe(3, optimizer=Elsewhere, make_model=Trapped(mlp, tmp_path / "1", 1, 2, "COMPUTING"))
    assert_same(recipe.train(workers=2, engine="processes"), recipe.train(engine="inline"))
    recipe = FAMILIES["mlp"].recipe(3, optimizer=Elsewhere, make_model=Trapped(mlp, tmp_path / "0", 0, 2, "COMPUTING"))
    with pytest.raises(phalanx.RunError, match=r"worker 0 was killed by SIGKILL in step 2.*not one of torch's own"):
        recipe.train(workers=2, engine="processes")


def checked_only(shard):
    """``Shard.restore`` that takes nothing back."""
    sums = [sum(shard._copies[piece] for piece in shard._state), *(copy.sum() for _, copy in shard._kept())]
    return int(np.array(sums, np.int64).sum())


class Forgetful(Trapped):
    """Beside the trap, a fault: in workers, going back to a snapshot does nothing."""

    def set(self):
        from phalanx.shared import state

        super().set()
        state.Shard.restore = checked_only


class Unscheduled(Trapped):
    """Beside the trap, a fault: replacements do not do their schedules again."""

    def set(self):
        super().set()
        do = Begin.do
        Begin.do = lambda task, worker: do(dataclasses.replace(task, losses=[]), worker)


@pytest.mark.long
def test_a_planted_fault_shows_in_the_digest(tmp_path, wanted):
    """The tests above can fail: with a fault in the way back, the digest differs."""
    recipe = norm_recipe(Forgetful(conv_norm, tmp_path, 0, LATER, "half updated"))
    assert recipe.train(workers=3, engine="processes").digest != wanted.digest


@pytest.mark.long
@pytest.mark.parametrize(("place", "told"), [("COMPUTING", "different options"), ("half updated", "is damaged, or")])
def test_schedules_that_are_not_done_again_are_refused(tmp_path, place, told):
    """Workers would update with other rates: who joins the others is seen to differ, and so are all that go back."""
    with pytest.raises(phalanx.PhalanxError, match=told):
        norm_recipe(Unscheduled(conv_norm, tmp_path, 0, LATER, place)).train(workers=3, engine="processes")


class Spoiling(torch.optim.lr_scheduler.LambdaLR):
    """After step 3, an option that makes torch's own optimizer raise in the next one."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda epoch: 1.0)

    def step(self, epoch=None):
        super().step()
        if self.last_epoch == LATER:
            self.optimizer.param_groups[0]["betas"] = None


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_an_update_that_raises_is_undone(workers):
    """An update of torch's own optimizer raises in the middle: the run is over, but the state before it is there."""
    give = functools.partial(FAMILIES["mlp"].recipe, 3, optimizer=functools.partial(torch.optim.Adam, lr=0.01))
    with give(steps=8, scheduler=Spoiling).start(workers=workers, engine="processes") as run:
        with pytest.raises(
            phalanx.WorkerError, match=rf"at step {LATER} in the optimizer; the state is the one before"
        ):
            for _ in run:
                pass
        with pytest.raises(phalanx.RunError, match="cannot go on"):
            run.step()
        result = run.result()
    assert_same(result, give(steps=LATER).train(engine="inline"))


@pytest.mark.long
@pytest.mark.parametrize("place", ["UPDATING", "half updated"])
def test_the_state_that_a_run_began_with_stays_the_callers(tmp_path, place):
    """A run that goes on from a directory loses a worker in its first update: what it began with is still there."""
    (tmp_path / "traps").mkdir()
    make_model = Trapped(conv_norm, tmp_path / "traps", 1, LATER, place)  # acts in workers only
    norm_recipe(make_model, steps=LATER).train(engine="inline", run_dir=tmp_path / "run")
    result = norm_recipe(make_model).train(engine="processes", workers=2, run_dir=tmp_path / "run")
    assert sprung(tmp_path / "traps") == 1
    assert_same(result, norm_recipe().train(engine="inline"))


def slow_accuracy(output, target):
    time.sleep(0.2)
    return accuracy(output, target)


def test_no_worker_is_late_under_a_debugger(monkeypatch):
    """Silence of ten minutes is too long before the first step, but where a debugger traces there is no limit."""
    silent = failures.Deadline().seconds()
    monkeypatch.setattr(failures.sys, "gettrace", lambda: print)
    assert (silent, failures.Deadline().seconds()) == (600, math.inf)


@pytest.mark.long
def test_a_long_evaluation_does_not_count_as_hung(monkeypatch):
    """Each chunk takes less than the deadline, all of them more, by a clock that chunks move: nobody is ended."""
    now, last, expired = [0.0], [b""], failures.HangWatch.expired

    def timed(self, progress, *, starting):
        now[0] += 1.5 * (progress != last[0])
        last[0] = progress
        return expired(self, progress, starting=starting)

    monkeypatch.setattr(failures.HangWatch, "expired", timed)
    clock = types.SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(failures, "time", clock)
    with FAMILIES["mlp"].recipe(4).start(workers=2, engine="processes", deadline_seconds=2.0) as run:
        next(run)
        begun = now[0]
        run.evaluate(slow_accuracy, FEATURES, batch_size=2)
        assert run.incidents == ()
    assert now[0] > begun + 4


def test_a_batch_that_failed_is_not_done_again(tmp_path):
    """A brought batch raises, the step is then done as planned: a later replay does what was done, not what failed."""
    recipe = FAMILIES["mlp"].recipe(4, steps=8, make_model=Trapped(mlp, tmp_path, 1, 5, "half updated"))
    with recipe.start(workers=2, engine="processes") as run:
        for _ in range(3):
            run.step()
        with pytest.raises(phalanx.PhalanxError):
            run.step((torch.randn(8, 7), FEATURES[1][:8]))
        run.finish()
        result = run.result()
    assert sprung(tmp_path) == 1
    assert_same(result, recipe.train(engine="inline"))


assert set(HALVES) < set(PLACES)
