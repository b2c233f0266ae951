"""Replicas are independent copies that keep what the model is; a root's state is copied into the others."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx import manual
from phalanx.frameworks.torch.model import put
from tests.families import FAMILIES, Counting, Tied, conv_norm, double, frozen, mlp, mlp_bfloat16, normal, whole


def tensors(model):
    return [*model.parameters(), *model.buffers()]


def memory(model):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(model) if tensor.numel()}


def bits(model):
    """Names, dtypes, strides and bytes of all parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [
        (name, tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.detach().clone().numpy(force=True).tobytes())
        if tensor.dtype != torch.bfloat16
        else (name, tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.float().numpy(force=True).tobytes())
        for name, tensor in named
    ]


def trained(replica):
    """Take one step of plain SGD on made-up gradients."""
    with torch.no_grad():
        for parameter in replica.parameters():
            parameter.sub_(1)


@pytest.mark.parametrize("name", FAMILIES)
def test_replicas_are_equal_and_independent(name):
    """Copies have the model's bits, strides and flags, and no byte of memory in common with it or each other."""
    model = FAMILIES[name].make_model()
    replicas = manual.replicate(model, ["cpu"] * 3)
    assert [bits(replica) for replica in replicas] == [bits(model)] * 3
    assert all(type(replica) is type(model) for replica in replicas)
    addresses = [memory(each) for each in (model, *replicas)]
    assert sum(map(len, addresses)) == len(set.union(*addresses))


def test_copies_by_to_are_not_independent():
    """Negative twin: what ``.to("cpu")`` returns is the model's own memory."""
    model = mlp()
    assert memory(model.to("cpu")) == memory(model)


def test_training_a_replica_leaves_the_model_alone():
    """The model that was passed in is not one of the replicas, and never changes with them."""
    model = mlp()
    before = bits(model)
    for replica in manual.replicate(model, ["cpu", "cpu"]):
        trained(replica)
        assert bits(replica) != before
    assert bits(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_flags_and_modes_are_kept():
    """Frozen parameters stay frozen, and each module keeps its own train or eval mode."""
    model = frozen()
    for replica in manual.replicate(model, ["cpu"] * 2):
        assert [parameter.requires_grad for parameter in replica.parameters()] == [False] * 4 + [True] * 2
        assert [module.training for module in replica] == [True, False, True, True]


def test_ties_are_kept():
    """Two names of one parameter, or of one buffer, are one tensor in each replica."""
    model = Tied()
    model.register_buffer("mask", torch.ones(3))
    model.head.register_buffer("mask", model.mask)
    for replica in manual.replicate(model, ["cpu"] * 2):
        assert replica.head.weight is replica.embedding.weight
        assert replica.head.mask is replica.mask
        assert len(list(replica.parameters())) == 1


def test_ties_are_kept_on_other_devices():
    """A tied buffer that is moved stays one tensor, which ``Module.to`` would make two."""
    model = Tied()
    model.register_buffer("mask", torch.ones(3))
    model.head.register_buffer("mask", model.mask)
    replica = copy.deepcopy(model)
    put(replica, torch.device("meta"))
    assert replica.mask.is_meta
    assert replica.head.mask is replica.mask
    moved = copy.deepcopy(model).to("meta")
    assert moved.head.mask is not moved.mask


def test_a_model_with_constructor_arguments_is_copied():
    """Nothing is constructed anew, so any constructor will do; hooks come along, gradients do not."""

    class Needy(nn.Module):
        def __init__(self, width, *, scale):
            super().__init__()
            self.body, self.scale = nn.Linear(5, width), scale

        def forward(self, x):
            return self.body(x) * self.scale

    model = Needy(3, scale=2.0)
    model.register_forward_hook(double_output)
    model(torch.ones(2, 5)).sum().backward()
    [replica] = manual.replicate(model, ("cpu",))
    assert torch.equal(replica(torch.ones(2, 5)), model(torch.ones(2, 5)))
    assert all(parameter.grad is None for parameter in replica.parameters())
    assert all(parameter.grad is not None for parameter in model.parameters())


def double_output(module, inputs, output):
    return output * 2


def test_devices_may_be_torch_devices():
    """A device is given by its name or as a torch.device."""
    assert len(manual.replicate(mlp(), [torch.device("cpu"), "cpu"])) == 2


class Locked(nn.Linear):
    """Keeps a lock, which nobody can copy."""

    def __init__(self):
        super().__init__(2, 2)
        self.lock = threading.Lock()


class Shallow(nn.Linear):
    """Says that it is its own copy."""

    def __deepcopy__(self, memo):
        return copy.copy(self)


@pytest.mark.parametrize(
    ("model", "devices", "says"),
    [
        (mlp(), [], r"devices is \[\]"),
        (mlp(), "cpu", "devices is 'cpu'"),
        (mlp(), 2, r"devices is 2;.*\['cpu'\] \* 4"),
        (mlp(), ["cpu", "gpu"], r"devices\[1\] is 'gpu'"),
        (mlp(), ["cpu", None], r"devices\[1\] is None"),
        (mlp(), ["meta"], r"devices\[0\] is 'meta', which torch cannot use here \(it has no values\); use 'cpu'"),
        (nn.Linear, ["cpu"], "model is .*must be a torch.nn.Module"),
        (mlp, ["cpu"], "model is .*function"),
        (Locked(), ["cpu"], "Locked that cannot be copied .*lock"),
        (Shallow(2, 2), ["cpu"], "Shallow that cannot be copied .its copy is not independent"),
        (nn.ReLU(), ["cpu"], "without trainable parameters"),
        (mlp().requires_grad_(False), ["cpu"], "without trainable parameters"),
        (nn.LazyLinear(3), ["cpu"], "no values yet for 'weight'"),
        (nn.Linear(2, 2, device="meta"), ["cpu"], "no values yet for 'weight'"),
    ],
)
def test_what_cannot_be_replicated_is_refused(model, devices, says):
    """A wrong model or device is named, with the reason."""
    with pytest.raises(phalanx.UsageError, match=says):
        manual.replicate(model, devices)


def apart(make_model, count=3):
    """Replicas that were trained apart, each on its own batch, so that weights and buffers differ."""
    replicas = manual.replicate(make_model(), ["cpu"] * count)
    for seed, replica in enumerate(replicas):
        shape = (4, 3, 6, 6) if make_model is conv_norm else (4, 5)
        F.cross_entropy(replica(normal(*shape, seed=seed)), whole(3, 4)).backward()
        torch.optim.SGD(replica.parameters(), lr=0.1).step()
    return replicas


@pytest.mark.parametrize("root", [0, 1, 2])
@pytest.mark.parametrize("make_model", [mlp, conv_norm, Counting, double, mlp_bfloat16])
def test_broadcast_copies_the_root(make_model, root):
    """All replicas end with the root's parameters and buffers, in the tensors that they had."""
    if make_model is mlp_bfloat16:
        replicas = manual.replicate(make_model(), ["cpu"] * 3)
        [parameter.data.add_(number) for number, replica in enumerate(replicas) for parameter in replica.parameters()]
    else:
        replicas = apart(make_model) if make_model is not double else manual.replicate(double(), ["cpu"] * 3)
    expected, before = bits(replicas[root]), [list(map(id, tensors(replica))) for replica in replicas]
    manual.broadcast_parameters(replicas, root=root)
    assert [bits(replica) for replica in replicas] == [expected] * 3
    assert [list(map(id, tensors(replica))) for replica in replicas] == before


def test_replicas_drift_without_a_broadcast():
    """Negative twin: replicas that were trained apart differ, in weights and in buffers."""
    first, second, _ = apart(conv_norm)
    assert not torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[1].running_mean, second[1].running_mean)


def test_lists_of_parameters_are_broadcast_too():
    """A replica may be a list of parameters that is a module."""
    lists = [nn.ParameterList([torch.full((2,), float(number))]) for number in range(3)]
    manual.broadcast_parameters(lists, root=1)
    assert [each[0].tolist() for each in lists] == [[1.0, 1.0]] * 3


class Unlike(nn.Module):
    """Names as in ``mlp``, but a wider head."""

    def __new__(cls):
        return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("replicas", "root", "says"),
    [
        ([], 0, r"replicas is \[\]"),
        (mlp(), 0, "replicas is Sequential"),
        ([mlp(), Unlike()], 0, r"replicas\[1\] is unlike replicas\[0\].*\(4, 16\).*\(3, 16\)"),
        ([mlp(), mlp().double()], 0, r"replicas\[1\] is unlike.*float64.*float32"),
        ([mlp(), mlp()[:1]], 0, r"replicas\[1\] is unlike.*nothing"),
        ([conv_norm(), mlp()], 0, r"replicas\[1\] is unlike"),
        ([mlp(), "model"], 0, r"replicas\[1\] is 'model'"),
        ([mlp(), mlp()], 2, "root is 2"),
        ([mlp(), mlp()], -1, "root is -1"),
        ([mlp(), mlp()], True, "root is True"),
    ],
)
def test_what_cannot_be_broadcast_is_refused(replicas, root, says):
    """Unlike replicas and a wrong root are named before anything is copied."""
    with pytest.raises(phalanx.UsageError, match=says):
        manual.broadcast_parameters(replicas, root=root)


def test_one_model_twice_is_refused():
    """Replicas in the same memory would train each other: they are found out."""
    model = mlp()
    with pytest.raises(phalanx.UsageError, match=r"replicas\[0\] and replicas\[1\] share the memory of '0.weight'"):
        manual.broadcast_parameters([model, model])
