"""The devices of a torch run: they must be there, and of one kind; all else is refused, in every engine."""

import pytest
import torch

from phalanx import Recipe, UsageError
from phalanx.frameworks.torch.accelerators import named_device

ENGINES = {
    "inline": {"engine": "inline"},
    "auto": {},
    "auto, one worker": {"workers": 1},
    "auto, two workers": {"workers": 2},
    "processes": {"engine": "processes"},
}
WRONG = {
    "two GPUs": ["cuda:0", "cuda:1"],
    "two of the CPU": ["cpu", "cpu:1"],
    "a CPU and a GPU": ("cpu", "cuda"),
    "a GPU three times": ["cuda:0", "cuda:1", "cuda:0"],
    "none": [],
    "an empty name": "",
    "capitals": "CPU",
    "a space": ["cpu "],
    "a number that there is not": "cpu:1",
    "a negative number": "cpu:-1",
    "no number": "cpu:",
    "without values": "meta",
    "a backend that is not installed": "hpu",
    "another": "xla:0",
    "a list in text": "cpu,cpu",
    "a device": [torch.device("cpu")],
    "nothing": None,
    "a set": {"cpu"},
}


def recipe():
    data = torch.arange(12.0).reshape(6, 2), torch.arange(6) % 2
    return Recipe(
        lambda: torch.nn.Linear(2, 2), data, torch.nn.functional.cross_entropy, replicas=2, batch_size=4, steps=2
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_devices_are_refused(case, engine):
    """One sentence names the argument, the value, and what to do."""
    devices = WRONG[case]
    with pytest.raises(UsageError, match=r"^devices (is|names) .*; (\w+ )+") as caught:
        recipe().train(devices=devices, **ENGINES[engine])
    names = [devices] if isinstance(devices, str) else devices
    assert any(repr(name) in str(caught.value) for name in names or ()) or repr(devices) in str(caught.value)


@pytest.mark.parametrize("engine", ["inline", "auto, one worker"])
@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu:0", "cpu"]])
def test_several_devices_are_workers(engine, devices):
    """One process for several devices is refused, also where the CPU is named several times."""
    with pytest.raises(UsageError, match="devices names cpu, cpu, each of which is a worker; leave that out"):
        recipe().train(devices=devices, **ENGINES[engine])


@pytest.mark.parametrize("engine", ["auto", "auto, two workers", "processes"])
def test_the_cpu_twice(engine):
    """The CPU may be named several times, once for each worker: the digest of a run that names none."""
    twice = recipe().train(devices=["cpu:0", "cpu"], **ENGINES[engine])
    assert twice.digest == recipe().train(engine="inline").digest


@pytest.mark.long
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "processes"])
@pytest.mark.parametrize("devices", ["cpu", ["cpu"], "cpu:0", ("cpu:0",), "auto"])
def test_the_cpu_by_any_name(engine, devices):
    """One device is one device: the digest of a run that names none."""
    assert recipe().train(devices=devices, **ENGINES[engine]).digest == recipe().train(engine="inline").digest


@pytest.mark.filterwarnings("ignore:'mkldnn' is no longer:UserWarning")
@pytest.mark.parametrize("name", ["cuda", "mps", "xpu", "mtia", "mkldnn", "hip", "ipu", "lazy", "privateuseone"])
def test_every_kind_of_device_is_there_or_refused(name):
    """Whatever torch raises for a kind of device that it cannot use here, it is the same sentence."""
    try:
        told = f"devices names {name!r}, which torch cannot use here ({named_device(name)}"
    except UsageError as error:
        told = str(error)
    assert told.startswith(f"devices names {name!r}, which torch cannot use here (")
