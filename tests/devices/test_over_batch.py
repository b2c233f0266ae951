"""Losses over the whole batch on accelerators: one answer for any number of them, deaths and resumes included."""

import pytest

import phalanx
from tests import accelerator
from tests.exactness.test_over_batch import Struck
from tests.exactness.test_rows import Different, Keeping, bad
from tests.over_batch import KINDS, Moco, mlp, recipe
from tests.sampling import sample

pytestmark = pytest.mark.accelerator
CASES = {
    **{kind: (kind, 4, {}) for kind in KINDS},
    "parts": ("noisy", 3, {"micro_batches": 2}),
    "empty": ("clip", 8, {"batch_size": 6, "steps": 3}),
    "clipped": ("clip", 5, {"max_norm": 0.1}),
}


@pytest.fixture(autouse=True)
def fake():
    """The device module, as after loading."""
    return accelerator.accelerator()


def trained(recipe, count, **options):
    """Digest, losses and named losses of a run on so many devices."""
    result = recipe.train(devices=[f"fake:{number}" for number in range(count)], progress=False, **options)
    return result.digest, result.loss_history


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:batch_size is")
@pytest.mark.parametrize("name", sample("over the batch on accelerators", CASES, 4))
def test_any_number_of_devices(name):
    """One, two and three devices end in the same bits and losses."""
    kind, replicas, changes = CASES[name]
    wanted = trained(recipe(kind, replicas, **changes), 1)
    assert [trained(recipe(kind, replicas, **changes), count) for count in (2, 3)] == [wanted] * 2


@pytest.mark.long
def test_a_death_and_a_resume(tmp_path):
    """A worker that is killed in the loss, and a run that goes on elsewhere, leave no trace."""
    wanted = trained(recipe("moco", 5, batch_size=16), 1)
    struck = {name: Struck(KINDS["moco"][name], tmp_path / "at", "loss") for name in ("forward_fn", "loss_fn")}
    (tmp_path / "at").mkdir()
    assert trained(recipe("moco", 5, batch_size=16, **struck), 2) == wanted
    trained(recipe("moco", 5, batch_size=16, steps=2), 3, run_dir=tmp_path / "run")
    assert trained(recipe("moco", 5, batch_size=16), 2, run_dir=tmp_path / "run") == wanted


@pytest.mark.parametrize("count", [1, 2])
def test_state_in_python(count):
    """A loss that keeps state in Python is refused there, too."""
    with pytest.raises(phalanx.StateError, match="the loss over the whole batch of step 0 came to something else"):
        trained(bad(make_model=mlp, loss_fn=Keeping()), count)


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("what", ["loss", "write"])
def test_differing_workers(what):
    """A loss that has another value in each worker, or writes another one, is refused."""
    with pytest.raises(phalanx.UsageError, match="workers came to different losses of one batch, or wrote"):
        trained(bad(make_model=Moco, loss_fn=Different(what), loss_takes="model"), 2)
