"""Snapshots whose checksums are right and whose content cannot be: refused by name, with no error of torch's own."""

import json
import pathlib
import shutil
import struct

import pytest

import phalanx
from phalanx.checkpoint import snapshot, tensors
from phalanx.definition.digest import leaf_hash
from phalanx.lab import pages
from phalanx.seams.records import Captured
from tests.state.fuzz import mutated
from tests.state.runs import NEWER, contents, folder_of, norm_recipe, reheaded, sealed

NAME = "0.weight"  # float32[8, 3, 3, 3]: 216 elements


@pytest.fixture
def folder(tmp_path, good):
    """A copy of a snapshot, to be changed."""
    shutil.copytree(folder_of(good, NEWER), tmp_path / "saved")
    return tmp_path / "saved"


def forged(folder, name, change, file=snapshot.WEIGHTS):
    """Change how a tensor is described; checksums are made to fit, as far as there are any for it."""

    def changed(header):
        found = change(header[name])
        header[name] = header[name] if found is None else found

    reheaded(folder / file, changed)
    data = (folder / file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[name]
    try:
        start, end = entry["data_offsets"]
        body = memoryview(data)[8 + length :][start:end]
        found = leaf_hash(entry["dtype"], entry["shape"], body)
    except (TypeError, ValueError, KeyError):
        found = "0" * 64
    sealed(folder, lambda state: state["hashes"][file].update({name: found}))


ODD = {
    "two negative lengths": {"shape": [-8, -3, 3, 3]},
    "no list": {"shape": "83"},
    "an object": {"shape": {"8": 27}},
    "a number": {"shape": 216},
    "nothing": {"shape": None},
    "floats": {"shape": [8.0, 27]},
    "text": {"shape": ["8", 27]},
    "truth": {"shape": [True, 216]},
    "lists": {"shape": [[8], [27]]},
    "too few": {"shape": [8, 3, 3]},
    "too many": {"shape": [8, 3, 3, 4]},
    "a huge length": {"shape": [2**63, 1]},
    "huger than any number": {"shape": [10**400]},
    "a product over 64 bits": {"shape": [2**33, 2**33]},
    "a product of 2**64 and more": {"shape": [2**62, 4, 216]},
    "huge beside none": {"shape": [0, 2**63], "data_offsets": [0, 0]},
    "too many dimensions": {"shape": [216] + [1] * 64},
    "unknown dtype": {"dtype": "F31"},
    "dtype of torch's": {"dtype": "float32"},
    "no dtype": {"dtype": None},
    "a list of dtypes": {"dtype": ["F32"]},
    "a longer dtype": {"dtype": "F64"},
    "offsets in text": {"data_offsets": ["0", "864"]},
    "offsets as floats": {"data_offsets": [0.0, 864.0]},
    "three offsets": {"data_offsets": [0, 864, 864]},
    "no offsets": {"data_offsets": []},
    "offsets the other way": {"data_offsets": [864, 0]},
    "negative offsets": {"data_offsets": [-864, 0]},
    "offsets beyond the end": {"data_offsets": [0, 2**40], "shape": [2**38]},
    "strides": {"strides": [27, 9, 3, 1]},
}


@pytest.mark.parametrize("case", ODD)
def test_a_tensor_that_cannot_be(folder, case):
    """It is refused with its name and file, for load and for a warm start."""
    forged(folder, NAME, lambda entry: entry.update(ODD[case]))
    told = rf"{snapshot.WEIGHTS} cannot be used: tensor '{NAME}' "
    with pytest.raises(phalanx.SnapshotError, match=told):
        phalanx.load(folder)
    with pytest.raises(phalanx.SnapshotError, match=told):
        norm_recipe(1).train(warm_start=folder, engine="inline")


@pytest.mark.parametrize("entry", [[], [None], "F32", 3, {}, {"dtype": "F32", "shape": [8, 3, 3, 3]}])
def test_a_tensor_that_is_not_described(folder, entry):
    """What stands in the place of a description is refused with the tensor's name."""
    forged(folder, NAME, lambda _: entry)
    with pytest.raises(phalanx.SnapshotError, match=rf"tensor '{NAME}' is not described by"):
        phalanx.load(folder)


def test_another_shape_that_fits_is_another_tensor(folder):
    """Negative twin: a forged shape of as many elements is read, so what is refused above is refused for its shape."""
    whole = phalanx.load(folder).weights[NAME]
    forged(folder, NAME, lambda entry: entry.update(shape=[1, 216]))
    found = phalanx.load(folder).weights[NAME]
    assert found.shape == (1, 216)
    assert found.flatten().equal(whole.flatten())
    with pytest.raises(phalanx.UsageError, match=rf"{NAME} is float32\[1, 216\] there"):
        norm_recipe(1).train(warm_start=folder, engine="inline")


LOSSES = {
    "of another dtype": {"dtype": "I64"},
    "as many bytes in half": {"dtype": "F32", "shape": [2 * NEWER]},
    "in a column": {"shape": [NEWER, 1]},
    "turned": {"shape": [1, NEWER]},
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses_that_are_none(folder, case):
    """A snapshot has one loss a step, or is refused."""
    forged(folder, "loss_history", lambda entry: entry.update(LOSSES[case]), snapshot.TRAINING)
    with pytest.raises(phalanx.SnapshotError, match=f"of step {NEWER}, which has a loss for each, but has those of"):
        phalanx.load(folder)


def exchange(state):
    """The first moment of a parameter becomes a number."""
    text = json.dumps(state["facts"]).replace('"optimizer.0.1.weight.exp_avg"', '"optimizer.0.0.bias.step"')
    state["facts"] = json.loads(text)


def overlap(state):
    """The rows of a second moment overlap."""
    text = json.dumps(state["facts"]).replace('.5.weight.exp_avg_sq", [8, 1]', '.5.weight.exp_avg_sq", [7, 1]')
    state["facts"] = json.loads(text)


def other_parameters(state):
    """A group of the optimizer names its parameters."""
    [[[group]], *_] = state["facts"]["options"]
    group["is"].append(["params", [{"!": "tensor", "is": ["optimizer.0.0.bias.exp_avg", [1], "cpu"]}]])


def no_number(state):
    """The learning rate is a word."""
    [[[group]], *_] = state["facts"]["options"]
    next(item for item in group["is"] if item[0] == "lr")[1] = "!"


def no_rate(state):
    """The learning rate is a list."""
    [[[group]], *_] = state["facts"]["options"]
    next(item for item in group["is"] if item[0] == "lr")[1] = [0.1]


@pytest.mark.parametrize("change", [exchange, overlap, other_parameters, no_number, no_rate])
def test_optimizers_that_cannot_be(tmp_path, folder, change):
    """State that does not lie like its parameter (fused kernels write beyond it), or no number for a rate: refused."""
    before = folder / "state.json"
    whole = before.read_bytes()
    sealed(folder, change)
    assert before.read_bytes() != whole
    target = folder_of(tmp_path / "run", NEWER)
    shutil.copytree(folder, target)
    with pytest.raises(phalanx.SnapshotError, match="the optimizers' state in the snapshot does not fit"):
        norm_recipe(NEWER + 1).train(run_dir=tmp_path / "run", engine="inline")


@pytest.mark.cases(2)
@pytest.mark.parametrize("part", [0, None, "phases", ["phases"], {}])
def test_a_description_that_is_none(tmp_path, good, part):
    """Whatever stands where the recipe's description has its parts, a snapshot is read, and a page made of the run."""
    run_dir = tmp_path / "run"
    shutil.copytree(good, run_dir)
    for folder in (run_dir / "snapshots").iterdir():
        sealed(folder, lambda state: state["recipe"].update(hints=part, values=part))
    assert len(phalanx.load(run_dir).loss_history) == NEWER
    assert "run" in pages.page([pages.read(run_dir)])


def strike(rng, folder):
    """Forge something of a snapshot at random, with checksums that fit where there are any."""
    name = rng.choice([snapshot.WEIGHTS, snapshot.TRAINING, snapshot.FACTS])
    if name == snapshot.FACTS:
        sealed(folder, lambda state: mutated(rng, state))
        return
    data = (folder / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensor = rng.choice([key for key in json.loads(data[8 : 8 + length]) if key != tensors.METADATA])

    def change(entry):
        for _ in range(rng.randint(1, 3)):
            if entry:
                mutated(rng, entry)

    forged(folder, tensor, change, name)


@pytest.mark.parametrize("cut", [0, 10, 24, 30])
def test_a_state_that_was_cut_on_the_way(good, cut):
    """What another process sends is checked as files are."""
    found = snapshot.read(folder_of(pathlib.Path(good), NEWER))
    sent = tensors.packed(Captured(dict(found.weights), dict(found.training), found.facts), {"more": 1})
    state, more = tensors.unpacked(sent)
    assert (list(state.weights), more) == (list(found.weights), {"more": 1})
    with pytest.raises(phalanx.SnapshotError, match="that another process sent cannot be used"):
        tensors.unpacked(sent[:cut])
    assert contents(found)


def headed(text):
    """A file with such a header, and four bytes."""
    return struct.pack("<Q", len(text)) + text + b"0000"


BIG = {
    "a shape of two million numbers": b'{"a":{"dtype":"F32","shape":['
    + b"1," * (1 << 21)
    + b'1],"data_offsets":[0,4]}}',
    "a number of 4,000 digits": b'{"a":{"dtype":"F32","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,4]}}',
    "a tensor of 100,000 fields": b'{"a":{' + b",".join(b'"k%d":1' % n for n in range(100_000)) + b"}}",
    "20 MB of spaces": b"{" + b" " * (20 << 20) + b"}",
    "lists in lists": b'{"a":' + b"[" * (1 << 20) + b"]" * (1 << 20) + b"}",
}


@pytest.mark.parametrize("what", BIG)
def test_a_header_is_bounded_before_it_is_spelled(tmp_path, what):
    """A header that is too large is refused by a short message."""
    (tmp_path / "a.safetensors").write_bytes(headed(BIG[what]))
    with pytest.raises(phalanx.SnapshotError) as refusal:
        tensors.read_file(tmp_path / "a.safetensors")
    assert len(str(refusal.value)) < 400
