"""verify, certify, diff of other things, and the helpers for other people's tests."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import phalanx
import phalanx.testing
from phalanx.checkpoint.chain import CHAIN
from phalanx.proof.diff import computed
from phalanx.proof.difference import Difference, compare, taken
from phalanx.proof.instant import Instant
from phalanx.proof.verify import certify, check_certificate
from tests.proof.faults import Fault
from tests.proof.jobs import Net, X, Y, mlp, ran, recipe


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"steps": (3, 7)}])
def test_a_run_is_what_it_says(tmp_path, options):
    """Whole, in two workers, or a part: what is computed again has the run's links."""
    job = recipe(steps=12)
    folder = ran(tmp_path, job, snapshot_every=4, chain=3)
    found = phalanx.verify(job, folder, progress=False, **options)
    assert found.status == 0, found.text
    assert found.steps == (4 if "steps" in options else 12)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"lr": 0.1', '"lr": 0.2', "step 0 differs: update: lr is 0.1 computed again, and 0.2"),
        (
            '"weights": [1.0, 1.0',
            '"weights": [1.0, 2.0',
            "loss: weight of replica 1 is 1.0 computed again, and 2.0 in the run",
        ),
        ('"link": "', '"link": "0', "damaged at step 0"),
    ],
)
def test_a_chain_that_was_changed(tmp_path, old, new, said):
    """A number that was written over is found, with what it should be; a link that is none is damage."""
    job = recipe(steps=4)
    folder = ran(tmp_path, job)
    text = (folder / CHAIN).read_text()
    (folder / CHAIN).write_text(text.replace(old, new, 1))
    if "damaged" in said:
        with pytest.raises(phalanx.SnapshotError, match=said):
            phalanx.verify(job, folder, progress=False)
        return
    found = phalanx.verify(job, folder, progress=False)
    assert found.status == 1
    assert said in found.text


@pytest.mark.parametrize(
    ("brought", "options", "status", "steps", "said"),
    [
        ({5}, {}, 2, 9, "3 of the steps cannot be computed again: the batch of step 5 was brought by the caller"),
        ({5, 8}, {}, 2, 5, "the batch of step 5 and of 1 more was brought"),
        ({5}, {"steps": (6, 8)}, 2, 0, "it cannot be told: 2 of the steps"),
        ({5}, {"steps": (8, 12)}, 0, 4, "the same: 4 steps"),
        (set(), {}, 0, 12, "the same: 12 steps"),
    ],
)
def test_a_batch_that_was_brought(tmp_path, brought, options, status, steps, said):
    """A step on a batch that the caller brought is named, and those after it; verify goes on at the next snapshot."""
    job = recipe(steps=12)
    with job.start(run_dir=tmp_path, snapshot_every=4, chain=3, engine="inline") as run:
        for step in range(12):
            run.step((X[step : step + 8], Y[step : step + 8])) if step in brought else run.step()
    found = phalanx.verify(job, tmp_path, progress=False, **options)
    assert (found.status, found.steps) == (status, steps)
    assert said in found.text
    chain = tmp_path / CHAIN
    chain.write_text(chain.read_text().replace('"lr": 0.1', '"lr": 0.2'))
    assert phalanx.verify(job, tmp_path, progress=False, **options).status == (1 if steps else 2)


def test_what_cannot_be_checked(tmp_path):
    """Another environment or recipe is told by name, with status 2; a directory without a chain is refused."""
    job = recipe(steps=3)
    folder = ran(tmp_path / "a", job)
    assert phalanx.verify(recipe(steps=3, seed=1), folder).text.startswith(
        "it cannot be checked: the recipe is another: seed"
    )
    torch.set_float32_matmul_precision("medium")
    try:
        found = phalanx.verify(job, folder)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (found.status, found.steps) == (2, 0)
    assert "matmul_precision is 'medium', was 'highest' in the run" in found.text
    (folder / CHAIN).unlink()
    with pytest.raises(phalanx.UsageError, match="no chain"):
        phalanx.verify(job, folder)
    with pytest.raises(phalanx.UsageError, match="steps is 2:9"):
        phalanx.verify(job, ran(tmp_path / "b", job), steps=(2, 9))


@pytest.mark.long
def test_a_certificate(tmp_path):
    """It holds for the recipe and data of the run, trained again, and for no other recipe, data, or text of its own."""
    job = recipe(steps=4)
    folder = ran(tmp_path / "run", job)
    result = job.train(run_dir=folder, engine="inline", progress=False)
    found, facts = certify(job, folder)
    assert (found.status, found.steps) == (0, 4)
    assert (facts["chain"], facts["digest"], facts["steps"]) == (result.chain, result.digest, 4)
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(facts))
    assert check_certificate(path, job, workers=2).status == 0
    assert check_certificate(path, recipe(steps=4, seed=2)).text == "the recipe differs: seed is 2 here, and 0 there"
    other = X.clone()
    other[39, 4] += 1
    assert check_certificate(path, recipe(steps=4, data=(other, Y))).status == 1
    for name, value in {"steps": 3, "chain": "0" * 64, "digest": "0" * 64}.items():
        path.write_text(json.dumps({**facts, name: value}))
        assert check_certificate(path, job).status == 1, name
    path.write_text(json.dumps({**facts, "recipe": {"format": 0}}))
    assert "cannot be read" in check_certificate(path, job).text
    for text in ("{}", "[]", json.dumps({**facts, "steps": "4"}), json.dumps({**facts, "recipe": ["no recipe"]})):
        path.write_text(text)
        with pytest.raises(phalanx.UsageError, match="no certificate"):
            check_certificate(path, job)


def test_a_run_that_is_not_what_it_says_gets_no_certificate(tmp_path):
    """A number of its chain was written over: verify says which, and there are no facts."""
    job = recipe(steps=4)
    folder = ran(tmp_path, job)
    (folder / CHAIN).write_text((folder / CHAIN).read_text().replace('"lr": 0.1', '"lr": 0.2', 1))
    found, facts = certify(job, folder)
    assert (found.status, facts) == (1, {})
    assert "step 0" in found.text


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_of_several_stretches_the_first_step_that_differs_is_told(tmp_path, workers):
    """In this process and in two others: a run in which a weight flipped once, and one in which nothing did."""
    job = recipe(steps=40)
    folders = [ran(tmp_path / "right", job, snapshot_every=8, keep_snapshots=9, chain=4)]
    with Fault("update", str(tmp_path / "pid"), 17).planted():
        folders.append(ran(tmp_path / "wrong", job, snapshot_every=8, keep_snapshots=9, chain=4))
    right, wrong = (phalanx.verify(job, folder, workers=workers, progress=False) for folder in folders)
    assert (right.status, right.steps) == (0, 40)
    assert (wrong.status, wrong.steps) == (1, 18)
    assert "step 18 differs" in wrong.text


def test_files_of_tensors(tmp_path):
    """Safetensors files, dicts of tensors, results and snapshots are compared; a pickle is not even opened."""
    one, other = Net(), Net()
    save_file(one.state_dict(), tmp_path / "a.safetensors")
    save_file({**one.state_dict(), "last.bias": other.last.bias.detach()}, tmp_path / "b.safetensors")
    assert phalanx.diff(tmp_path / "a.safetensors", one.state_dict()) is None
    found = phalanx.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (found.phase, found.name, found.elements) == ("tensors", "last.bias", 3)
    job = recipe(steps=3)
    with job.start(engine="inline", progress=False) as run:
        next(run)
        run.save(tmp_path / "snapshot")
        assert phalanx.diff(tmp_path / "snapshot", run.result()) is None
        next(run)
        assert phalanx.diff(run.result(), tmp_path / "snapshot").name == "first.weight"
    (tmp_path / "c.pt").write_bytes(b"anything")
    with pytest.raises(phalanx.UsageError, match="phalanx reads none"):
        phalanx.diff(tmp_path / "c.pt", tmp_path / "a.safetensors")
    with pytest.raises(phalanx.UsageError, match="does not exist"):
        phalanx.diff(tmp_path / "d", tmp_path / "a.safetensors")
    with pytest.raises(phalanx.UsageError, match="a int cannot be compared"):
        phalanx.diff(3, tmp_path / "a.safetensors")
    (tmp_path / "e.safetensors").write_bytes(b"12345678anything")
    with pytest.raises(phalanx.SnapshotError, match="cannot be used"):
        phalanx.diff(tmp_path / "e.safetensors", tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("dtype", "one", "other", "ulp"),
    [
        (torch.float32, 1.0, 1.0 + 2**-23, 1), (torch.float64, -1.0, -1.0 - 2**-52, 1), (torch.float16, 0.0, -0.0, 1),
        (torch.bfloat16, 1.0, 1.0 + 2**-7, 1), (torch.float32, -(2**-149), 2**-149, 3), (torch.int64, 4, 5, None),
    ],
)  # fmt: skip
def test_units_in_the_last_place(dtype, one, other, ulp):
    """Neighbouring floats of every kind are one unit apart, over zero too; integers have none."""
    left, right = ({"x": taken(torch.tensor([value, 2], dtype=dtype))} for value in (one, other))
    assert compare(left, right) == Difference(name="x", elements=1, ulp=ulp)
    assert compare(left, left) is None


def test_arrays_and_shapes_that_differ():
    """Another shape or dtype, and a name that one side lacks, differ without a distance."""
    one = {"x": taken(np.zeros((2, 3)))}
    assert compare(one, {"x": taken(np.zeros((3, 2)))}) == Difference(name="x")
    assert compare(one, {"x": taken(np.zeros((2, 3), np.float32))}) == Difference(name="x")
    assert compare(one, {**one, "y": taken(np.zeros(1))}) == Difference(name="y")


def test_arrays_of_objects_are_compared_by_what_they_hold():
    """Not by where in memory the objects lie, which is another place in each process; nor do gradients matter."""
    one, same, other = (np.array([number, "two"], object) for number in (1000.5, 1000.5, 3))
    assert compare({"x": taken(one)}, {"x": taken(same)}) is None
    assert compare({"x": taken(one)}, {"x": taken(other)}) == Difference(name="x")
    double = torch.zeros(2, dtype=torch.complex128)
    assert compare({"x": taken(double)}, {"x": taken(double.clone().requires_grad_())}) is None


@pytest.mark.long
def test_the_same_run_in_other_peoples_tests():
    """A good recipe passes with any number of workers and kills; one that depends on its process fails with a place."""
    phalanx.testing.assert_same_run(mlp(steps=5))

    def odd(output, target):
        import os

        return F.cross_entropy(output, target) * (1 + os.getpid() % 1009)

    with pytest.raises(AssertionError, match=r"workers=2: replica \d of step 0.* came to something else in worker"):
        phalanx.testing.assert_same_run(mlp(steps=3, loss_fn=odd), workers=(1, 2), kills=0)


class Noisy(torch.nn.Module):
    """Draws into memory that nobody has written: dropout does, and so does this."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = torch.nn.Linear(5, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 3)

    def forward(self, x):
        h = self.drop(self.first(x))
        noise = torch.empty(h.shape)
        return self.last(h * noise.detach().bernoulli_(0.8) * torch.empty_like(noise).normal_())


def test_memory_that_nobody_wrote_is_no_input():
    """What is drawn into new memory does not depend on what was there, and is told of as any other operation is."""

    def told():
        with Instant(recipe(make_model=Noisy, replicas=2)) as instant:
            return [item[:3] for item in computed(instant, 1, operations=True)]

    scrap = [torch.full((64, size), 3.0) for size in (3, 5, 64)]  # memory that is used again holds something
    one = told()
    del scrap
    torch.full((20, 64), 7.0)
    assert one == told()
    assert sum("bernoulli_" in item[1] for item in one) == 2  # both are told of
