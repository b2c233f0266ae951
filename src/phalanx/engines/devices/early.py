"""Gradients travel while the backward pass of a worker's last replica still computes others.

Which gradients there will be is taken from the steps before, and compared afterwards. If it was another, all of it is
sent again, after the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from phalanx.engines.devices.transport import Transport
from phalanx.engines.flat import Flat, Journey, Mask
from phalanx.plan.fold import Fold, Partial
from phalanx.seams.records import Vector

Sums = list[tuple[list[Vector], bool]]  # for each node what is added on the left, and whether the last replica is in it


class Early:
    """The exchange of one step, begun during the backward pass. All workers send all buckets, in one order.

    Parameters
    ----------
    flat : Flat
    transport : Transport
    masks : sequence of bytes
        Which gradients each node of all workers is expected to have.
    awaited : collection of int
        Parameters of which this worker's last replica is expected to have a gradient.
    weight : float
        That replica's, by which its gradients are multiplied.

    Attributes
    ----------
    masks : sequence of bytes
    came : set of int
        Parameters whose gradient came.
    right : bool
        Whether it came as expected so far.
    """

    def __init__(
        self,
        flat: Flat,
        transport: Transport,
        masks: Sequence[Mask],
        awaited: Collection[int],
        weight: float,
    ) -> None:
        self.masks, self.came, self.right = masks, set[int](), True
        self._flat, self._transport, self._awaited, self._weight = flat, transport, awaited, weight
        self._layout = flat.layout(masks)
        self._buckets = self._layout.buckets
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.filled}
        self._missing = [len(set(bucket.filled) & set(awaited)) for bucket in self._buckets]
        self._journeys: list[Journey] = []
        self._wholes: list[torch.Tensor] = []
        self._sums: Sums = []
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}  # what was sent of each parameter, and its version then
        self._error: Exception | None = None

    def expect(self, sums: Sums) -> None:
        """The last replica is computed next; ``sums`` are what its gradients are added to."""
        self._sums = sums

    def arrived(self, index: int, gradient: torch.Tensor) -> None:
        """Take a gradient of the last replica. What is raised here must not leave the backward pass as user code's."""
        if index in self.came or index not in self._awaited:
            self.right = False
            return
        self.came.add(index)
        self._sent[index] = gradient, gradient._version
        try:
            self._put(index, gradient if self._weight == 1 else gradient * self._weight)
            self._missing[self._bucket_of[index]] -= 1
            # A bucket waits for those before it, though it may be full. All workers begin the same collectives in one
            # order, else one of them waits for a message that never comes. So `flush` sends the rest even if it is
            # wrong. What was sent is not taken back. `right` turns False, and the masks that workers publish anyway
            # tell all of them. Then everybody drops what came, and all is sent again from the sums that were kept
            # back. A gradient in parts comes here again with the sum, when its first part may be on its way.
            # Rejected: to ask before the backward pass which gradients there will be. That is a wait in each step.
            # User code may change a gradient after it came here, say when the pass ends: `compare` sees that by the
            # tensor and its version. Not covered: what writes memory without a version, such as numpy's view of it.
            while len(self._journeys) < len(self._buckets) and not self._missing[len(self._journeys)]:
                self._send()
        except Exception as error:
            self.right, self._error = False, self._error or error

    def compare(self, gradient: Vector) -> None:
        """See that what was sent is the gradient: a later hook, or a callback at the end of the pass, may write it."""
        scaled = self._weight != 1  # in place, since
        for index, (sent, version) in self._sent.items():
            entry = gradient[index]
            same = entry is not None and entry.data_ptr() == sent.data_ptr() and sent._version == version + scaled
            self.right = self.right and same

    def flush(self, *, right: bool) -> None:
        """Send the rest, even if it is not as expected: others wait for it."""
        self.right = self.right and right and len(self.came) == len(self._awaited)
        if self._error is not None:
            raise self._error
        while len(self._journeys) < len(self._buckets):
            self._send()

    def finish(self) -> None:
        """Wait for everything."""
        if self._transport.beside is None:
            for _ in range(self._flat.steps - 1):
                for journey in self._journeys:
                    next(journey)
        elif self._journeys:
            self._go_on(self._journeys[-1])
        self._wholes = list(map(next, self._journeys))

    def total(self, over: Callable[[Any], Any]) -> Vector:
        """The mean gradient, after ``finish``. It is divided here: only now is the sum of weights known."""
        for whole in self._wholes:
            over(whole)
        return self._flat.unpacked(self._layout)

    @property
    def there(self) -> list[bytes | None]:
        """Which gradients this worker's sums have, if all came as expected; None for a sum of nothing."""
        count = len(self.masks[0])
        return [
            bytes(any(v[at] is not None for v in lefts) or (last and at in self.came) for at in range(count))
            if lefts or (last and self.came)
            else None
            for lefts, last in self._sums
        ]

    def _send(self) -> None:
        number = len(self._journeys)
        for index in self._buckets[number].filled:
            if index not in self.came:
                self._put(index, None)
        apart = self._transport.beside is None
        journey = self._flat.travel(self._transport.levels, number, self._layout, _whole, apart=apart)
        self._journeys.append(journey)
        next(journey)
        if self._transport.beside is not None and number:
            self._go_on(self._journeys[number - 1])  # behind this one's all-to-all, which need not wait for its fold

    def _go_on(self, journey: Journey) -> None:
        """The rest of a journey, beside what computes."""
        beside = self._transport.beside
        assert beside is not None, "there is a stream"
        with torch.get_device_module(beside.device).stream(beside):
            self._flat.go_on(journey)

    def _put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Write this worker's sums of a parameter into its bucket."""
        homes = self._flat.homes(self._layout, self._bucket_of[index])(index)
        for home, (lefts, last) in zip(homes, self._sums, strict=True):
            terms = [vector[index] for vector in lefts if vector[index] is not None]
            terms += [gradient] if last and gradient is not None else []
            if len(terms) == 1:
                home.copy_(terms[0])
            elif terms:
                *others, left, right = terms
                torch.add(left, right, out=home)
                for term in reversed(others):
                    torch.add(term, home, out=home)


def _whole(total: torch.Tensor) -> torch.Tensor:
    return total


def sums_with(replicas: int, partials: Sequence[Partial[Vector]], last: int, after: Sequence[int]) -> Sums:
    """What replica ``last`` is added to, in order, for each node that a worker hands over.

    ``partials``: the sums of its replicas before; ``after``: its later replicas, which have no samples.
    """
    fold: Fold[list[Any]] = Fold(replicas, operator.add)
    fold.merge(Partial(each.level, each.index, None if each.value is None else [each.value]) for each in partials)
    fold.push(last, [None])
    for replica in after:
        fold.push(replica, None)
    values = [each.value or [] for each in fold.partials()]
    return [([vector for vector in value if vector is not None], None in value) for value in values]
