"""What ranks do in the tests of collectives: each compares with what can be computed alone."""

import functools
import itertools
import operator

import torch
import torch.distributed as dist

from phalanx.plan.fold import fold_values
from tests.orders import triples

SIZES = (0, 1, 3, 1000, 70_001)  # elements; in the tests of big tensors also more than a slot holds
BIG = 300_003
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
OPS = {
    dist.ReduceOp.SUM: operator.add,
    dist.ReduceOp.PRODUCT: operator.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: operator.and_,
    dist.ReduceOp.BOR: operator.or_,
    dist.ReduceOp.BXOR: operator.xor,
}
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
SUM = dist.ReduceOp.SUM
ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def made(rank, count, dtype, salt=0):
    """A rank's tensor, which every rank can make."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype in INTEGERS:
        return torch.randint(0, 100, (count,), generator=generator).to(dtype)
    return torch.randn(count, generator=generator, dtype=torch.complex128 if dtype in COMPLEX else None).to(dtype)


def reduced(tensors, op, dtype):
    """The oracle: the fold, in float32 where the dtype is narrow."""
    narrow = dtype in (torch.float16, torch.bfloat16)
    values = [tensor.float() if narrow else tensor for tensor in tensors]
    if op == dist.ReduceOp.AVG:
        total = fold_values(values, operator.add)
        if dtype in COMPLEX:  # torch hands them over as pairs of numbers
            return torch.view_as_complex(torch.view_as_real(total) / len(values))
        return (total / len(values)).to(dtype)
    return fold_values(values, OPS[op]).to(dtype)


def pairs():
    """All dtypes with the operations that they have."""
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool):
        plain = dtype in INTEGERS or dtype == torch.bool
        for op in (*OPS, dist.ReduceOp.AVG):
            fits = plain if op in BITWISE else not plain if op == dist.ReduceOp.AVG else True
            if fits and (dtype not in COMPLEX or op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
                yield dtype, op


def same(one, other):
    """Equal bits."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    )


def all_reduces(rank, size):
    for dtype, op in pairs():
        for count in SIZES:
            tensors = [made(other, count, dtype) for other in range(size)]
            mine = tensors[rank].clone()
            dist.all_reduce(mine, op=op)
            assert same(mine, reduced(tensors, op, dtype)), (dtype, op, count)


def big_all_reduces(rank, size):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensors = [made(other, BIG, dtype) for other in range(size)]
        mine = tensors[rank].clone()
        dist.all_reduce(mine)
        assert same(mine, reduced(tensors, dist.ReduceOp.SUM, dtype)), dtype


def sparse(rank, size, dtype, dense):
    """A rank's sparse tensor, with some rows twice: rank 0 has none, others more and more, some in common."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randint(0, 50, (1, 30 * rank), generator=generator)
    values = made(rank, 30 * rank * 3**dense, dtype).view(-1, *[3] * dense)
    return torch.sparse_coo_tensor(rows, values, (50, *[3] * dense))


def sparse_all_reduces(rank, size):
    """The sum of sparse tensors is that of the dense ones in the order of ranks, where there is anything."""
    for dtype, dense in itertools.product((torch.float32, torch.bfloat16, torch.int64), (0, 2)):
        tensors = [sparse(other, size, dtype, dense).coalesce() for other in range(size)]
        mine = sparse(rank, size, dtype, dense)
        dist.all_reduce(mine)
        assert mine.is_coalesced()
        assert torch.equal(mine.indices()[0], torch.cat([value.indices()[0] for value in tensors]).unique())
        wanted = reduced([value.to_dense() for value in tensors], SUM, dtype)
        assert torch.equal(mine.to_dense(), wanted), (dtype, dense)
    big = torch.sparse_coo_tensor(torch.arange(BIG)[None], made(rank, BIG, torch.float32), (BIG,))
    work = dist.all_reduce(big, async_op=True)
    work.wait()
    assert same(big.to_dense(), reduced([made(each, BIG, torch.float32) for each in range(size)], SUM, torch.float32))


def reduces(rank, size):
    for root in range(size):
        for count in (*SIZES, BIG):
            tensors = [made(other, count, torch.float32) for other in range(size)]
            mine = tensors[rank].clone()
            dist.reduce(mine, root)
            wanted = reduced(tensors, dist.ReduceOp.SUM, torch.float32) if rank == root else tensors[rank]
            assert same(mine, wanted), (root, count)


def moves(rank, size, name):
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64):
        for count in (*SIZES, BIG):
            MOVES[name](rank, size, functools.partial(made, dtype=dtype), count, dtype)


def broadcasts(rank, size, give, count, dtype):
    for root in range(size):
        mine = give(rank, count)
        dist.broadcast(mine, root)
        assert same(mine, give(root, count))


def all_gathers(rank, size, give, count, dtype):
    found = [torch.empty(count, dtype=dtype) for _ in range(size)]
    dist.all_gather(found, give(rank, count))
    assert all(same(value, give(other, count)) for other, value in enumerate(found))
    whole = torch.empty(size * count, dtype=dtype)
    dist.all_gather_into_tensor(whole, give(rank, count))
    assert same(whole, torch.cat([give(other, count) for other in range(size)]))


def gathers(rank, size, give, count, dtype):
    for root in range(size):
        found = [torch.empty(count, dtype=dtype) for _ in range(size)] if rank == root else None
        dist.gather(give(rank, count), found, dst=root)
        assert rank != root or all(same(value, give(other, count)) for other, value in enumerate(found))


def scatters(rank, size, give, count, dtype):
    for root in range(size):
        parts = [give(10 * root + other, count) for other in range(size)] if rank == root else None
        mine = torch.empty(count, dtype=dtype)
        dist.scatter(mine, parts, src=root)
        assert same(mine, give(10 * root + rank, count))


def all_to_alls(rank, size, give, count, dtype):
    sizes = [
        [(count + source + 2 * target) // (1 + (source + target) % 2) for target in range(size)]
        for source in range(size)
    ]
    ours = [give(100 * rank + target, sizes[rank][target]) for target in range(size)]
    theirs = [torch.empty(sizes[source][rank], dtype=dtype) for source in range(size)]
    dist.all_to_all(theirs, ours)
    assert all(same(value, give(100 * source + rank, sizes[source][rank])) for source, value in enumerate(theirs))
    whole = torch.empty(sum(map(len, theirs)), dtype=dtype)
    dist.all_to_all_single(whole, torch.cat(ours), [len(value) for value in theirs], [len(value) for value in ours])
    assert same(whole, torch.cat(theirs))
    equal = torch.empty(size * count, dtype=dtype)
    dist.all_to_all_single(equal, torch.cat([give(100 * rank + target, count) for target in range(size)]))
    assert same(equal, torch.cat([give(100 * source + rank, count) for source in range(size)]))


MOVES = {
    "broadcast": broadcasts, "all_gather": all_gathers, "gather": gathers, "scatter": scatters,
    "all_to_all": all_to_alls,
}  # fmt: skip


def reduce_scatters(rank, size):
    for dtype, op in pairs():
        for count in (0, 1, 1000):
            reduce_scatter(rank, size, count, dtype, op)
    for dtype in (torch.float32, torch.bfloat16):
        reduce_scatter(rank, size, BIG, dtype, dist.ReduceOp.SUM)


def reduce_scatter(rank, size, count, dtype, op):
    parts = [[made(10 * source + target, count, dtype) for target in range(size)] for source in range(size)]
    wanted = reduced([row[rank] for row in parts], op, dtype)
    mine = torch.empty(count, dtype=dtype)
    dist.reduce_scatter(mine, parts[rank], op=op)
    assert same(mine, wanted), (dtype, op, count)
    mine = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(mine, torch.cat(parts[rank]), op=op)
    assert same(mine, wanted), (dtype, op, count)


def barriers(rank, size, folder):
    """All see what each did before."""
    import pathlib
    import time

    time.sleep(0.05 * rank)
    (pathlib.Path(folder) / str(rank)).touch()
    dist.barrier()
    assert len(list(pathlib.Path(folder).iterdir())) == size


def messages(rank, size):
    """A ring of messages, small and larger than a pipe; both ways at once; tags out of order; from anybody."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 100, 200_000):
        found = torch.empty(count)
        if rank == 0:
            dist.send(made(rank, count, torch.float32), after)
            dist.recv(found, before)
        else:
            dist.recv(found, before)
            dist.send(made(rank, count, torch.float32), after)
        assert same(found, made(before, count, torch.float32))
    works = [dist.isend(made(rank, 100_000, torch.float32), other) for other in range(size) if other != rank]
    for other in range(size):
        if other != rank:
            found = torch.empty(100_000)
            dist.recv(found, other)
            assert same(found, made(other, 100_000, torch.float32))
    for work in works:
        work.wait()
    first, second = dist.isend(torch.tensor([1]), after, tag=1), dist.isend(torch.tensor([2]), after, tag=2)
    found = torch.zeros(1, dtype=torch.int64)
    for tag in (2, 1):
        dist.recv(found, before, tag=tag)
        assert found.item() == tag
    first.wait()
    second.wait()
    dist.barrier()
    if rank == 0:
        seen = []
        for _ in range(size - 1):
            source = dist.recv(found)
            assert found.item() == source
            seen.append(source)
        assert sorted(seen) == list(range(1, size))
    else:
        dist.send(torch.tensor([rank]), 0)


def batched_messages(rank, size):
    """``batch_isend_irecv``, and two receives of one tag in order."""
    after, before = (rank + 1) % size, (rank - 1) % size
    one, two = torch.empty(3), torch.empty(3)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), 1.0), after), dist.P2POp(dist.irecv, one, before),
        dist.P2POp(dist.isend, torch.full((3,), 2.0), after), dist.P2POp(dist.irecv, two, before),
    ]  # fmt: skip
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (one[0].item(), two[0].item()) == (1, 2)


def objects(rank, size):
    """Object collectives: torch pickles, the backend carries."""
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
    assert [value["rank"] for value in found] == list(range(size))
    values = [{"a": 1}, "b"] if rank == 0 else [None, None]
    dist.broadcast_object_list(values, src=0)
    assert values == [{"a": 1}, "b"]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object((rank, rank), gathered, dst=0)
    assert rank or gathered == [(other, other) for other in range(size)]
    mine = [None]
    dist.scatter_object_list(mine, [f"to {other}" for other in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"to {rank}"]


def asynchronous(rank, size):
    """Works that are waited for in another order on each rank, in two groups; and futures."""
    groups = [dist.group.WORLD, dist.new_group(list(range(size)))]
    tensors = [torch.full((300_000,), float(rank + 1)) for _ in groups]
    order = (0, 1) if rank % 2 else (1, 0)
    works = {at: dist.all_reduce(tensors[at], group=groups[at], async_op=True) for at in order}
    for at in reversed(order):
        works[at].wait()
        assert works[at].is_completed()
    assert all(tensor[0].item() == size * (size + 1) / 2 for tensor in tensors)
    tensor = torch.full((4,), float(rank))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert torch.equal(future.wait()[0], torch.full((4,), size * (size - 1) / 2))


def subgroups(rank, size):
    """A group of some ranks, in another order; those outside are not in it."""
    members = list(range(size))[1:]
    group = dist.new_group(members)
    mine = torch.tensor([float(rank)])
    if rank in members:
        dist.all_reduce(mine, group=group)
        assert mine.item() == sum(members)
        dist.broadcast(mine, src=members[-1], group=group)
    dist.barrier()


def views(rank, size):
    """Tensors that are not contiguous, parameters, scalars."""
    square = torch.arange(12.0).view(3, 4) + rank
    dist.all_reduce(square.t()[1:])
    wanted = sum(torch.arange(12.0).view(3, 4) + other for other in range(size))
    assert torch.equal(square[:, 1:], wanted[:, 1:])
    assert torch.equal(square[:, 0], torch.arange(12.0).view(3, 4)[:, 0] + rank)
    leaf = torch.nn.Parameter(torch.ones(3) * rank)
    dist.broadcast(leaf, 1)
    assert leaf.tolist() == [1, 1, 1]
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(size))


def all_ops(rank, size):
    """An all-reduce through the functional collectives, which go through C++."""
    from torch.distributed import _functional_collectives as functional

    group = dist.group.WORLD
    mine = made(rank, 8, torch.float32)
    everything = [made(other, 8, torch.float32) for other in range(size)]
    assert same(
        functional.all_reduce(mine, "sum", group).clone(), reduced(everything, dist.ReduceOp.SUM, torch.float32)
    )
    assert same(functional.all_gather_tensor(mine, 0, group).clone(), torch.cat(everything))
    wide = torch.cat([mine] * size)
    wanted = reduced(everything, dist.ReduceOp.SUM, torch.float32)
    assert same(functional.reduce_scatter_tensor(wide, "sum", 0, group).clone(), wanted)
    assert same(functional.broadcast(mine, 0, group).clone(), everything[0])
    swapped = functional.all_to_all_single(torch.cat([mine[:4]] * size), None, None, group).clone()
    assert same(swapped, torch.cat([value[:4] for value in everything]))


def inference(rank, size):
    """Evaluate in inference mode, train outside it: the same sizes, and tensors of that mode outside it."""
    with torch.inference_mode():
        inside = torch.ones(5)
        dist.all_reduce(inside)
    outside = torch.ones(5)
    dist.all_reduce(outside)
    dist.all_reduce(inside)
    assert (inside.tolist(), outside.tolist()) == ([size * size] * 5, [size] * 5)


def again(rank, size, store):
    """The default group is made again with the same store, kept open: who closes a FileStore last removes its file."""
    kept = dist.FileStore(store, size)
    for _ in range(3):
        dist.destroy_process_group()
        dist.init_process_group("phalanx", store=kept, rank=rank, world_size=size)
        mine = torch.ones(3)
        dist.all_reduce(mine)
        assert mine.tolist() == [size] * 3


def coalesced(rank, size):
    """Several tensors at once, and what the coalescing manager collects."""
    ones = [torch.ones(3), torch.ones(4)]
    with dist._coalescing_manager():
        for tensor in ones:
            dist.all_reduce(tensor)
    assert [tensor.tolist() for tensor in ones] == [[size] * 3, [size] * 4]
    whole = [torch.empty(3 * size), torch.empty(4 * size)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, tensor in zip(whole, ones, strict=True):
            dist.all_gather_into_tensor(output, tensor)
    manager.wait()
    assert all((tensor == size).all() for tensor in whole)
    parts = [torch.empty(3), torch.empty(4)]
    with dist._coalescing_manager():
        for output, tensor in zip(parts, whole, strict=True):
            dist.reduce_scatter_tensor(output, tensor)
    assert all((tensor == size * size).all() for tensor in parts)


def meshes(rank, size):
    """Device meshes and the tensors on them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("rows", "columns"))
    mine = torch.ones(2)
    dist.all_reduce(mine, group=mesh["rows"].get_group())
    assert mine.tolist() == [size, size]
    whole = torch.arange(12.0).view(6, 2)
    spread = distribute_tensor(whole, mesh["rows"], [Shard(0)])
    assert torch.equal((spread + 1).full_tensor(), whole + 1)
    assert torch.equal(spread.redistribute(mesh["rows"], [Shard(1)]).full_tensor(), whole)


def compiled(rank, size):
    """Collectives inside a compiled function."""
    from torch.distributed import _functional_collectives as functional

    def summed(x):
        return functional.all_reduce(2 * x, "sum", dist.group.WORLD) + 1

    assert torch.compile(summed, backend="aot_eager")(torch.ones(3)).tolist() == [2 * size + 1] * 3


def planted(rank, size):
    """In reverse order, the sum of three is another one."""
    tensors = list(torch.tensor(triples(size)))
    mine = tensors[rank].clone()
    dist.all_reduce(mine)
    assert not same(mine, reduced(tensors[::-1], dist.ReduceOp.SUM, torch.float32))
