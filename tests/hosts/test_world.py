"""A world of two processes on loopback: run after run, what all must have in common, and why one of them left."""

import dataclasses
import json
import re

import pytest
import torch

import phalanx
from phalanx.callbacks import EarlyStopping, SaveBest
from phalanx.checkpoint.directory import newest_step
from phalanx.engines.hosts.members import Members
from tests.callbacks import jobs as job
from tests.exactness.test_named_losses import recipe
from tests.families import FAMILIES
from tests.hosts.worlds import world


@pytest.mark.long
def test_run_after_run(pair):
    """A process may train again and again, each run ends without a word, and the store listens on loopback.

    User code never sees a process group.
    """
    found = pair("""
from phalanx.engines.hosts.world import World
part = World.part
def parted(world, way, why):
    told.extend([why] if way != "done" else [])
    part(world, way, why)
World.part = parted
def loss(output, target):
    assert not dist.is_initialized()
    return family.loss_fn(output, target)
for replicas in (4, 3, 5):
    tried(lambda: family.recipe(replicas, loss_fn=loss).train(deadline_seconds=20).digest)
    told.append(dist.is_initialized())
World.part = part
port = f":{int(os.environ['MASTER_PORT']):04X}"
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").read().splitlines()[1:]]
told += [place for _, place, _, state, *_ in lines if place.endswith(port) and state == "0A"] if rank == 0 else []
""")
    assert found[0].pop().startswith("0100007F:")
    wanted = [FAMILIES["mlp"].recipe(replicas).train(engine="inline").digest for replicas in (4, 3, 5)]
    assert found == [[wanted[0], False, wanted[1], False, wanted[2], False]] * 2


@pytest.mark.longest
def test_a_world_of_the_caller_s_own():
    """A group that the caller made is used for its store only, and is there afterwards as before."""
    found = world("""
dist.init_process_group("gloo")
for _ in range(2):
    tried(lambda: family.recipe(4).train(deadline_seconds=20).digest)
ones = torch.ones(1)
dist.all_reduce(ones)
told.append(ones.item())
""")
    wanted = FAMILIES["mlp"].recipe(4).train(engine="inline").digest
    assert found == [[wanted, wanted, 2.0]] * 2


@pytest.mark.long
def test_batches_that_all_bring(pair):
    """The same batch everywhere ends in the bits of one process; another in one of them is refused in all."""
    found = pair("""
x, y = family.data
def steps(run, *starts):
    for start in starts:
        run.step((x[start : start + 8], y[start : start + 8]))
    return run.result().digest
with family.recipe(4, data=None, steps=None).start(deadline_seconds=20) as run:
    tried(lambda: steps(run, 0, 3, 1))
    tried(lambda: steps(run, rank))
""")
    x, y = FAMILIES["mlp"].data
    with FAMILIES["mlp"].recipe(4, data=None, steps=None).start(engine="inline") as run:
        for start in (0, 3, 1):
            run.step((x[start : start + 8], y[start : start + 8]))
        wanted = run.result().digest
    assert [told[0] for told in found] == [wanted] * 2
    assert all("the batch of step 3 is another in process 1" in told[1] for told in found), found


@pytest.mark.long
@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_an_error_of_one_process_is_told_to_all(pair, odd):
    """What user code raises in one process ends the others in seconds, with its words; and so does leaving early."""
    found = pair(f"""
odd = {odd}
def loss(output, target):
    loss.calls += 1
    if rank == odd and loss.calls > 9:
        raise ValueError("bad sample 24")
    return family.loss_fn(output, target)
loss.calls = 0
tried(lambda: family.recipe(4, loss_fn=loss, steps=30).train(deadline_seconds=60, workers=2).steps)
tried(lambda: family.recipe(4, make_model=family.make_model if rank != odd else lambda: 1 / 0).train().steps)
def early():
    with family.recipe(4, steps=50).start(deadline_seconds=60) as run:
        for report in run:
            if rank == odd and report.step == 3:
                return "enough"
tried(early)
class Fails:
    everywhere = True
    def step(self, report):
        if rank == odd and report.step == 3:
            raise ValueError("boom")
tried(lambda: family.recipe(4, steps=50).train(deadline_seconds=60, callbacks=[Fails()]).steps)
class Mute(Exception):
    def __str__(self):
        raise LookupError("no text")
def mute(output, target):
    raise Mute
tried(lambda: family.recipe(4, loss_fn=mute).train(deadline_seconds=60, workers=2).steps)
told.append([results[0].steps, results[0].digest])
""")
    mine, other = found[odd], found[1 - odd]
    steps, digest = mine[-1]
    assert other[-1] == mine[-1]
    assert digest == FAMILIES["mlp"].recipe(4, steps=steps).train(engine="inline").digest
    assert "bad sample 24" in mine[0]
    assert mine[0].startswith("WorkerError")
    assert f"process {odd} on " in other[0]
    assert "left the run: WorkerError: ValueError in user code" in other[0]
    assert "division by zero" in mine[1]
    assert f"process {odd} left before this run began: " in other[1]
    assert mine[2] == "enough"
    assert "left the run: it was closed after" in other[2]
    assert "left the run: it was closed after 4 steps, while handling ValueError: boom" in other[3]
    assert all("Mute in user code" in told[4] for told in found), found


@pytest.mark.long
def test_a_run_goes_on(pair, tmp_path):
    """From the directory of rank 0, in all processes: digest, losses and evaluations of a run in one go."""
    found = pair(f"""
x, y = family.data
evaluation = phalanx.Evaluation(lambda output, target: output.double().mean(), (x, y), batch_size=4)
for epochs in (1, 2):
    result = family.recipe(4, steps=None, epochs=epochs).train(
        deadline_seconds=20, run_dir={str(tmp_path)!r}, evaluation=evaluation
    )
told += [result.digest, result.loss_history, [list(item) for item in map(dataclasses.astuple, result.metric_history)]]
told.append(result.resumed_from)
""")
    family = FAMILIES["mlp"]
    evaluation = phalanx.Evaluation(lambda output, target: output.double().mean(), family.data, batch_size=4)
    result = family.recipe(4, steps=None, epochs=2).train(engine="inline", evaluation=evaluation)
    metrics = [list(dataclasses.astuple(item)) for item in result.metric_history]
    assert len(metrics) == 2
    first = len(result.loss_history) // 2
    assert found == [[result.digest, result.loss_history, metrics, first]] * 2


@pytest.mark.campaign
def test_a_store_that_torchrun_keeps():
    """Begun again over the same store, with restarts counted differently, the processes find each other."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    wanted = [FAMILIES["mlp"].recipe(4, steps=2).train(engine="inline").digest]
    for life in range(2):
        code = f"os.environ['TORCHELASTIC_RESTART_COUNT'] = str({life} * rank)\n"
        code += "tried(lambda: family.recipe(4, steps=2).train(deadline_seconds=20).digest)"
        assert world(code, **told) == [wanted] * 2


@pytest.mark.long
def test_what_differs_is_named(pair):
    """Other steps, workers, data, closures or code in one process are refused in all, and devices that cannot be.

    A global that differs is told: it may be the process's rank. So is an entry whose key is longer than a store takes.
    """
    found = pair("""
tried(lambda: family.recipe(4, steps=3 + rank).train())
tried(lambda: family.recipe(4).train(workers=2 + 2 * rank))
tried(lambda: family.recipe(4, steps=2).train(devices=["cuda:0"]))
x, y = family.data
x = x.clone()
x[4, 0] += rank
tried(lambda: family.recipe(4, data=(x, y)).train())
def scaled(factor):
    def loss(output, target):
        return family.loss_fn(output, target) * factor
    return loss
tried(lambda: family.recipe(4, loss_fn=scaled(rank)).train())
other = (lambda output, target: family.loss_fn(output, target)) if rank else family.loss_fn
tried(lambda: family.recipe(4, loss_fn=other).train())
here, phalanx.__version__ = phalanx.__version__, f"0.{rank}.7"
tried(lambda: family.recipe(4).train())
phalanx.__version__ = here
table = {"x" * 5000: rank}
def ranked(output, target):
    return family.loss_fn(output, target) * (1 if rank or table else 1)
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tried(lambda: family.recipe(4, loss_fn=ranked, steps=1).train(deadline_seconds=20).steps)
told[-1] = [told[-1], [str(one.message).partition(", ")[0] for one in caught]]
""")
    for rank, told in enumerate(found):
        assert told[0].startswith("UsageError: steps is ")
        assert told[1].startswith("UsageError: workers is ")
        assert told[2].startswith("UsageError: devices names 'cuda:0'")
        assert told[3].startswith("UsageError: recipe.data: item 0 is ")
        assert told[4].startswith("UsageError: recipe.loss_fn (its variable factor) is ")
        assert told[5].startswith("UsageError: recipe.loss_fn is ")
        assert told[6].startswith("UsageError: version of phalanx is ")
        steps, [first, long] = told[7]
        assert (steps, first) == (1, f"loss_fn (its global rank) is {rank} in process {rank}")
        assert re.fullmatch(rf"loss_fn \(its global table\)\[.x{{900,1000}} \w{{16}} is {rank} in process {rank}", long)


@pytest.mark.long
def test_sigterm(pair, tmp_path):
    """To all processes: the run ends after a step, process 0 saves that, and it goes on from there."""
    found = pair(f"""
import signal
options = {{"run_dir": {str(tmp_path)!r}, "deadline_seconds": 20}}
recipe = family.recipe(4, steps=30)
def steps(run):
    for report in run:
        if report.step == 6:
            run.terminate()
with recipe.start(**options) as run:
    tried(lambda: steps(run))
tried(lambda: recipe.train(**options))
told[1] = [results[0].steps, told[1].resumed_from, told[1].digest]
""")
    wanted = FAMILIES["mlp"].recipe(4, steps=30).train(engine="inline").digest
    assert [told[1] for told in found] == [[8, 8, wanted]] * 2
    assert found[0][0].startswith("Preempted: run.terminate() was called, and the state after 8 steps was saved")
    assert found[1][0].startswith("Preempted: run.terminate() was called, and nothing is saved here")


@pytest.mark.long
def test_the_newest_snapshot_counts(pair, tmp_path):
    """Each process has a directory of its own: all go on from the newest snapshot, and who has it saves."""
    made = FAMILIES["mlp"].recipe
    for rank, steps in enumerate((3, 5)):
        made(4, steps=steps).train(engine="inline", run_dir=tmp_path / str(rank))
    found = pair(f"""
tried(lambda: family.recipe(4, steps=8).train(run_dir={str(tmp_path)!r} + f"/{{rank}}", deadline_seconds=20))
told[0] = [told[0].digest, told[0].resumed_from]
""")
    assert found == [[[made(4, steps=8).train(engine="inline").digest, 5]]] * 2
    assert [newest_step(tmp_path / str(rank)) for rank in range(2)] == [3, 8]


BEST = """
import tests.callbacks.jobs as job
from phalanx.callbacks import SaveBest
for run_dir in (None, {folder!r}, {folder!r}):
    result = job.recipe(epochs=2 if len(told) < 2 else 3).train(
        run_dir=run_dir, evaluation=job.evaluation(), deadline_seconds=20, callbacks=[SaveBest("accuracy")]
    )
    told.append([result.best.value, result.best.steps, {{k: v.tolist() for k, v in result.best.weights.items()}}])
"""


@pytest.mark.long
def test_every_process_has_the_best(pair, tmp_path):
    """Value, steps and weights are those of a run in one process: in memory, from the first one's file, resumed."""
    found = pair(BEST.format(folder=str(tmp_path)))
    assert found[0] == found[1]
    for epochs, one in zip((2, 2, 3), found[0], strict=True):
        alone = job.recipe(epochs=epochs).train(
            engine="inline", evaluation=job.evaluation(), callbacks=[SaveBest("accuracy")]
        )
        weights = {name: value.tolist() for name, value in alone.best.weights.items()}
        assert one == [alone.best.value, alone.best.steps, weights]


STOPPING = """
import tests.callbacks.jobs as job
from phalanx.callbacks import EarlyStopping
due = job.evaluation()
def stopping():
    return [EarlyStopping("accuracy", patience=2)]
"""


@pytest.mark.long
@pytest.mark.parametrize("broken_off", [False, True])
def test_early_stopping(pair, tmp_path, broken_off):
    """All processes end after the step after which one alone does, also where the run was broken off and goes on."""
    whole = job.recipe().train(
        engine="inline", callbacks=[EarlyStopping("accuracy", patience=2)], evaluation=job.evaluation()
    )
    assert whole.steps < job.EPOCHS * 5, "it stopped early"
    before = f"""
options = dict(run_dir={str(tmp_path)!r}, evaluation=due, deadline_seconds=20, callbacks=stopping())
with job.recipe().start(**options) as run:
    for report in run:
        if report.step + 2 == {whole.steps}:
            break
"""
    found = pair(STOPPING + (before if broken_off else "") + f"""
tried(lambda: job.recipe().train(
    run_dir={str(tmp_path)!r}, evaluation=due, deadline_seconds=20, callbacks=stopping()
))
result = told.pop()
told += [result.steps, result.digest, result.resumed_from] if not isinstance(result, str) else [result]
""")  # fmt: skip
    assert found == [[whole.steps, whole.digest, whole.steps - 1 if broken_off else None]] * 2


ENDS = """
import tests.callbacks.jobs as job
from phalanx.callbacks import EarlyStopping
def same(output, target):
    time.sleep(rank == {slow})
    return output.sum() * 0
def early():
    due = phalanx.Evaluation(same, (job.HELD_OUT, job.TARGETS), batch_size=60)
    result = job.recipe().train(evaluation=due, callbacks=[EarlyStopping("same", 1, mode="max")], deadline_seconds=20)
    return [result.digest, result.stopped_early]
def alone():
    with job.recipe().start(deadline_seconds=20) as run:
        for report in run:
            if rank == {slow} and report.step == 3:
                run.stop()
    return run.steps
tried(early)
tried(alone)
"""


@pytest.mark.long
@pytest.mark.parametrize("slow", [0, 1])
def test_early_stopping_after_a_longer_evaluation(pair, slow):
    """Who evaluates longer than the other comes to the same end. Its twin: one that is stopped alone ends the other."""

    def same(output, target):
        return output.sum() * 0

    due = phalanx.Evaluation(same, (job.HELD_OUT, job.TARGETS), batch_size=60)
    wanted = job.recipe().train(engine="inline", callbacks=[EarlyStopping("same", 1, mode="max")], evaluation=due)
    found = pair(ENDS.format(slow=slow))
    assert [told[0] for told in found] == [[wanted.digest, wanted.stopped_early]] * 2
    assert "EarlyStopping" in wanted.stopped_early
    assert found[slow][1] == 4
    assert found[1 - slow][1].startswith(f"LeftError: process {slow} on ")


HANGS = """
import pathlib, warnings
from unittest import mock
from phalanx.engines.hosts import driver
ended = pathlib.Path({ended!r})
class Hangs:
    everywhere = True
    def step(self, report):
        end = time.monotonic() + 30
        while rank == 0 and report.step == 3 and not ended.exists() and time.monotonic() < end:
            time.sleep(0.05)
def trained():
    with family.recipe(4, steps=4).start(deadline_seconds=20, callbacks=[Hangs()]) as run:
        run.finish()
        run._engine._world.seconds = 0.5  # planted
    return run.result().digest
with mock.patch.object(driver, "LAST_PATIENCE", 0.5, create=True), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tried(trained)
ended.touch()
told.append([str(one.message) for one in caught if "have not ended" in str(one.message)])
"""


@pytest.mark.long
def test_who_hangs_after_the_last_step_is_not_waited_for(pair, tmp_path):
    """The other one says so and ends, with the whole answer; and so does the one that hung, once it goes on."""
    wanted = FAMILIES["mlp"].recipe(4, steps=4).train(engine="inline").digest
    [first, said], [other, warned] = pair(HANGS.format(ended=str(tmp_path / "ended")))
    assert [first, other] == [wanted] * 2
    assert [said, len(warned)] == [[], 1]
    assert "this one does not wait for them" in warned[0]


DIES = """
def loss(output, target):
    if rank == 1 and phalanx.current_step() == 3:
        os.kill(os.getpid(), 11)
    return family.loss_fn(output, target)
tried(lambda: family.recipe(4, loss_fn=loss, steps=6).train(workers=2, deadline_seconds=20).steps)
"""


@pytest.mark.long
def test_a_step_that_ends_workers(pair):
    """Three of one host in a row are enough: its error names replica and step, and the other host hears of it."""
    [other], [mine] = pair(DIES)
    why = "RunError: replica 2 of step 3 ended 3 workers in a row that computed it ("
    assert mine.startswith(why)
    assert other.startswith("RunError: process 1 on ")
    assert f" left the run: {why}" in other


@pytest.mark.long
def test_named_losses(pair):
    """Every process has the named losses of one process, also one whose replicas have no samples."""
    found = pair("""
from tests.exactness.test_named_losses import recipe
for size in (11, 2):
    with recipe(batch_size=size).start(workers=4, deadline_seconds=20) as run:
        told.append(json.dumps([dict(report.losses) for report in run]))
""")
    wanted = []
    for size in (11, 2):
        with recipe(batch_size=size).start(engine="inline") as run:
            wanted.append(json.dumps([dict(report.losses) for report in run]))
    assert found == [wanted] * 2
    assert all("hits" in text for text in wanted)


@pytest.mark.parametrize(("run", "counts"), [(6, False), (7, True), (None, True)])
def test_last_words_of_the_run_before(run, counts):
    """They may come after the next run has been entered: a process that has ended that one is no loss of this one."""
    members = object.__new__(Members)
    members.left, members._left_run, members.places, members.me = {}, {}, {}, 1
    members._tell = lambda _: None
    members._take({"from": 0, "bye": {"way": "closed", "why": "it was closed after 54 steps"}, "run": run})
    members.begin(7, 0, {0: ["127.0.0.1", 1], 1: ["127.0.0.1", 2]})
    assert (0 in members.left) == counts
