"""A DataLoader of torch, taken apart into fields of a recipe. What makes it faster only is left out."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch.utils import data as loading

from phalanx.errors import UsageError

OWN_BATCHES = "batches of your own are batch_sampler=f, with f(epoch, generator) -> list of lists of sample numbers"


def fields_of(loader: Any, name: str, given: Container[str] = ()) -> dict[str, Any]:
    """``data``, ``collate_fn``, ``batch_size``, ``drop_last``, and ``shuffle`` or ``weights``.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader, or a list of one
    name : str
        What it is called in messages.
    given : container of str
        Fields that the caller gives in place of the loader's.

    Raises
    ------
    UsageError
        It has what a recipe does not, or is no DataLoader.
    """
    (loader,) = loader if isinstance(loader, (list, tuple)) and len(loader) == 1 else (loader,)
    kind = type(loader).__name__
    if not isinstance(loader, loading.DataLoader) or type(loader).__iter__ is not loading.DataLoader.__iter__:
        raise UsageError(f"{name} is a {kind}; it must be one DataLoader of torch, or pass data=, batch_size=")
    for attribute in ("worker_init_fn", "generator"):
        if getattr(loader, attribute) is not None:
            raise UsageError(f"{name} has a {attribute}; leave it out: order and random numbers follow from seed=")
    if isinstance(loader.dataset, loading.IterableDataset):
        raise UsageError(
            f"{name} has an IterableDataset, which is read in its own order; pass "
            "data=phalanx.Stream(lambda: dataset, epoch_size=...), batch_size=... instead"
        )
    own = None if loader.collate_fn is loading.default_collate else loader.collate_fn
    columns = getattr(loader.dataset, "tensors", None) if type(loader.dataset) is loading.TensorDataset else None
    found = {"data": columns if columns and own is None else loader.dataset, "collate_fn": own}
    if "batch_sampler" in given:
        return found
    if loader.batch_size is None:
        raise UsageError(f"{name} has batch_size None (its batch_sampler is a {_kind(loader)}); {OWN_BATCHES}")
    found |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return found if "shuffle" in given or "weights" in given else found | _order(loader, name)


def _kind(loader: Any) -> str:
    return type(loader.batch_sampler).__name__


def _order(loader: Any, name: str) -> dict[str, Any]:
    sampler, samples = loader.sampler, len(loader.dataset)
    kind, whole = type(sampler), len(getattr(sampler, "data_source", loader.dataset)) == samples
    if kind is loading.SequentialSampler and whole:
        return {"shuffle": False}
    if type(loader.batch_sampler) is loading.BatchSampler and whole and getattr(sampler, "num_samples", 0) == samples:
        if kind is loading.RandomSampler and not sampler.replacement and sampler.generator is None:
            return {"shuffle": True}
        if kind is loading.WeightedRandomSampler and sampler.replacement and sampler.generator is None:
            return {"weights": sampler.weights}
    raise UsageError(
        f"{name} has a {kind.__name__} that a recipe does not; give shuffle=, weights= (one number per sample), a part "
        f"of the data (torch.utils.data.Subset), or batch_sampler=: {OWN_BATCHES}"
    )
