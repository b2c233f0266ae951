"""What would fail on devices and was found by reading: each is tried here without one, by what can be seen of it."""

import contextlib
import os
import pickle
import socket
import types
from multiprocessing.connection import Connection

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from phalanx.engines.devices import buckets
from phalanx.engines.processes.handle import WorkerHandle
from phalanx.frameworks.torch import accelerators
from phalanx.frameworks.torch.arithmetic import DeviceArithmetic, blank
from phalanx.frameworks.torch.optimizer_state import _tried
from phalanx.frameworks.torch.replica import feed
from phalanx.frameworks.torch.replica.tokens import TokenMean
from phalanx.frameworks.torch.sharing import bytes_of
from phalanx.frameworks.torch.snapshot import tensor_of
from phalanx.shared.layout import Spec


@pytest.mark.parametrize("sizes", [[0, 9], [9, 0], [9, 0, 0, 9, 0], [0, 0]])
def test_parameters_without_elements_have_no_bucket_of_their_own(monkeypatch, sizes):
    """One had, and ended a run with several devices: nothing can be cut into slices of no width."""
    monkeypatch.setattr(buckets, "BUCKET", 16)
    rows = buckets.in_buckets(dict(enumerate(sizes)), 4, 2)
    assert sorted(index for places, _ in rows for index in places) == list(range(len(sizes)))
    assert all(width > 0 for _, cuts in rows for _, width in cuts)
    assert len(rows) == max(1, sum(map(bool, sizes)))


def test_no_gradient_at_all_is_divided():
    """A phase may reach none of its parameters."""
    assert DeviceArithmetic().divide([None, None], 4.0) == [None, None]
    (halved,) = DeviceArithmetic().divide([torch.ones(2)], 2.0)
    assert halved.tolist() == [0.5, 0.5]


def test_memory_of_the_host_is_there_whatever_the_default_device_is():
    """A script may say torch.set_default_device("cuda")."""
    storage = torch.ones(3).untyped_storage()
    stored = types.SimpleNamespace(dtype="float32", shape=(0, 2), content=b"")
    with torch.device("meta"):
        assert torch.empty(1).device.type == "meta"
        assert blank(Spec((2,), (1,), "float32", 4)).device.type == "cpu"
        assert len(bytes_of(storage)) == 12
        assert tensor_of(stored).device.type == "cpu"


def test_a_capturable_optimizer_has_the_same_state():
    """It asks for CUDA, and what it keeps is tried out on the CPU."""
    parameter = torch.nn.Parameter(torch.ones(3))
    found = [
        _tried(optimizer, optimizer.param_groups[0], parameter)
        for optimizer in (torch.optim.AdamW([parameter], capturable=capturable) for capturable in (True, False))
    ]
    assert found[0] == found[1]
    assert set(found[0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_run_on_the_cpu_asks_nothing_of_cuda(monkeypatch):
    """Where CUDA was used before, its workspace can no longer be set, and a run on the CPU does not need it."""
    asked = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(accelerators, "set_workspace", lambda: asked.append(1))
    accelerators.prepare(["cpu"], allow=False)
    assert asked == []
    accelerators.prepare([], allow=False)
    accelerators.prepare(["cuda:0"], allow=False)
    assert asked == [1, 1]


def test_another_device_gets_no_context(monkeypatch):
    """``set_device`` makes one, of half a gigabyte. torch's own context goes back to the device before without."""
    did = []

    class Held(contextlib.AbstractContextManager):
        def __init__(self, index):
            did.append(index)

        def __exit__(self, *_):
            did.append("back")

    module = types.SimpleNamespace(device=Held, current_device=lambda: 0, set_device=did.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    with accelerators.current(torch.device("cuda:3")):
        assert did == [3]
    assert did == [3, "back"]


class Pinning:
    """Notes which tensors are pinned, and how each is copied to the device."""

    def __init__(self, monkeypatch, *, pinned=False):
        self.copies, to = [], torch.Tensor.to
        monkeypatch.setattr(feed, "can_pin", lambda: True)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda leaf: leaf if pinned else leaf.clone())
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: pinned)

        def noted(leaf, *given, **named):
            self.copies.append((leaf.stride(), named.get("non_blocking", False)))
            return to(leaf, *given, **named)

        monkeypatch.setattr(torch.Tensor, "to", noted)

    def feed(self, batch, *, collates=True):
        host = types.SimpleNamespace(batch=lambda *_: batch, collates=collates)
        return feed.DeviceFeed(host, torch.device("meta"), ahead=False)


def test_an_evaluation_keeps_no_pinned_memory(monkeypatch):
    """All its chunks were kept until the second step after it, and those of predict for ever."""
    fed = Pinning(monkeypatch).feed(torch.ones(2))
    for _ in range(50):
        assert fed.measured(0, types.SimpleNamespace(origin="")).device.type == "meta"
    assert fed._sources == []
    fed.batch(0, types.SimpleNamespace(origin=""))
    assert len(fed._sources) == 1


@pytest.mark.parametrize(
    ("pinned", "collates", "asynchronous"), [(0, 1, True), (1, 1, True), (1, 0, False), (0, 0, True)]
)
def test_memory_that_user_code_pinned_is_copied_at_once(monkeypatch, pinned, collates, asynchronous):
    """A collate_fn may fill the same buffer for the next replica, while the device still reads it."""
    noted = Pinning(monkeypatch, pinned=bool(pinned))
    noted.feed(torch.ones(2), collates=bool(collates)).batch(0, types.SimpleNamespace(origin=""))
    assert noted.copies == [((1,), asynchronous)]


def test_expanded_tensors_are_pinned_as_they_are_meant(monkeypatch):
    """Rows that share memory cannot be written, which pinning would do."""
    noted = Pinning(monkeypatch)
    noted.feed(torch.arange(3).expand(2, 3)).batch(0, types.SimpleNamespace(origin=""))
    assert noted.copies == [((3, 1), True)]


def test_sizes_of_packed_sequences_stay_on_the_host():
    """Torch's kernels read them there."""
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    host = types.SimpleNamespace(batch=lambda *_: (packed, torch.ones(2)), collates=False)
    moved, target = feed.DeviceFeed(host, torch.device("meta"), ahead=False).batch(0, types.SimpleNamespace(origin=""))
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type, target.device.type) == ("meta", "cpu", "meta")


@pytest.mark.parametrize(("beside", "known"), [(0.0, True), (0.04, True), (0.5, True), (3.0, True), (None, False)])
def test_the_weight_of_tokens_does_not_depend_on_what_was_seen_before(beside, known):
    """With a router's loss beside the mean, a new process gave no weight where an old one did. The sum has none."""
    logits = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(24).reshape(4, 6) % 9
    labels[:2, 3:] = -100
    flat = logits.flatten(0, 1), labels.flatten()
    mean = torch.nn.functional.cross_entropy(*flat)
    total = torch.nn.functional.cross_entropy(*flat, reduction="sum")
    old, new = TokenMean(), TokenMean()
    if known:
        old.weight({"logits": logits}, mean, {"labels": labels})
    loss = total if beside is None else mean * (1 + beside)
    weights = [one.weight({"logits": logits}, loss, {"labels": labels}) for one in (old, new)]
    assert weights == ([18, 18] if known else [None, None])


def test_who_is_stopped_in_a_message_is_not_waited_for():
    """The caller read to its end, so that neither SIGCONT nor Ctrl-C could come."""
    mine, theirs = socket.socketpair()
    handle = object.__new__(WorkerHandle)
    handle.channel, handle._came = Connection(mine.detach()), bytearray()
    messages = [b"", pickle.dumps("short"), pickle.dumps(os.urandom(50_000))]
    writer = Connection(os.dup(theirs.fileno()))
    for message in messages[:2]:
        writer.send_bytes(message)
    framed = len(messages[2]).to_bytes(4, "big") + messages[2]
    theirs.sendall(framed[:2])
    assert handle.heard() == (["short"], True)
    theirs.sendall(framed[2:20_000])
    assert handle.heard() == ([], True)
    theirs.sendall(framed[20_000:] + b"\xff\xff\xff\xff" + (4).to_bytes(8, "big") + pickle.dumps(7)[:2])
    heard, more = handle.heard()
    assert ([pickle.dumps(one) for one in heard], more) == ([messages[2]], True)
    writer.close()
    theirs.close()
    assert handle.heard() == ([], False)
    handle.channel.close()
