"""Collective operations over lists of tensors, one per device, in one process.

``schedule`` gives an algorithm as data, ``all_reduce`` and the others carry out that very data, and ``spell_rounds``
puts it into words. Nothing is asynchronous: on return everything is done, as far as torch's streams are concerned.
"""

from __future__ import annotations

from phalanx.collectives.operations import all_gather, all_reduce, broadcast, gather, reduce_scatter, scatter
from phalanx.collectives.schedules import Transfer, schedule, spell_rounds

__all__ = [
    "Transfer",
    "all_gather",
    "all_reduce",
    "broadcast",
    "gather",
    "reduce_scatter",
    "scatter",
    "schedule",
    "spell_rounds",
]
