"""Steps with phases, carried state and micro-batches over streams, and with readers: the bits that columns have."""

import dataclasses
import os
import signal

import pytest
import torch

import phalanx
from tests.exactness import test_carried as carried
from tests.exactness import test_phases as phases
from tests.state.runs import assert_same

KINDS = {
    "phases": lambda **changes: phases.recipe("gan", shuffle=False, **changes),
    "carried state": lambda **changes: carried.recipe(reset_carry="epoch", **changes),
    "carried state that is never reset": lambda **changes: carried.recipe(**changes),
    "micro-batches": lambda **changes: phases.recipe("actor_critic", shuffle=False, micro_batches=2, **changes),
}
PLACES = [
    {"engine": "inline"},
    {"engine": "processes", "workers": 2},
    {"engine": "inline", "readers": 1},
    {"engine": "processes", "workers": 2, "readers": 1},
]


class Rows(torch.utils.data.Dataset):
    """The rows of columns."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, number):
        return tuple(column[number] for column in self.columns)


def over(recipe, data):
    """The same recipe over other data."""
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe) if field.init}
    return phalanx.Recipe(**fields | {"data": data})


def streamed(recipe):
    rows = Rows(recipe.data)
    return over(recipe, phalanx.Stream(lambda: (rows[number] for number in range(len(rows)))))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_and_readers(kind, replicas):
    """Over a stream, and over a dataset that readers read, a run ends in the bits of the same rows as columns."""
    expected = KINDS[kind](replicas=replicas).train(engine="inline").digest
    for place in PLACES:
        if place.get("workers", 1) <= replicas:
            assert streamed(KINDS[kind](replicas=replicas)).train(**place).digest == expected
            dataset = over(KINDS[kind](replicas=replicas), Rows(KINDS[kind]().data))
            assert dataset.train(**place).digest == expected


def test_a_carry_that_is_not_reset_is_another_answer():
    """The reset at the beginning of an epoch changes the bits, so that a stream that forgot it would be noticed."""
    kinds = [KINDS[kind]() for kind in ("carried state", "carried state that is never reset")]
    assert streamed(kinds[0]).train(engine="inline").digest != streamed(kinds[1]).train(engine="inline").digest


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_and_kills(kind, tmp_path):
    """Interrupted after any step, also the last of an epoch, and with a worker killed, a run ends in the same bits."""
    made = streamed(KINDS[kind](replicas=2))
    expected = made.train(engine="inline")
    for step in range(1, expected.steps):
        folder = tmp_path / str(step)
        with made.start(engine="processes", workers=2, run_dir=folder, readers=step % 2) as run:
            for report in run:
                if report.step == step // 2:
                    os.kill(run.worker_pids[step % 2], signal.SIGKILL)
                if report.step + 1 == step:
                    break
        assert_same(made.train(engine="inline", run_dir=folder, readers=(step + 1) % 2), expected)
