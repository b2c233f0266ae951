"""Streams of shards: logical readers decide the order, and nothing else does."""

import contextlib
import functools
import itertools
import math
import os
import signal
import time
import types

import numpy as np
import pytest
import torch

import phalanx
from phalanx.definition import passes
from phalanx.definition.batches import BatchShares
from phalanx.definition.data import Share
from phalanx.definition.passes import Line, Readings
from phalanx.definition.shards import Dealing, Part, Sharded
from phalanx.engines import shard_readers
from phalanx.step import blame
from tests.inputs.streaming import SIZES, KnowsShard, mixed_rows_of, rows_of, sample, sharded, yielded
from tests.state.runs import assert_same

KINDS = {
    "in order, S no multiple of R": {},
    "mixed, with a buffer": {"make_iterable": mixed_rows_of, "buffer": 4},
    "S = R": {"shards": 4},
    "S = 3 R": {"shards": 6, "replicas": 2},
    "knows its place, with a buffer": {"make_iterable": KnowsShard, "buffer": 3},
    "epoch_size": {"make_iterable": KnowsShard, "size": 12},
    "whole batches only": {"shards": 6, "replicas": 3, "batch_size": 6, "drop_last": True},
}
dropping = pytest.mark.filterwarnings("ignore:drop_last is True, and epoch")
WAYS = [
    {"engine": "inline", "readers": 1},
    {"engine": "processes", "workers": 2, "readers": 0},
    {"engine": "inline", "readers": 3},
    {"engine": "processes", "workers": 3, "readers": 5},
]


@pytest.fixture
def seen(monkeypatch):
    """The shares of each step that is computed in this process: (shard, number) of each sample."""
    steps, brought = [], BatchShares.brought

    def noting(self, batch):
        shares = brought(self, batch)
        count = self._definition.stream.shards
        steps.append([[(int(n) % count, int(n) // count) for n in share.samples] for share in shares])
        return shares

    monkeypatch.setattr(BatchShares, "brought", noting)
    return steps


def on_paper(sizes, replicas, batch):
    """The shares of an epoch, as a person deals them from piles of cards."""
    piles = [[(shard, number) for number in range(size)] for shard, size in enumerate(sizes)]
    hands = [[piles[shard] for shard in range(replica, len(sizes), replicas)] for replica in range(replicas)]
    wanted = [batch // replicas + (replica < batch % replicas) for replica in range(replicas)]
    steps = []
    while any(map(any, hands)):
        step = [[] for _ in hands]
        for replica, hand in enumerate(hands):
            while len(step[replica]) < wanted[replica] and any(hand):
                pile = hand.pop(0)
                hand.append(pile)
                step[replica] += [pile.pop(0)] if pile else []
        steps.append(step)
    return steps


@pytest.mark.parametrize(("shards", "replicas", "batch"), [(5, 4, 8), (5, 4, 6), (6, 2, 5), (4, 4, 4), (6, 1, 7)])
def test_the_order_is_that_on_paper(seen, shards, replicas, batch):
    """Each replica takes from its shards in turn; each sample comes once an epoch."""
    sharded(shards=shards, replicas=replicas, batch_size=batch, epochs=2).train(engine="inline")
    epoch = on_paper(SIZES[:shards], replicas, batch)
    assert seen == epoch * 2
    came = [each for step in epoch for share in step for each in share]
    assert sorted(came) == [(shard, number) for shard in range(shards) for number in range(SIZES[shard])]


@pytest.mark.long
@dropping
@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_readers_decide_nothing(kind):
    """The same bits for any number of workers and of processes that read ahead."""
    made = sharded(**KINDS[kind])
    expected = made.train(engine="inline")
    for way in WAYS:
        if way.get("workers", 1) <= made.replicas:
            assert_same(made.train(**way), expected)


@pytest.mark.long
@dropping
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_anywhere_with_anything(kind, tmp_path):
    """Resumed after any step with other workers and readers, in the middle of an epoch too; chain included."""
    made = sharded(**KINDS[kind])
    expected = made.train(engine="inline", run_dir=tmp_path / "whole")
    for step in range(1, expected.steps, 2):
        folder, first, then = tmp_path / str(step), WAYS[step % 2], WAYS[(step // 2) % 3]
        sharded(**{**KINDS[kind], "steps": step, "epochs": None}).train(run_dir=folder, **first)
        result = made.train(run_dir=folder, **then)
        assert_same(result, expected)
        assert (result.chain, result.resumed_from) == (expected.chain, step)


@pytest.mark.long
def test_little_is_read_again(tmp_path, monkeypatch):
    """A reader that tells its place reads on there; the others of an epoch are read from its beginning."""
    monkeypatch.setitem(globals(), "SIZES", SIZES)
    monkeypatch.setattr("tests.inputs.streaming.SIZES", (4000, 4000))
    facts = {"make_iterable": KnowsShard, "shards": 2, "replicas": 2, "buffer": 5, "epochs": None}
    sharded(**facts, steps=900).train(engine="inline", run_dir=tmp_path)
    yielded(again=0)
    sharded(**facts, steps=901).train(engine="inline", run_dir=tmp_path)
    assert 0 < yielded() < 100


def test_a_shuffle_of_its_own_is_seeded_by_shard(seen):
    """Two shards with the same code are in different orders, and each epoch has another one."""
    orders = []

    def noting(shard, shards):
        numbers = torch.randperm(6).tolist()
        orders.append(tuple(numbers))
        return map(sample, numbers)

    sharded(noting, shards=3, replicas=3, epochs=3, batch_size=6).train(engine="inline")
    assert len(orders) == len(set(orders)) == 9


def arrival(self, count):
    """Planted: whichever shard has more samples waiting comes first, as where readers deal by arrival."""
    items = []
    while len(items) < count and (ready := [(each, line) for each, line in self._lines if line.fill(1)]):
        which, line = max(ready, key=lambda pair: (SIZES[pair[0].shard] * 31 + self.dealt) % 7)
        number, kept, digest = line.ready.popleft()
        items.append((which.named(number), kept, digest))
        self.dealt += 1
    return items


def test_dealing_by_arrival_shows(monkeypatch):
    """The negative twin: if shards came in another order, the digest would be another."""
    made = sharded(shards=6, replicas=2)
    expected = made.train(engine="inline").digest
    monkeypatch.setattr(Part, "take", arrival)
    assert made.train(engine="inline").digest != expected


def late(self):
    """Planted: the place of the iterable is that after one sample more."""
    return passes.Mark(self.number, self.hash, {"place": self.iterable.place + 1, "ones": torch.ones(2)})


def elsewhere(self, mark, state, shown):
    """Planted: samples that waited are put into the buffer in another order."""
    read_from(self, mark, state, shown)
    self._buffer.reverse()


read_from = Line._read_from


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "name", "plant", "noticed"),
    [(passes.Reading, "mark", late, True), (Line, "_read_from", elsewhere, False)],
    ids=["a sample late", "the buffer"],
)
def test_a_wrong_place_shows(owner, name, plant, noticed, tmp_path, monkeypatch):
    """The negative twins of resuming: a state one sample late, a buffer filled from the wrong place."""
    facts = {**KINDS["knows its place, with a buffer"], "epochs": None}
    expected = sharded(**facts, steps=6).train(engine="inline").digest
    monkeypatch.setattr(owner, name, plant)
    sharded(**facts, steps=4).train(engine="inline", run_dir=tmp_path)
    led = pytest.warns(UserWarning, match="the stream's state led to other samples")
    with led if noticed else pytest.raises(phalanx.UsageError, match="are not those that the earlier run had read"):
        digest = sharded(**facts, steps=6).train(engine="inline", run_dir=tmp_path, resume=True).digest
        assert digest == expected  # all was read again from the beginning


class Dying:
    """A process that reads shard 1 ahead ends at a sample, once for each mark in a folder."""

    def __init__(self, folder, how, times=1):
        self.folder, self.how, self.times, self.home = str(folder), how, times, os.getpid()

    def __call__(self, shard, shards):
        for number, row in enumerate(rows_of(shard, shards)):
            if (int(shard), number) == (1, 2) and os.getpid() != self.home:
                for time_ in range(self.times):
                    with contextlib.suppress(FileExistsError):
                        os.close(os.open(f"{self.folder}/{time_}", os.O_CREAT | os.O_EXCL))
                        self.strike()
            yield row

    def strike(self):
        if self.how is None:
            time.sleep(1000)
        os.kill(os.getpid(), self.how)


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, None, signal.SIGSTOP], ids=["killed", "hangs", "stopped"])
def test_a_process_that_reads_is_replaced(how, tmp_path, monkeypatch):
    """One that is killed, hangs or is stopped is replaced, and the run goes on with the same bits."""
    monkeypatch.setattr(shard_readers, "HANGING_SECONDS", 1.0)
    made = sharded(Dying(tmp_path, how), epochs=1)
    result = made.train(engine="inline", readers=2)
    assert os.listdir(tmp_path) == ["0"]
    assert_same(sharded(rows_of, epochs=1).train(engine="inline"), result)


@pytest.mark.long
def test_processes_that_end_again_and_again_are_given_up(tmp_path):
    """Then this process reads, with a warning, and the bits are the same."""
    made = sharded(Dying(tmp_path, signal.SIGKILL, times=1000), epochs=1)
    with pytest.warns(UserWarning, match="ended 5 times without a sample, so this process reads them"):
        result = made.train(engine="inline", readers=2)
    assert_same(sharded(rows_of, epochs=1).train(engine="inline"), result)


@pytest.mark.parametrize("readers", [0, 2])
def test_an_error_of_a_shard_says_where(readers):
    """It names shard, sample and epoch, and is the same with processes that read ahead."""

    def failing(shard, shards):
        yield from rows_of(shard, shards)
        if shard == 2:
            raise KeyError("no such file")

    with pytest.raises(
        phalanx.WorkerError, match="KeyError in user code while sample 9 of shard 2 of epoch 0"
    ) as caught:
        sharded(failing).train(engine="inline", readers=readers)
    assert caught.value.samples == (9 * 5 + 2,)


def test_what_cannot_travel_is_read_here():
    """Samples that no other process can send are read where they are computed."""

    def odd(shard, shards):
        for x, y in rows_of(shard, shards):
            yield x, y, (each for each in ())  # a generator

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(
            model(torch.stack([x for x, *_ in batch])), torch.stack([y for _, y, _ in batch])
        )

    made = sharded(odd, collate_fn=list, loss_takes="model", loss_fn=loss)
    assert_same(made.train(engine="inline", readers=2), made.train(engine="inline", readers=0))


def takes_nothing():
    yield sample(0)


ITERATOR = map(sample, itertools.count())
REFUSED = {
    "fewer shards than replicas": ({"shards": 3}, "shards is 3 and replicas is 4, but each replica takes its samples"),
    "a batch of less than R": ({"batch_size": 2}, "batch_size is 2 and replicas is 4"),
    "no arguments": ({"make_iterable": takes_nothing}, r"called as make_iterable\(shard, shards\)"),
    "no shards": ({"shards": 0}, "shards is 0"),
    "an epoch_size that is too large": (
        {"size": 28},
        "epoch_size is 28, but the shards of replica 1 .* after 3 samples",
    ),
    "an epoch_size in uneven shares": (
        {"make_iterable": lambda shard, shards: map(sample, range(6)), "shards": 4, "batch_size": 6, "size": 24},
        "replica 0 .* after 6 samples .* the first ones are larger where batch_size is no multiple of R",
    ),
    "nothing": ({"make_iterable": lambda shard, shards: iter(())}, "has no samples in epoch 0"),
    "no whole batch": (
        {"shards": 6, "batch_size": 24, "drop_last": True},
        "replica 1 have 3 of the 6 samples|drop_last",
    ),
    "one iterator": ({"make_iterable": lambda shard, shards: ITERATOR}, "returned the same map again for shard"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    """The sentence names the argument, its value and the way out."""
    changes, match = REFUSED[what]
    with pytest.raises(phalanx.UsageError, match=match):
        sharded(**changes).train(engine="inline")


def test_whole_batches_of_uneven_shards_are_warned_of():
    """They leave out more than a short batch, which is said once in a run; of even shards nothing is said."""
    told = "epoch 0 ends .* of the shards of 2 other replicas .of 0, say. are left out. Make shards equally long"
    with pytest.warns(UserWarning, match=told) as warned:
        sharded(**KINDS["whole batches only"]).train(engine="inline")
    assert len(warned) == 1
    even = {**KINDS["whole batches only"], "make_iterable": lambda shard, shards: map(sample, range(7))}
    assert sharded(**even, epochs=1).train(engine="inline").samples == 6 * 7


def test_arguments_without_shards():
    """A function that takes a shard wants shards=."""
    with pytest.raises(phalanx.UsageError, match=r"one that takes \(shard, shards\) wants Stream"):
        phalanx.Stream(rows_of)


def test_other_shards_are_another_answer(tmp_path):
    """A run does not go on with another number of shards, whatever one says."""
    sharded(shards=5, steps=2, epochs=None).train(engine="inline", run_dir=tmp_path)
    other = sharded(shards=6, steps=4, epochs=None)
    with pytest.raises(phalanx.UsageError, match="shards=6 here, and a Stream shuffle_buffer=0 shards=5 there"):
        other.train(engine="inline", run_dir=tmp_path)
    refused = pytest.raises(
        phalanx.UsageError, match="shards=6, and that of the run that is resumed has 5; they decide"
    )
    with refused, pytest.warns(UserWarning, match="going on with another recipe"):
        other.train(engine="inline", run_dir=tmp_path, resume="anyway")


def test_other_samples_are_refused(tmp_path):
    """A resumed run whose shards give other samples says so; "anyway" goes on."""
    path = tmp_path / "rows"

    def rows(shard, shards):
        return (sample(100 * shard + number) for number in map(int, path.read_text().split()))

    path.write_text("0 1 2 3 4")
    sharded(rows, steps=3, epochs=None).train(engine="inline", run_dir=tmp_path / "run")
    path.write_text("0 2 1 3 4")
    other = sharded(rows, steps=5, epochs=None)
    with pytest.raises(phalanx.UsageError, match="of replica 0 in epoch 0 are not those that the earlier run had read"):
        other.train(engine="inline", run_dir=tmp_path / "run")
    with pytest.warns(UserWarning, match="not those that the earlier run had read"):
        other.train(engine="inline", run_dir=tmp_path / "run", resume="anyway")


def test_where_shards_are_is_told_when_it_is_new():
    """Over hosts a place travels now and then, not with each step, and whoever hears it once goes on from there."""
    made = sharded(KnowsShard, shards=4, buffer=2, batch_size=4)
    dealers = [Sharded(made, Readings(made).opened, contextlib.nullcontext(), apart=True) for _ in range(2)]
    told = []
    for _ in range(6):
        dealings = [dealer.next() for dealer in dealers]
        heads = dealings[0].read([0, 1]) | dealings[1].read([2, 3])
        told.append([head.base is not None for head in heads.values()])
        assert len({dealing.settle(heads).hash for dealing in dealings}) == 1
        assert dealers[0].state(None) == dealers[1].state(None)
    assert sum(map(sum, told)) in range(2, 12)
    assert any(map(any, told))
    alone = Sharded(made, Readings(made).opened, contextlib.nullcontext(), apart=False)
    assert [alone.next().hash for _ in range(6)][-1] == dealings[0].drawn.hash


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"epoch": 0, "shards": 5, "given": 3, "parts": [[3, "", None]]},
        {"epoch": 0, "shards": 5, "given": 0, "parts": [[2, "ab", None]] * 4},
        {
            "epoch": 0,
            "shards": 5,
            "given": 8,
            "parts": [[2, "ab", {"dealt": 3, "hash": "", "turn": 0, "lines": []}]] * 4,
        },
    ],
)
def test_a_snapshot_without_a_place(state):
    """A snapshot that says nothing sensible of the shards is a SnapshotError."""
    from phalanx.definition.streams import Supply

    made = sharded()
    dealer = Sharded(made, Readings(made).opened, contextlib.nullcontext(), apart=False)
    with pytest.raises(phalanx.SnapshotError, match="the place in the stream in the snapshot does not fit"):
        Supply(dealer, contextlib.nullcontext()).go_on(state, lambda numbers, _: numbers)


def test_a_run_over_shards_is_verified_and_replayed(tmp_path, seen):
    """Its steps are computed again from a snapshot, and replay has a step's own samples."""
    made = sharded(KnowsShard, buffer=3)
    made.train(engine="inline", run_dir=tmp_path, snapshot_every=2)
    wanted = [list(step) for step in seen]
    assert phalanx.verify(made, tmp_path).status == 0
    replayed = [phalanx.replay(made, tmp_path, step=7, replica=replica).samples for replica in range(3)]
    assert [[(n % 5, n // 5) for n in each] for each in replayed] == wanted[7][:3]


BEHIND = (3, 6, 9, 6)  # replica 0 is the first to have no more


def behind_of(shard, shards):
    return (sample(100 * shard + number) for number in range(BEHIND[shard]))


def named(output, target):
    loss = torch.nn.functional.cross_entropy(output, target)
    return {"loss": loss, "half": loss / 2}


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"loss_over": "batch"}, {"loss_fn": named}], ids=["over the batch", "named"])
def test_replica_0_may_have_no_more(changes):
    """A share of replica 0 may be empty: another one then has the loss of the batch, and the names of losses."""
    made = sharded(behind_of, 4, **changes)
    expected = made.train(engine="inline")
    assert expected.steps == 15
    assert_same(made.train(engine="processes", workers=3), expected)


def test_samples_of_other_processes_have_no_numbers():
    """An error in a loss over the whole batch names those samples that were read here."""
    made = sharded(shards=2, replicas=2, loss_over="batch")
    shares = [Share(np.array(numbers), None, "data", epoch=0) for numbers in ([3, 8], [-3, -4])]
    computed = types.SimpleNamespace(loss=math.nan, gradient=())
    torch_like = types.SimpleNamespace(
        gradients=lambda work: iter([computed]), arithmetic=types.SimpleNamespace(read=list)
    )
    assert blame(torch_like, made, 0, shares, [0]).samples == (3, 8)


def test_a_replica_comes_back_in_one_step():
    """Hosts may fall and join in one step: a process reads for a replica, for it no more, and for it again."""
    made = sharded()
    dealing = Sharded(made, Readings(made).opened, contextlib.nullcontext(), apart=True).next()
    assert isinstance(dealing, Dealing)
    heads = dealing.read(range(4))
    assert dealing.read(range(2)) == {replica: heads[replica] for replica in range(2)}
    assert dealing.read(range(4)) == heads


def test_an_error_moves_no_turn(seen):
    """A shard that could not be read has the next turn still, so no other comes before it."""
    failing = [True]

    def rows(shard, shards):
        for number in range(6):
            if (shard, number) == (0, 2) and failing.pop():
                raise OSError("once")
            yield sample(number)

    made = sharded(rows, 4, replicas=2, batch_size=2, size=24)
    with made.start(engine="inline") as run:
        for _ in range(4):
            next(run)
        with pytest.raises(phalanx.WorkerError, match="once"):
            next(run)
        with pytest.raises(phalanx.RunError, match="this stream cannot be read on"):
            next(run)
    assert len(seen) == 4


class Loses:
    """Holds samples back, as a shuffle of its own does; its state is without them. One process that reads it dies."""

    def __init__(self, folder, home, shard, shards):
        self.folder, self.home, self.shard, self.place = folder, home, int(shard), 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

    def __iter__(self):
        held = []
        while self.place < 60:
            held.append(self.place)
            self.place += 1
            if self.shard == 1 and self.place == 37 and os.getpid() != self.home:
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(f"{self.folder}/struck", os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)
            if len(held) > 6:
                yield sample(held.pop(3))
        yield from map(sample, held)


@pytest.mark.long
def test_a_process_that_is_replaced_loses_nothing(tmp_path):
    """A state that leads elsewhere is noticed where another process goes on from it, as in a run that is resumed."""
    made = sharded(functools.partial(Loses, tmp_path, os.getpid()), 4, replicas=2, epochs=1)
    expected = made.train(engine="inline")
    with pytest.warns(UserWarning, match="the stream's state led to other samples"):
        result = made.train(engine="inline", readers=2)
    assert os.listdir(tmp_path) == ["struck"]
    assert_same(result, expected)


@pytest.mark.long
@pytest.mark.parametrize("where", [20, 40])
def test_samples_that_are_others_when_read_again_are_refused(where):
    """A process that goes on for another finds other samples than the caller has had: the run says so, and ends."""
    home = os.getpid()

    def rows(shard, shards):
        for number in range(60):
            if shard == 1 and number == where and os.getpid() != home:
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample(number if shard != 1 else time.time_ns() % 1000)

    with pytest.raises(phalanx.UsageError, match="of shard 1 of epoch 0 are others when they are read again"):
        sharded(rows, 4, replicas=2, epochs=1).train(engine="inline", readers=2)


@pytest.mark.long
def test_a_shard_that_kills_is_given_up_beside_endless_ones():
    """That other shards of the process are read on each time does not count: it would go on for ever."""
    home = os.getpid()

    def rows(shard, shards):
        for number in itertools.count():
            if shard == 1 and number == 30 and os.getpid() != home:
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample(number)

    made = sharded(rows, 4, replicas=2, epochs=None, steps=20)
    with pytest.warns(UserWarning, match="ended 5 times without a sample, so this process reads them"):
        result = made.train(engine="inline", readers=1)
    assert_same(made.train(engine="inline"), result)
