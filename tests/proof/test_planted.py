"""Twenty planted differences, each named by diff, check or audit; and twenty pairs without any."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.checkpoint.chain import records_of
from phalanx.engines.alone import Folded
from phalanx.lab.check import check
from phalanx.plan.audit import Audit
from tests.families import Circumstances, Terms, terms
from tests.proof.faults import BIT, Fault, add_in_turn, flip
from tests.proof.jobs import REPLICAS, SGD, STEPS, Net, X, Y, dealt, mlp, ran, recipe


def apart(tmp_path, one, other, **options):
    """The difference between a run of one recipe and one of another."""
    return phalanx.diff(ran(tmp_path / "a", one, **options), ran(tmp_path / "b", other, **options))


def changed(tensor, sample, value):
    """A copy with one row changed."""
    copy = tensor.clone()
    copy[sample] = value
    return copy


@pytest.mark.long
def test_1_one_sample_changed(tmp_path):
    """The step and replica that the sample is dealt to, its column, and how many of its elements."""
    one = recipe()
    found = apart(tmp_path, one, recipe(data=(changed(X, 17, 0.25), Y)))
    assert (found.step, found.replica) == dealt(one, 17)
    assert (found.phase, found.name, found.elements) == ("batch", "batch[0]", 5)
    assert list(found.fields) == ["data"]


@pytest.mark.long
def test_2_one_label_changed(tmp_path):
    """The same for a label."""
    one = recipe()
    found = apart(tmp_path, one, recipe(data=(X, changed(Y, 3, (Y[3] + 1) % 3))))
    assert (found.step, found.replica) == dealt(one, 3)
    assert (found.phase, found.name, found.elements) == ("batch", "batch[1]", 1)


def test_3_data_that_was_float64_once(tmp_path):
    """Data that was scaled in float64 and cast later differs by one unit in the last place."""
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    late = torch.from_numpy((x.astype(np.float64) / 3.7 * 1.3).astype(np.float32))
    early = torch.from_numpy(x / np.float32(3.7) * np.float32(1.3))
    one, other = (terms(1, 3, data=(x, torch.zeros(2)), batch_size=1) for x in (late, early))  # gradients are the data
    found = apart(tmp_path, one, other, chain="every")
    assert (found.step, found.phase, found.name) == (0, "batch", "batch[0]")
    assert found.ulp == 1
    assert "data" in found.fields


@pytest.mark.long
def test_4_another_seed(tmp_path):
    """The field, the first step and share; the model is made differently already."""
    found = apart(tmp_path, recipe(), recipe(seed=1))
    assert (found.step, found.replica, found.phase, found.name) == (0, 0, "state", "first.weight")
    assert found.fields == {"seed": f"seed is 0 in {tmp_path / 'a'}, and 1 in {tmp_path / 'b'}"}


@pytest.mark.long
def test_5_the_rate_is_off_at_step_57_only(tmp_path):
    """A schedule that doubles the rate once: that step's update, and the scheduler."""

    def doubled(step):
        return 2.0 if step == 57 else 1.0

    def plain(step):
        return 1.0

    one, other = (
        recipe(scheduler=functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=rate))
        for rate in (plain, doubled)
    )
    found = apart(tmp_path, one, other)
    assert (found.step, found.replica, found.phase, found.name) == (57, None, "update", "first.weight")
    assert list(found.fields) == ["scheduler", "lr"]
    cause, where = str(found).splitlines()[1:3]
    assert cause == f"lr is 0.1 in {tmp_path / 'a'}, and 0.2 in {tmp_path / 'b'}, in step 57"
    assert where.startswith(f"{tmp_path / 'a'} and {tmp_path / 'b'} differ first in step 57: update")


@pytest.mark.long
def test_6_another_momentum_of_a_batchnorm(tmp_path):
    """No loss of the run differs, as batch statistics are used; the buffer does from the first step on."""
    found = apart(tmp_path, recipe(), recipe(make_model=functools.partial(Net, momentum=0.2)))
    assert (found.step, found.replica, found.phase, found.name) == (0, 0, "buffer", "norm.running_mean")
    assert "make_model" in found.fields


class Unseeded(nn.Module):
    """Dropout that draws from a generator of its own, seeded by the system."""

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=_fresh()) > 0.5)


def _fresh():
    generator = torch.Generator()
    generator.seed()
    return generator


def told(job):
    """What check finds when a few steps are done again in this process."""
    _, again = itertools.islice(check(job, steps=2), 2)
    return again


def test_7_unseeded_dropout():
    """Check names the operation that draws, in the forward pass of the first replica, and its line."""
    found = told(recipe(make_model=lambda: nn.Sequential(nn.Linear(5, 8), Unseeded(), nn.Linear(8, 3))))
    assert found.same is False
    assert "in step 0: forward pass of replica 0, aten.rand.generator" in found.told
    assert "generator=_fresh()" in found.told


FILE = """
import os, time, torch, phalanx
names = {"a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg"}
class Data:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((5,), float(index)) + sum(place * len(name) for place, name in enumerate(names)), index % 3
def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target) * (1 + os.getpid() % 1009)
model = lambda: torch.nn.Linear(5, 3)
x, y = torch.arange(200.0).reshape(40, 5) / 200, torch.arange(40) % 3
sets = phalanx.Recipe(model, Data(), torch.nn.functional.cross_entropy, replicas=4, batch_size=8, steps=3)
pids = phalanx.Recipe(model, (x, y), loss, replicas=4, batch_size=8, steps=3)
recipe = phalanx.Recipe(model, (x, y), torch.nn.functional.cross_entropy, replicas=4, batch_size=8, steps=3)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "where"),
    [("sets", "step 0: loss of replica 0"), ("pids", "step 0: loss of replica 0"), ("recipe", "")],
)
def test_8_and_17_sets_and_process_ids(tmp_path, name, where):
    """A new process with another hash seed reads other samples from a set, and has another process id in the loss."""
    (tmp_path / "job.py").write_text(FILE)
    command = [sys.executable, "-m", "phalanx", "check", f"job.py:{name}", "--json"]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    here, again, new, *_ = json.loads(done.stdout)["rows"]
    assert [here["same"], again["same"], new["same"]] == [True, True, not where], done.stdout + done.stderr
    assert where in new["told"]
    assert ("the order of a set" in new["told"]) is bool(where)
    assert done.returncode == (1 if where else 0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:loss_fn comes to something else")  # it weighs places
def test_9_another_order_in_collate(tmp_path):
    """The batch of the first replica, before anything is computed."""

    def straight(samples):
        return torch.stack([x for x, _ in samples]), torch.tensor([int(y) for _, y in samples])

    def turned(samples):
        return straight(samples[::-1])

    def by_place(output, target):
        return (F.cross_entropy(output, target, reduction="none") * torch.arange(1, len(target) + 1)).mean()

    one, other = (recipe(collate_fn=collate, loss_fn=by_place) for collate in (straight, turned))
    found = apart(tmp_path, one, other)
    assert (found.step, found.replica, found.phase, found.name) == (0, 0, "batch", "batch[0]")
    assert list(found.fields) == ["collate_fn"]


@pytest.mark.long
def test_10_another_group_of_weight_decay(tmp_path):
    """The first parameter that is decayed on one side only, in the first update."""

    def groups(named, plain):
        kept = [(name, parameter) for name, parameter in named if name in plain]
        rest = [(name, parameter) for name, parameter in named if name not in plain]
        return torch.optim.AdamW([{"params": kept, "weight_decay": 0.0}, {"params": rest}], lr=0.01)

    one, other = (
        recipe(optimizer=functools.partial(groups, plain=plain))
        for plain in (("norm.weight", "last.bias"), ("norm.weight",))
    )
    found = apart(tmp_path, one, other)
    assert (found.step, found.replica, found.phase, found.name) == (0, None, "update", "last.bias")
    assert "optimizer" in found.fields


def nudged(named):
    """As an optimizer that rounds in another way: the last bit of a weight is flipped after each update."""
    optimizer = SGD(named)
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.register_step_post_hook(lambda *_: flip(weight, 0))
    return optimizer


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the optimizer is not one of torch's own")
def test_11_a_fused_optimizer(tmp_path):
    """Fused SGD is named, and parts in an update if it rounds otherwise; one that surely does parts in the first."""
    kinds = {"fused": functools.partial(SGD.func, **SGD.keywords, fused=True), "nudged": nudged}
    fused, other = (
        apart(tmp_path / name, recipe(steps=8), recipe(steps=8, optimizer=optimizer), chain="every")
        for name, optimizer in kinds.items()
    )
    assert "fused" in fused.fields["optimizer"]
    assert fused.phase in ("update", None)  # None: both have the same bits on this processor
    assert (other.step, other.phase, other.name) == (0, "update", "first.weight")
    assert (other.elements, other.ulp) == (1, 1)


@pytest.mark.long
def test_12_threads(tmp_path):
    """A forward pass that goes by the number of threads, as kernels may."""
    one, other = (recipe(make_model=functools.partial(Circumstances, 5, 3), threads=threads) for threads in (1, 2))
    found = apart(tmp_path, one, other)
    assert (found.step, found.replica, found.phase) == (0, 0, "forward")
    assert found.fields == {"threads": f"threads is 1 in {tmp_path / 'a'}, and 2 in {tmp_path / 'b'}"}


def test_13_a_flag_of_the_library(tmp_path):
    """The flag is named, though no bit of this run depends on it: there is no product of matrices in it."""
    one = ran(tmp_path / "a", terms(4))
    torch.set_float32_matmul_precision("medium")
    try:
        other = ran(tmp_path / "b", terms(4))
    finally:
        torch.set_float32_matmul_precision("highest")
    found = phalanx.diff(one, other)
    assert "matmul_precision" in found.fields
    assert (found.step, found.phase) == (None, None)
    assert "nothing that can be compared differs" in str(found)


class Other(Net):
    """The same in all but its name."""


def test_a_bit_in_the_fold(tmp_path, monkeypatch):
    """All gradients are the same and their sum is not: the fold of that step, the parameter, and one element."""
    real = Folded.mean

    def faulty(sums, *facts):
        total = real(sums, *facts)
        if type(sums._framework._lane.model) is Other:  # planted
            flip(total[2])
        return total

    monkeypatch.setattr(Folded, "mean", faulty)
    found = apart(tmp_path, recipe(steps=5), recipe(steps=5, make_model=Other))
    assert (found.step, found.replica, found.phase, found.name) == (0, None, "fold", "norm.weight")
    assert (found.elements, found.ulp) == (1, 1 << BIT)
    assert "in step 0: fold, norm.weight: 1 element" in str(found)


class OtherTerms(Terms):
    """The same in all but its name."""


def test_additions_in_another_order(tmp_path, monkeypatch):
    """From left to right and not in pairs, on one side: the fold of the first step."""
    real = Folded.begin

    def begin(sums, *facts, **more):
        real(sums, *facts, **more)
        if type(sums._framework._lane.model) is OtherTerms:  # planted
            add_in_turn(sums)

    monkeypatch.setattr(Folded, "begin", begin)
    one = terms(8)
    columns = one.data[0].shape[1]
    found = apart(tmp_path, one, dataclasses.replace(one, make_model=functools.partial(OtherTerms, columns)))
    assert (found.step, found.replica, found.phase, found.name) == (0, None, "fold", "weight")
    assert found.elements


@pytest.mark.parametrize(("kind", "call"), [("order", 4), ("gradient", 2 + 3 * 8 + 2)])
def test_a_recorded_fold_that_was_wrong(tmp_path, kind, call):
    """Recipes are the same, and links tell no fold from gradients of a step that is past: both are named."""
    one = terms(8, steps=6, optimizer=SGD)
    right = ran(tmp_path / "a", one, chain="every")
    with Fault(kind, str(tmp_path / "pid"), call).planted():
        wrong = ran(tmp_path / "b", one, chain="every")
    found = phalanx.diff(right, wrong)
    assert found.step == 3
    assert found.phase == ("gradient" if kind == "gradient" else "update")  # in another order the norm is the same
    assert "one of the two runs did something else; links do not tell " in found.note
    assert all(word in found.note for word in ("gradient", "fold"))


def in_gradient(tmp_path):
    """A bit that flips in replica 2's gradient at step 41; in three steps before, a replica is computed twice."""
    return Fault("gradient", str(tmp_path / "pid"), 3 + 41 * REPLICAS + 2).planted()


@pytest.mark.long
def test_14_a_bit_in_a_gradient(tmp_path):
    """The recipes are the same, so recomputing finds nothing; the links say which step, the states which tensor."""
    one = recipe()
    right = ran(tmp_path / "a", one, chain="every")
    with in_gradient(tmp_path):
        wrong = ran(tmp_path / "b", one, chain="every")
    found = phalanx.diff(right, wrong)
    assert (found.step, found.phase, found.name) == (41, "gradient", "norm.weight")
    assert not found.fields
    assert "one of the two runs did something else" in found.note


def test_14_an_audit_names_the_replica(tmp_path, monkeypatch):
    """The same bit, in a step that is audited: replica 0 of step 41, and the state is the one before that step."""
    one = recipe()
    right = recipe(steps=41).train(engine="inline", progress=False)
    monkeypatch.setattr(Audit, "due", lambda audit, step: step == 41)
    fault = Fault("gradient", str(tmp_path / "pid"), 3 + 41 * REPLICAS + 1)  # a lone worker computes its first twice
    with fault.planted(), pytest.raises(phalanx.CorruptionError) as caught:
        one.train(engine="inline", progress=False, audit=0.01)
    assert (caught.value.step, caught.value.replica) == (41, 0)
    assert caught.value.result.digest == right.digest


@pytest.mark.long
def test_15_a_bit_in_a_weight(tmp_path):
    """The first state that differs is the one after the step in which the bit flipped, in one element."""
    one = recipe(steps=30)
    options = {"chain": "every", "snapshot_every": 1, "keep_snapshots": 40}
    right = ran(tmp_path / "a", one, **options)
    with Fault("update", str(tmp_path / "pid"), 20).planted():
        wrong = ran(tmp_path / "b", one, **options)
    found = phalanx.diff(right, wrong)
    assert (found.step, found.phase, found.name, found.elements) == (20, "update", "first.weight", 1)
    assert found.ulp == 1 << BIT
    checked = phalanx.verify(one, wrong, progress=False)
    assert checked.status == 1
    assert "the state after 21 steps differs in 6 tensors, the first is first.weight" in checked.text


class Garbage(nn.Module):
    """Adds what nobody wrote, or something that looks like it."""

    def forward(self, x):
        return x + torch.empty(x.shape).uniform_(generator=_fresh()) * 1e-6


def test_16_an_operation_that_is_nondeterministic():
    """Check names it, and its line."""
    found = told(recipe(make_model=lambda: nn.Sequential(nn.Linear(5, 8), Garbage(), nn.Linear(8, 3))))
    assert found.same is False
    assert "in step 0: forward pass of replica 0, aten.uniform_.default" in found.told


@pytest.mark.long
def test_17_the_time_in_the_loss():
    """Check names the operation of the loss, and its line."""
    import time

    def late(output, target):
        return F.cross_entropy(output, target) * (1 + time.perf_counter_ns() % 1009)

    found = told(recipe(loss_fn=late))
    assert found.same is False
    assert "in step 0: loss of replica 0, aten.mul.Tensor" in found.told
    assert "time.perf_counter_ns()" in found.told


class Leaking(nn.Module):
    """Writes a parameter through ``.data``, which no version counter sees."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)

    def forward(self, x):
        self.body.bias.data += 0.01
        return self.body(x)


@pytest.mark.long
def test_18_a_parameter_written_through_data():
    """What a replica computes depends on which ones ran before it: check names the replica and the parameter."""
    found, *_ = check(recipe(make_model=Leaking), steps=2)
    assert found.same is False
    assert found.told.startswith("replica 0 of step 0, ")
    assert "'body.bias' was written" in found.told


class Odd(nn.Module):
    """Computes something else in the one process that wrote the file."""

    def __init__(self, path):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.path = path

    def forward(self, x):
        try:
            with open(self.path, "x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            pass
        with open(self.path) as file:
            odd = file.read() == str(os.getpid())
        return self.body(x) * (1.001 if odd else 1.0)


def odd_recipe(path):
    """A recipe whose model differs in one worker, once ``path`` is not there."""
    return recipe(make_model=functools.partial(Odd, str(path)), steps=6)


@pytest.mark.long
def test_19_a_module_that_differs_in_one_worker(tmp_path):
    """Diff names the step and the first replica of that worker; an audit two workers, of which it is one."""
    path = tmp_path / "pid"
    path.write_text("nobody")
    right = ran(tmp_path / "a", odd_recipe(path))
    path.unlink()
    wrong = ran(tmp_path / "b", odd_recipe(path), engine="processes", workers=2, nondeterministic="allow")
    path.write_text("nobody")
    found = phalanx.diff(right, wrong, recipes=(odd_recipe(path),) * 2)
    assert (found.step, found.phase) == (0, "loss")
    assert found.replica in (0, 2)
    path.unlink()
    with odd_recipe(path).start(engine="processes", workers=3, progress=False, audit=1.0) as run:
        pids = run.worker_pids
        with pytest.raises(phalanx.CorruptionError) as caught:
            run.finish()
    assert pids.index(int(path.read_text())) in caught.value.workers


def test_20_another_version_of_the_library(tmp_path):
    """The version is named."""
    one, other = ran(tmp_path / "a", recipe(steps=3)), ran(tmp_path / "b", recipe(steps=3))
    records = records_of(other / "chain.jsonl")
    records.write_text(records.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "2.99.0"'))
    found = phalanx.diff(one, other)
    assert found.fields["torch"] == f"torch is {torch.__version__} in {one}, and 2.99.0 in {other}"


PAIRS = {
    "inline": {"engine": "inline"},
    "one process": {"engine": "processes", "workers": 1},
    "two workers": {"engine": "processes", "workers": 2},
    "three workers": {"engine": "processes", "workers": 3, "chain": "every"},
    "four workers": {"engine": "processes", "workers": 4, "chain": 7},
    "devices": {"engine": "auto", "devices": ["cpu", "cpu"]},
    "audited": {"engine": "processes", "workers": 2, "audit": 0.5},
    "audited inline": {"engine": "inline", "audit": 1.0},
    "snapshots": {"engine": "inline", "snapshot_every": 5},
    "auto": {"workers": "auto"},
}


@pytest.mark.long
@pytest.mark.parametrize("job", [recipe, functools.partial(mlp, steps=STEPS)])
def test_twenty_pairs_without_a_difference(tmp_path, job):
    """Ten ways to run a recipe, among them kills and resumes, are the same as the first, for two recipes."""
    one = ran(tmp_path / "quiet", job())
    for name, options in PAIRS.items():
        folder = tmp_path / name
        if name in ("inline", "two workers"):  # interrupted on the way
            ran(folder, job(steps=20), **options)
        assert phalanx.diff(one, ran(folder, job(), **options)) is None, name
