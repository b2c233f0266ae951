"""What cannot be done is refused with a sentence that names it and the way out."""

import functools
import sys

import numpy as np
import pytest
from tinygrad import Tensor, helpers, nn

import phalanx
from tests.tinygrad.families import FAMILIES, FEATURES, Mlp

SGD = functools.partial(nn.optim.SGD, lr=0.1)


def refused(match, *, options=None, error=phalanx.UsageError, **changes):
    with pytest.raises(error, match=match):
        FAMILIES["mlp"].recipe(2, **({"steps": 3} | changes)).train(**(options or {}))


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("devices", "match"),
    [
        (["CPU", "CPU:0"], "more than once"),
        (["CPU:1", "CPU:1"], "more than once"),
        (["TPU"], "tinygrad cannot use 'TPU' here.*its kinds are.*CPU"),
        (["METAL"], "tinygrad cannot use 'METAL' here.*it needs such a device"),
        (["CPU", "CPU:1", "CPU:2"], "3 devices, but there are 2 replicas"),
        (["cuda:0"], "tinygrad cannot use 'cuda:0' here"),
        (["CPU:-1"], "after the kind comes a number or nothing"),
        (["CPU:x"], "after the kind comes a number or nothing"),
    ],
)
def test_devices(devices, match):
    """Unknown devices, one twice, one that is not there, and more than replicas."""
    if devices == ["METAL"] and sys.platform == "darwin":
        pytest.skip("this machine may have it")
    refused(match, options={"devices": devices})


@pytest.mark.parametrize(
    ("changes", "elsewhere"),
    [
        (
            {"phases": [phalanx.Phase(lambda output, target: 0, optimizer=SGD)], "loss_fn": None, "optimizer": None},
            "torch",
        ),
        ({"micro_batches": 2}, "torch or jax"),
    ],
)
def test_what_other_frameworks_have(changes, elsewhere):
    """It is refused by name, and who has it is named, and nobody else."""
    refused(f"^{next(iter(changes))} is (given|2), .* leave it out, or write the model in {elsewhere}$", **changes)


@pytest.mark.long
def test_losses_over_the_batch():
    """Over several replicas they are refused; with one there is nothing to join, as the message says."""
    refused("^loss_over is 'batch', .* use replicas=1$", loss_over="batch")
    one, plain = (FAMILIES["mlp"].recipe(1, steps=1, loss_over=over).train().digest for over in ("batch", "share"))
    assert one == plain


def test_without_a_compiler(monkeypatch):
    """Where the CPU's compiler is missing, that is said, though all that this needs may have been compiled before."""
    from phalanx.frameworks.tinygrad import devices

    monkeypatch.setattr(devices, "getenv", lambda name, default: "no-such-clang")
    refused("no-such-clang.*it needs clang")


def test_devices_of_several_kinds(monkeypatch):
    """Kinds differ in their bits: by driver, not only by name."""
    from phalanx.frameworks.tinygrad import devices

    monkeypatch.setattr(devices, "described", str)
    refused("several kinds, whose bits differ", options={"devices": ["CPU", "CPU:1"]})


@pytest.mark.long
@pytest.mark.parametrize("options", [{"workers": 2}, {"engine": "processes"}])
def test_worker_processes(options):
    """Worker processes are refused with the reason and what to use instead; "auto" stays in this process."""
    refused("computes in one process.*devices=", options=options)


@pytest.mark.long
def test_auto_stays_here():
    """Without options a run stays in this process, without a word."""
    assert FAMILIES["mlp"].recipe(2, steps=2).train().workers == 1


class Unused(Mlp):
    """Has a layer that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(2, 2)


class Putting(Mlp):
    """Puts another tensor in the place of its own."""

    def __call__(self, x):
        self.first.bias = self.first.bias + 1
        return super().__call__(x)


class Writing(Mlp):
    """Writes into a parameter."""

    def __call__(self, x):
        self.first.bias.assign(self.first.bias.detach() * 2)
        return super().__call__(x)


class Whole(Mlp):
    """Has an integer that would be trained."""

    def __init__(self):
        super().__init__()
        self.count = Tensor([1, 2])


class Narrow(Mlp):
    """Has weights of 16 bits that numpy does not know."""

    def __init__(self):
        super().__init__()
        self.last.weight = self.last.weight.bfloat16()


@pytest.mark.long
@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("make_model", "match"),
    [
        (Unused, "does not depend on the parameter 'other.weight'.*is_param_"),
        (Putting, "put another tensor in the place of the model's 'first.bias'.*assign"),
        (Writing, "writes into the parameter 'first.bias'"),
        (Whole, r"count of the model is .*int\[2\].*is_param_\(False\)"),
        (Narrow, "last.weight of the model is .*bfloat16.*float32"),
        (lambda: [Tensor([1.0]).is_param_(False)], "without trainable parameters"),
        (lambda: [Tensor(1.0)], "constant without memory"),
        (lambda: {"weight": Tensor([1.0]), "lock": sys.stdout}, "cannot be copied"),
    ],
)
def test_models(make_model, match):
    """Models whose tensors cannot be trained, copied, or followed."""
    refused(match, make_model=make_model)


class Counting(nn.optim.LARS):
    """Counts its steps in a plain number."""

    steps = 0

    def schedule_step(self):
        self.steps = self.steps + 1
        return super().schedule_step()


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"optimizer": lambda listed: listed}, "optimizer returned a list.*tinygrad.nn.optim"),
        ({"optimizer": lambda: 3}, "optimizer raised TypeError.*get_parameters"),
        ({"optimizer": lambda listed: SGD([Tensor([1.0])])}, "for other parameters"),
        ({"scheduler": lambda optimizer: optimizer}, "the optimizer has its schedule"),
        ({"precision": "bfloat16"}, "no autocast"),
        ({"data": (FEATURES[0].astype(np.float64), FEATURES[1])}, r"data\[0\] is float64.*astype"),
        ({"data": (Tensor(FEATURES[0]), FEATURES[1])}, r"data\[0\] is a tinygrad.tensor.Tensor.*pass a numpy array"),
        ({"data": [("a", 1)] * 8}, "which no array of the model.s can hold"),
        ({"loss_fn": lambda output, target: output}, "real scalar"),
    ],
)
def test_arguments(changes, match):
    """Optimizers, schedules, data and losses of another kind."""
    refused(match, **changes)


@pytest.mark.long
def test_numbers_that_change():
    """A plain number that a step changes would be changed once, when it is captured: named before it can do harm."""
    refused("changes its number 'steps'", error=phalanx.PhalanxError, optimizer=lambda listed: Counting(listed, lr=0.1))


@pytest.mark.long
def test_reading_a_tensor_while_a_program_is_captured():
    """A loss that reads a number out of a tensor is told, with the step and the replica."""

    def reading(output, target):
        return output.mean() * output.max().item()

    refused("step 0, replica 0", error=phalanx.WorkerError, loss_fn=reading)


def test_without_tinygrad(monkeypatch):
    """What to install is said where tinygrad's adapter cannot be imported."""
    for name in [name for name in sys.modules if name.startswith("phalanx.frameworks.tinygrad.adapter")]:
        monkeypatch.delitem(sys.modules, name)
    import phalanx.frameworks.tinygrad as room

    monkeypatch.delattr(room, "adapter", raising=False)
    monkeypatch.setitem(sys.modules, "phalanx.frameworks.tinygrad.adapter", None)
    refused(r"pip install 'phalanx\[tinygrad\]'")


class Elsewhere(Mlp):
    """Draws on tinygrad's default device, wherever its replica is computed."""

    def __call__(self, x):
        return super().__call__(x + Tensor.randn(*x.shape).to(x.device))


@pytest.mark.long
def test_random_numbers_of_another_device():
    """Only the stream of the replica's own device is keyed: numbers of another one would depend on what ran before."""
    refused("a random tensor was made on CPU.*device=x.device", options={"devices": ["CPU:1"]}, make_model=Elsewhere)


def test_programs_chosen_by_timing(monkeypatch):
    """JITBEAM would choose programs, and bits, by a clock."""
    monkeypatch.setattr(helpers, "getenv", lambda name, default=0: 2 if name == "JITBEAM" else default)
    refused("JITBEAM is set")
