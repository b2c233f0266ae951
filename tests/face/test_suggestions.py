"""Arguments by the names that other libraries have for them, and where they belong."""

import pytest
import torch
from torch.nn import functional as F

import phalanx

X = torch.zeros(8, 4)
CASES = [
    ({"learning_rate": 0.1}, {}, "learning_rate is not an argument here; it is called lr"),
    (
        {"workers": 2},
        {},
        r"workers is not an argument of Recipe, but an option: recipe",
    ),
    ({}, {"epochs": 2}, r"epochs is not an option of train\(\).*Recipe\(\.\.\., epochs="),
    ({"accumulate_grad_batches": 4}, {}, "replicas are that"),
    ({"sead": 4}, {}, "did you mean 'seed'"),
    ({}, {"logger": True}, "logs are callbacks"),
]


@pytest.mark.parametrize(("fields", "options", "words"), CASES, ids=[str({**a, **b}) for a, b, _ in CASES])
def test_a_name_from_elsewhere_is_answered(fields, options, words):
    """The message has the name that phalanx has for it, or says where it goes."""
    with pytest.raises(phalanx.UsageError, match=words):
        phalanx.Recipe(lambda: torch.nn.Linear(4, 4), (X, X), torch.nn.functional.mse_loss, steps=1, **fields).train(
            **options
        )


def test_a_sample_that_cannot_be_read_is_named():
    """Of a share of many, the message has the one sample."""

    class Broken:
        def __len__(self):
            return 256

        def __getitem__(self, index):
            if index == 77:
                raise OSError("no such file")
            return torch.zeros(4), torch.zeros(4)

    recipe = phalanx.Recipe(torch.nn.Linear(4, 4), Broken(), F.mse_loss, steps=1, batch_size=256, replicas=1)
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": 1}):
        with pytest.raises(phalanx.WorkerError, match=r"no such file \(while phalanx was reading sample 77\)"):
            recipe.train(**options)
