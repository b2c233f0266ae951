"""Workers of several hosts add up what they have: sums over loopback, one thread per host, against the fold's bits."""

import functools
import threading

import numpy as np
import pytest
import torch
from torch import distributed as dist

import phalanx
from phalanx.engines.flat import Flat
from phalanx.engines.hosts import pieces
from phalanx.engines.hosts.across import UNKNOWN, Across
from phalanx.engines.hosts.gloo import Rendezvous
from phalanx.engines.hosts.pieces import AddedAcross, Pieces, in_pieces, tensor_of
from phalanx.frameworks.torch.arithmetic import spec_of
from phalanx.plan.fold import fold_values, hosts, remaining
from phalanx.plan.levels import grouped, levels
from phalanx.seams.records import Part
from tests.orders import triples

SHAPES = [(3, 4), (7,), (), (40,), (2, 3), (0,)]
DTYPES = {3: torch.bfloat16, 5: torch.float64}
PART = Part(1.5, 1.0, returned=False, samples=1.0)
RUNS = iter(range(1, 1000))


def together(count, replicas, work, blanks):
    """What ``work(rank, across, added)`` returns on each of so many hosts, which are threads here."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    blocks, run, found = hosts(replicas, count, 1)[0], next(RUNS), [None] * count

    def host(rank):
        try:
            rendezvous = Rendezvous(("127.0.0.1", store.port), run, rank, blocks, 20.0, "lo")
            gloo = rendezvous.meet("all", rank, count)
            across = Across(rendezvous, gloo, replicas, len(blanks))
            among = levels(replicas, blocks, rank, grouped(count), at_once=True)
            specs = [spec_of(tensor_of(blank)) for blank in blanks]
            flat = Flat(specs, replicas, among, in_pieces, owned=range(len(blanks)))
            carriers = [Pieces(gloo, level) for level in among if level.ranks]
            own = [[at] for at in range(len(remaining(replicas, blocks[rank])))]
            found[rank] = work(rank, across, AddedAcross(flat, carriers, own, blanks))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=host, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


def gradients(replicas, seed, as_array):
    """Random gradients of every replica; about a third of them is missing."""
    rng = np.random.default_rng(seed)

    def one(number, shape):
        values = rng.standard_normal(shape).astype(np.float32)
        made = torch.from_numpy(np.asarray(values)).to(DTYPES.get(number, torch.float32))
        return None if rng.random() < 0.35 else as_array(made)

    return [[one(number, shape) for number, shape in enumerate(SHAPES)] for _ in range(replicas)]


def same(tensor):
    return tensor


def as_numpy(tensor):
    """As jax has it."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    return tensor.view(torch.uint16).numpy().view(bfloat16)


def column(vectors, index):
    return fold_values([vector[index] for vector in vectors], lambda left, right: left + right)


def bits(array):
    if array is None:
        return None
    return as_numpy(array).tobytes() if isinstance(array, torch.Tensor) else np.asarray(array).tobytes()


@pytest.mark.cases(4)
@pytest.mark.parametrize("as_array", [same, as_numpy])
@pytest.mark.parametrize(("replicas", "count"), [(8, 2), (7, 2), (7, 3), (5, 4), (3, 1), (40, 18)])
def test_sums_have_the_bits_of_the_fold(monkeypatch, replicas, count, as_array):
    """Any hosts, many too, some gradients missing, several dtypes, in many pieces: each sum is as if in one place."""
    monkeypatch.setattr(pieces, "MOST", 24)
    blanks = [as_array(torch.empty(shape, dtype=DTYPES.get(at))) for at, shape in enumerate(SHAPES)]
    vectors = gradients(replicas, replicas * count, as_array)
    wanted = [bits(column(vectors, index)) for index in range(len(SHAPES))]

    def work(rank, across, added):
        sums, masks = [], []
        block = hosts(replicas, count, 1)[0][rank]
        for level, index in remaining(replicas, block):
            mine = vectors[index << level : (index + 1) << level]
            sums.append([column(mine, place) for place in range(len(SHAPES))])
            masks.append(bytes(entry is not None for entry in sums[-1]))
        parts, masks, notes = across.tell((0, 5, UNKNOWN), [PART] * len(block), masks, [bytes([one]) for one in block])
        assert parts == [PART] * replicas
        assert notes == [bytes([replica]) for replica in range(replicas)]
        total = added(masks, sums, lambda there: ())
        return [bits(entry) for entry in total]

    assert together(count, replicas, work, blanks) == [wanted] * count


def test_named_losses_travel():
    """They come with the parts of all hosts, to the last bit; a replica without samples has none."""
    parts = [PART._replace(named={"kl": [0.1 + replica, None], "hits": [2.0, 3.0]}) for replica in range(3)] + [PART]

    def work(rank, across, added):
        block = hosts(4, 2, 1)[0][rank]
        masks = [b"\1"] * len(remaining(4, block))
        return across.tell((0, 5, UNKNOWN), parts[block.start :][:2], masks, [b""] * 2)[0]

    assert together(2, 4, work, [torch.empty(2)]) == [parts] * 2


def test_another_order_is_other_bits():
    """Equal bits mean something: the same gradients added one after another are another sum."""
    values = list(torch.tensor(triples(8)))
    assert bits(column([[value] for value in values], 0)) != bits(functools.reduce(torch.add, values))


def test_what_replicas_left():
    """Buffers of each host's replicas arrive on all others; hosts whose replicas left nothing take part too."""
    lengths = [[3], [], [1, 2], [0], []]

    def work(rank, across, added):
        mine = hosts(5, 3, 1)[0][rank]
        rows = [[bytearray(size) for size in sizes] for sizes in lengths]
        for replica in mine:
            for piece in rows[replica]:
                piece[:] = bytes([replica + 1]) * len(piece)
        across.spread([[memoryview(piece) for piece in row] for row in rows])
        return [[bytes(piece) for piece in row] for row in rows]

    wanted = [[bytes([replica + 1]) * size for size in sizes] for replica, sizes in enumerate(lengths)]
    assert together(3, 5, work, [torch.empty(1)]) == [wanted] * 3


@pytest.mark.long
@pytest.mark.parametrize(("name", "changes"), [("step", (9, 5, 7)), ("weights", (0, 6, 7)), ("norm", (0, 5, 8))])
def test_who_differs_is_named(name, changes):
    """A host in another step, with other weights or another norm is refused by the other, and named."""

    def work(rank, across, added):
        kind = phalanx.RunError if name == "step" else phalanx.CorruptionError
        with pytest.raises(kind, match=f"process {1 - rank} differs from process {rank} in its {name}"):
            across.tell(changes if rank else (0, 5, 7), [PART] * 2, [b"\1"], [b""] * 2)

    together(2, 4, work, [torch.empty(1)])


def test_a_message_of_another_run_is_refused():
    """A run has a number of its own, which every message carries."""

    def work(rank, across, added):
        across._run += rank
        with pytest.raises(phalanx.RunError, match=f"process {1 - rank} differs from process {rank} in its run"):
            across.tell((0, 5, UNKNOWN), [PART] * 2, [b"\1"], [b""] * 2)

    together(2, 4, work, [torch.empty(1)])


def test_a_norm_that_is_not_known_is_not_compared():
    """A worker that begins in the middle of a run, or does a step again, has none of the step before."""

    def work(rank, across, added):
        across.tell((1, 0, rank and 7), [PART] * 2, [b"\1"], [b""] * 2)

    together(2, 4, work, [torch.empty(1)])
