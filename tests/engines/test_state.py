"""The state in an arena, with a framework of a few lines of numpy: where it lies, what is copied, checked and taken."""

import itertools
import mmap
import types

import numpy as np
import pytest

from phalanx.plan.fold import place
from phalanx.shared.layout import SHARED, Contents, Spec, StatePiece, lay_out, row_major
from phalanx.shared.memory import Carver, Memory
from phalanx.shared.state import Mirror, Shard

WEIGHTS = [3, 8, 0, 5]  # elements of each parameter
SIZE = 1 << 16


def spec(count, dtype="float64"):
    """Of a vector."""
    return Spec((count,), (1,), dtype, np.dtype(dtype).itemsize)


CONTENTS = Contents(
    [spec(count) for count in WEIGHTS],
    [spec(7, "float32")],
    [8 * count for count in WEIGHTS],
    list(range(len(WEIGHTS))),
    [
        *(StatePiece(index, "sum", spec(count)) for index, count in enumerate(WEIGHTS)),
        StatePiece(SHARED, "count", spec(1, "int64")),
    ],
)


def view(memory, offset, wanted):
    """Implements ``seams.Arrays.view``."""
    flat = np.frombuffer(memory, np.dtype(wanted.dtype), wanted.elements, offset)
    return flat.reshape(wanted.shape)


class Framework:
    """A state, in the caller's process or a worker's, that notes what it is given."""

    arrays = types.SimpleNamespace(view=view, add_into=None)
    direct = False

    def __init__(self, pieces=()):
        self.starts = [np.arange(7, dtype=np.float32)]
        self.values = [np.arange(count, dtype=np.float64) + count for count in WEIGHTS]
        self.pieces = dict(pieces)

    def open(self, layout, arena, worker):
        return self

    def weights(self, numbers=None):
        chosen = range(len(self.values)) if numbers is None else numbers
        return [self.values[number].view(np.uint8) for number in chosen]

    def take_arrays(self, weights, buffers):
        self.values = [content.copy().view(np.float64) for content in weights]
        self.starts = [buffer.copy() for buffer in buffers]

    def made(self, absent):
        return {piece: value for piece, value in self.pieces.items() if piece in absent}

    def adopt(self, pieces, *, more=False):
        self.pieces = {**(self.pieces if more else {}), **pieces}

    def rest(self):
        return None, "options"

    def take(self, foreign, options):
        assert (foreign, options) == (None, "options")


def pieces():
    """All but the second parameter's, as they may be after some steps."""
    return {0: np.ones(3), 2: np.ones(0), 3: np.full(5, 2.0), 4: np.array([9])}


@pytest.fixture
def run():
    """A layout for two workers, its arena with a state put there, and the shard of each worker with its state."""
    placement, carver = place(4, 2), Carver()
    layout = lay_out(CONTENTS, CONTENTS.owners(2), placement, carver.take)
    arena = mmap.mmap(-1, SIZE)
    base = Memory(layout.base)
    Mirror(Framework(pieces()), layout, arena, base).put()
    locals_ = [Framework(), Framework()]
    shards = [Shard(local, layout, arena, base, worker) for worker, local in enumerate(locals_)]
    for shard in shards:
        shard.take(None, "options")
    yield types.SimpleNamespace(layout=layout, arena=arena, base=base, shards=shards, locals=locals_, size=carver.size)
    base.close()


def taken(run, *, saved):
    """What the caller's process gets."""
    home = Framework()
    Mirror(home, run.layout, run.arena, run.base).get([shard.state() for shard in run.shards], saved=saved)
    return home


def same(left, right):
    """Whether two states are equal."""
    arrays = [
        [*home.values, *home.starts, *(home.pieces[key] for key in sorted(home.pieces))] for home in (left, right)
    ]
    return sorted(left.pieces) == sorted(right.pieces) and all(map(np.array_equal, *arrays))


def test_places_do_not_overlap():
    """Whatever is written at once lies apart; what all keep for themselves has a place for each worker."""
    taken_places = []

    def take(size, carver=Carver()):  # noqa: B008
        taken_places.append((carver.take(size), size))
        return taken_places[-1][0]

    layout = lay_out(CONTENTS, CONTENTS.owners(2), place(4, 2), take)
    ends = sorted((offset, offset + size) for offset, size in taken_places if size)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    rows = layout.state
    assert rows[0][:-1] == rows[1][:-1]
    assert rows[0][-1] != rows[1][-1]


def test_owners_and_keepers_share_out_everything():
    """Each parameter has an owner, who keeps its optimizer state; what belongs to none is kept by all."""
    layout = lay_out(CONTENTS, CONTENTS.owners(2), place(4, 2), lambda size: 0)
    owned, kept = ([method(worker) for worker in (0, 1)] for method in (layout.owned, layout.kept))
    assert sorted(owned[0] + owned[1]) == [0, 1, 2, 3]
    assert all(kept[worker] == [*owned[worker], 4] for worker in (0, 1))
    assert owned[0]
    assert owned[1]


def test_the_caller_gets_what_it_put(run):
    """Weights, buffers and optimizer state come back; what did not exist does not."""
    home = taken(run, saved=False)
    assert same(home, Framework(pieces()))
    assert 1 not in home.pieces


def test_state_that_an_update_makes_is_moved(run):
    """It lies in the arena from then on: what is written there afterwards is seen by the caller's process."""
    (worker,) = [worker for worker in (0, 1) if 1 in run.layout.kept(worker)]
    run.locals[worker].pieces[1] = np.full(8, 4.0)
    run.shards[worker].settle()
    run.locals[worker].pieces[1][3] = 5
    found = taken(run, saved=False).pieces[1]
    assert found.tolist() == [4, 4, 4, 5, 4, 4, 4, 4]
    run.shards[worker].settle()  # nothing is made a second time
    assert found[3] == 5


def test_a_snapshot_brings_everything_back(run):
    """Also that a piece did not exist yet; and it is what the caller gets who asks for the saved state."""
    checksums = [shard.save() for shard in run.shards]
    for shard, local in zip(run.shards, run.locals, strict=True):
        for weights in shard.weights:
            weights[:] = 0
        for piece in local.pieces.values():
            piece[...] = 7
    run.arena[run.layout.starts[0]] ^= 1
    (worker,) = [worker for worker in (0, 1) if 1 in run.layout.kept(worker)]
    run.locals[worker].pieces[1] = np.full(8, 4.0)
    run.shards[worker].settle()
    assert not same(taken(run, saved=False), Framework(pieces()))
    assert taken(run, saved=True).pieces.keys() == pieces().keys()
    assert [shard.restore() for shard in run.shards] == checksums
    assert same(taken(run, saved=False), Framework(pieces()))
    assert 1 not in run.locals[worker].pieces
    run.locals[worker].pieces[1] = np.full(8, 3.0)  # it can be made again
    run.shards[worker].settle()
    assert taken(run, saved=False).pieces[1].tolist() == [3.0] * 8


def damaged(run):
    """Offsets of one byte of each kind in the snapshot."""
    copies = run.layout.snapshot
    return {
        "weights": copies.weights[1] + 5,
        "buffers": copies.starts[0] + 27,
        "state": copies.state[0][3] + 1,
        "present": copies.present,
        "absent": copies.present + 1,
    }


@pytest.mark.parametrize("what", ["weights", "buffers", "state", "present", "absent"])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_damaged_snapshot_has_another_checksum(run, what, bit):
    """One bit anywhere in it is seen by exactly one worker."""
    before = [shard.save() for shard in run.shards]
    run.arena[damaged(run)[what]] ^= 1 << bit
    after = [shard.restore() for shard in run.shards]
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1


def test_strides_of_rows():
    """As torch says them: in elements; a length of 0 counts as 1."""
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major((2, 0, 4)) == (4, 4, 1)
    assert row_major(()) == ()
