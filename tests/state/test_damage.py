"""Whatever became of a snapshot's files: it is told, an older one is used, and nothing in them is ever executed."""

import contextlib
import json
import os
import pathlib
import pickle
import random
import shutil
import warnings

import pytest
import torch

import phalanx
from phalanx.checkpoint import snapshot, tensors
from phalanx.checkpoint.directory import snapshot_folders
from tests.sampling import cover
from tests.state.runs import (
    NEWER,
    OLDER,
    assert_same,
    contents,
    folder_of,
    listed,
    norm_recipe,
    reheaded,
    sealed,
    steps_in,
)

FILES = (snapshot.WEIGHTS, snapshot.TRAINING, snapshot.FACTS, snapshot.MANIFEST)
TENSORS = FILES[:2]
STEPS = 6
FLIPS = 200  # in each file


@pytest.fixture(scope="module")
def wanted():
    """What the run would have been."""
    return norm_recipe(STEPS).train(engine="inline")


@pytest.fixture
def run_dir(tmp_path, good):
    """A copy of such a directory, to be damaged."""
    shutil.copytree(good, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def go_on(run_dir):
    return norm_recipe(STEPS).train(run_dir=run_dir, snapshot_every=1, engine="inline")


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def write_bomb(path):
    path.write_bytes(pickle.dumps(Bomb(path.parents[3] / "marker")))


def write_torch_bomb(path):
    torch.save(Bomb(path.parents[3] / "marker"), path)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def cut_last(path):
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path):
    with path.open("ab") as file:
        file.write(b"\0" * 8)


def empty(path):
    os.truncate(path, 0)


def turn_into_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def turn_into_folder(path):
    path.unlink()
    path.mkdir()


def turn_into_pipe(path):
    path.unlink()
    os.mkfifo(path)


def take_the_older(path):
    shutil.copy(folder_of(path.parents[2], OLDER) / path.name, path)


FILE_DAMAGES = (
    truncate, cut_last, lengthen, empty, pathlib.Path.unlink, turn_into_link, turn_into_folder, turn_into_pipe,
    take_the_older, write_bomb, write_torch_bomb,
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "name"),
    cover("damaged files", FILE_DAMAGES, FILES),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_file(run_dir, wanted, damage, name):
    """The older snapshot is used, with a warning that names the file; the run ends as if nothing had been."""
    if damage is take_the_older and name == snapshot.MANIFEST:
        name, told = snapshot.MANIFEST, snapshot.FACTS  # the manifest is fine, but speaks of another file
    else:
        told = name
    path = folder_of(run_dir, NEWER) / name
    damage(path)
    with pytest.warns(UserWarning, match=rf"step-0*{NEWER}/{told} cannot be used: .*going on from step {OLDER}"):
        result = go_on(run_dir)
    assert_same(result, wanted)
    assert not (run_dir.parent / "marker").exists()
    assert steps_in(run_dir) == [4, 5, 6]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(go_on(run_dir), wanted)


def test_the_bomb_goes_off(tmp_path):
    """What is written as a bomb here is one."""
    for number, write in enumerate([write_bomb, write_torch_bomb]):
        path = tmp_path / str(number) / "a" / "b" / "c" / "file"
        path.parent.mkdir(parents=True)
        write(path)
        if write is write_bomb:
            pickle.loads(path.read_bytes())  # noqa: S301  this is what must not happen elsewhere
        else:
            torch.load(path, weights_only=False)
        assert (path.parents[3] / "marker").exists()


def link_folder(folder):
    folder.rename(folder.parents[1] / "elsewhere")
    folder.symlink_to("../elsewhere")


def link_nowhere(folder):
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


def empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def file_for_folder(folder):
    shutil.rmtree(folder)
    folder.write_text("text")


@pytest.mark.parametrize("damage", [link_folder, link_nowhere, empty_folder, file_for_folder])
def test_a_damaged_folder(run_dir, wanted, damage):
    """The older snapshot is used, with a warning; what stands in its place does not keep a new one from being written.

    What a link leads to is left alone.
    """
    damage(folder_of(run_dir, NEWER))
    beside = run_dir / "elsewhere"
    before = listed(beside) if beside.exists() else None
    with pytest.warns(UserWarning, match=rf"step-0*{NEWER}.* cannot be used: .*going on from step {OLDER}"):
        result = go_on(run_dir)
    assert_same(result, wanted)
    assert steps_in(run_dir) == [4, 5, 6]
    assert before is None or listed(beside) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(go_on(run_dir), wanted)


def change_manifest(**fields):
    def change(folder):
        path = folder / snapshot.MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def change_state(**fields):
    return lambda folder: sealed(folder, lambda state: state | fields)


def lose_field(folder):
    sealed(folder, lambda state: state.pop("samples") and None)


def change_header(name, change):
    return lambda folder: reheaded(folder / name, change)


def huge_header(folder):
    path = folder / snapshot.WEIGHTS
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


def climb(header):
    return {("../../climbed" if name == "0.weight" else name): entry for name, entry in header.items()}


def climb_hashes(state):
    state["hashes"] = {f"../{name}": hashes for name, hashes in state["hashes"].items()}


def climb_everywhere(folder):
    reheaded(folder / snapshot.WEIGHTS, climb)
    sealed(folder, lambda state: state["hashes"].update({snapshot.WEIGHTS: climb(state["hashes"][snapshot.WEIGHTS])}))


def as_integers(name):
    return lambda header: header[name].update(dtype="I32")


def turned(name):
    return lambda header: header[name].update(shape=header[name]["shape"][::-1])


def flattened(name):
    def change(header):
        count = 1
        for size in header[name]["shape"]:
            count *= size
        header[name]["shape"] = [count]

    return change


def exchanged(one, other):
    def change(header):
        header[one], header[other] = header[other], header[one]
        return dict(sorted(header.items(), key=lambda pair: pair[1].get("data_offsets", [-1])))

    return change


MOMENT, LAST = "optimizer.0.0.weight.exp_avg", "optimizer.0.5.weight.exp_avg"
CONTENT_DAMAGES = {
    "future version": (change_manifest(schema=2), "version 2"),
    "version in text": (change_manifest(schema="1"), "version"),
    "unknown field in the manifest": (change_manifest(code="print()"), "unknown fields.*code"),
    "unknown field in the state": (change_state(code="print()"), "unknown fields.*code"),
    "lost field": (lose_field, "lacks.*samples"),
    "huge header": (huge_header, "header"),
    "header that is a list": (change_header(snapshot.WEIGHTS, lambda header: [header]), "not those"),
    "unknown tensor": (change_header(snapshot.WEIGHTS, lambda header: header | {"more": header["0.weight"]}), "not th"),
    "unknown dtype": (change_header(snapshot.WEIGHTS, lambda header: header["0.weight"].update(dtype="F31")), "F31"),
    "lost shape": (change_header(snapshot.WEIGHTS, lambda header: header["0.weight"].pop("shape") and None), "shape"),
    "negative shape": (
        change_header(snapshot.WEIGHTS, lambda header: header["0.weight"].update(shape=[-8, -3, 3, 3])), "0.weight"
    ),
    "offsets that overlap": (
        change_header(snapshot.WEIGHTS, lambda header: header["0.bias"].update(data_offsets=[0, 32])), "0.bias"
    ),
    "climbing tensor": (change_header(snapshot.WEIGHTS, climb), "not those"),
    "climbing files": (lambda folder: sealed(folder, climb_hashes), "weights"),
    "weights as integers": (change_header(snapshot.WEIGHTS, as_integers("0.weight")), "0.weight|header"),
    "weights turned": (change_header(snapshot.WEIGHTS, turned("5.weight")), "5.weight|header"),
    "weights flattened": (change_header(snapshot.WEIGHTS, flattened("0.weight")), "0.weight|header"),
    "moments as integers": (change_header(snapshot.TRAINING, as_integers(MOMENT)), "exp_avg|header"),
    "moments turned": (change_header(snapshot.TRAINING, turned(LAST)), "exp_avg|header"),
    "moments flattened": (change_header(snapshot.TRAINING, flattened(MOMENT)), "exp_avg|header"),
    "exchanged names": (
        change_header(snapshot.TRAINING, exchanged(MOMENT, MOMENT + "_sq")), "exp_avg.*checksum|header"
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", CONTENT_DAMAGES)
def test_damaged_content(run_dir, wanted, kind):
    """What is inside does not fit: the older snapshot is used, with a warning that says what; the digest is right."""
    damage, words = CONTENT_DAMAGES[kind]
    damage(folder_of(run_dir, NEWER))
    with pytest.warns(UserWarning, match=rf"cannot be used: .*({words}).*going on from step {OLDER}"):
        result = go_on(run_dir)
    assert_same(result, wanted)


def test_names_that_climb_lead_nowhere(run_dir):
    """Names in a snapshot are no paths: one with climbing names is of another model, and nothing is written there."""
    climb_everywhere(folder_of(run_dir, NEWER))
    before = listed(run_dir.parent)
    with pytest.raises(phalanx.SnapshotError, match=r"0\.weight is missing in the snapshot"):
        go_on(run_dir)
    assert listed(run_dir.parent) == before
    loaded = phalanx.load(run_dir)
    assert "../../climbed" in loaded.weights
    assert not list(run_dir.parent.rglob("climbed"))


def flipped(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_are_refused_or_harmless(run_dir, name):
    """One bit of each file, at many positions: the snapshot is refused, or it is the same."""
    folder = folder_of(run_dir, NEWER)
    path = folder / name
    right, whole = contents(snapshot.read(folder)), path.read_bytes()
    header = 8 * min(len(whole), 2048)
    rng, refused = random.Random(name), 0
    bits = [rng.randrange(bound) for bound in (header, 8 * len(whole)) for _ in range(FLIPS)]
    for bit in {*bits, 0, 63, 8 * len(whole) - 1}:
        flipped(path, bit)
        try:
            assert contents(snapshot.read(folder)) == right, bit
        except phalanx.SnapshotError:
            refused += 1
        path.write_bytes(whole)
    assert refused > len(set(bits)) * 0.8


def test_a_flipped_bit_in_a_weight(run_dir, wanted):
    """The warning names the tensor."""
    path = folder_of(run_dir, NEWER) / snapshot.WEIGHTS
    flipped(path, 8 * (path.stat().st_size - 1))  # in the last one of the file
    with pytest.warns(
        UserWarning,
        match=rf"weights.safetensors cannot be used: tensor '1.num_batches_tracked' is damaged.* step {OLDER}",
    ):
        assert_same(go_on(run_dir), wanted)


class Whatever(str):
    """Any checksum."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


def test_a_flipped_bit_that_nobody_checks(run_dir, wanted, monkeypatch):
    """The tests here can fail: without checksums, a flipped bit shows in the digest."""
    path = folder_of(run_dir, NEWER) / snapshot.WEIGHTS
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    flipped(path, 8 * (8 + length) + 20)
    original = tensors.read
    monkeypatch.setattr(tensors, "read", lambda data, hashes: original(data, dict.fromkeys(hashes, Whatever())))
    (run_dir / "next.json").unlink(missing_ok=True)  # which would show it before a step is done
    assert go_on(run_dir).digest != wanted.digest


@pytest.mark.parametrize("name", FILES)
def test_files_of_two_snapshots_exchanged(run_dir, name):
    """Both are damaged then: an error tells both reasons, and nothing is deleted."""
    one, other = (folder_of(run_dir, step) / name for step in (OLDER, NEWER))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    before = listed(run_dir)
    with pytest.raises(phalanx.SnapshotError, match=rf"step-0*{NEWER}/.*; .*step-0*{OLDER}/.*mend them, or choose"):
        go_on(run_dir)
    with pytest.raises(phalanx.SnapshotError, match="no snapshot in"):
        phalanx.load(run_dir)
    assert listed(run_dir) == before


def test_a_folder_with_another_steps_name(run_dir, wanted):
    """A copy of an older snapshot under a newer name is the older snapshot."""
    shutil.rmtree(folder_of(run_dir, NEWER))
    shutil.copytree(folder_of(run_dir, OLDER), folder_of(run_dir, NEWER))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(go_on(run_dir), wanted)


@pytest.mark.long
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_damaged_snapshots_do_not_count_as_kept(tmp_path, wanted, keep):
    """While a run goes on from behind damaged snapshots, there is always a whole one."""
    norm_recipe(NEWER).train(run_dir=tmp_path, snapshot_every=1, keep_snapshots=4, engine="inline")
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    for step in (2, 3, 4):
        empty(folder_of(tmp_path, step) / snapshot.WEIGHTS)
    seen = []

    def look():
        run.result()  # waits for the snapshot
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen.append(phalanx.load(tmp_path).step)

    options = {"run_dir": tmp_path, "snapshot_every": 1, "keep_snapshots": keep, "engine": "inline"}
    with pytest.warns(UserWarning, match="going on from step 1"):
        run = norm_recipe(STEPS).start(**options)
    with run:
        for _ in run:
            look()
        assert_same(run.result(), wanted)
    assert seen == [2, 3, 4, 5, 6]


def test_a_file_that_claims_to_be_enormous(run_dir, wanted):
    """A sparse file of many terabytes is refused as damaged, not read into memory."""
    if pathlib.Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
        pytest.skip("here such memory would be given")
    path = folder_of(run_dir, NEWER) / snapshot.WEIGHTS
    try:
        os.truncate(path, 1 << 43)
    except OSError:
        pytest.skip("this file system has no such files")
    with pytest.warns(UserWarning, match="weights.safetensors cannot be used"):
        assert_same(go_on(run_dir), wanted)


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_random_bytes(run_dir, name):
    """Whatever a file holds, the snapshot is refused in the same way."""
    folder, rng = folder_of(run_dir, NEWER), random.Random(name)
    for _ in range(300):
        length = rng.choice([0, 1, 7, 8, 9, 20, 300])
        content = rng.randbytes(length)
        if rng.random() < 0.5:  # a plausible beginning
            inner = rng.choice([b"{}", b"[]", b"null", b'{"a":1}', b"[" * 5000, b'{"a":{"dtype":"F32"}}', content])
            content = len(inner).to_bytes(8, "little") + inner if name in TENSORS else inner
        (folder / name).write_bytes(content)
        with pytest.raises(phalanx.SnapshotError, match="cannot be used"):
            snapshot.read(folder)


ODD = (None, True, -1, 1.5, 1e400, "", "text", [], [1], {}, {"a": 1}, {"!": "tuple", "is": [1]}, [[[[]]]])


def replaced(value, rng, odd):
    """``value`` with one part, anywhere in it, replaced by ``odd``."""
    if not value or not isinstance(value, (dict, list)) or rng.random() < 0.2:
        return odd
    at = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = value.copy()
    changed[at] = replaced(value[at], rng, odd)
    return changed


@pytest.mark.long
@pytest.mark.parametrize("name", TENSORS)
def test_odd_headers(run_dir, name):
    """Any value anywhere in a header is refused, or harmless."""
    folder, rng = folder_of(run_dir, NEWER), random.Random(name)
    right, whole = contents(snapshot.read(folder)), (folder / name).read_bytes()
    for _ in range(300):
        odd = rng.choice(ODD)
        reheaded(folder / name, lambda header, odd=odd: replaced(header, rng, odd))
        with contextlib.suppress(phalanx.SnapshotError):
            assert contents(snapshot.read(folder)) == right, odd
        (folder / name).write_bytes(whole)


@pytest.mark.long
@pytest.mark.parametrize("field", sorted(snapshot.FIELDS))
def test_odd_states(run_dir, field):
    """A state that was sealed with an odd value is used if it makes sense, or refused by an error of the library's."""
    folder, rng = folder_of(run_dir, NEWER), random.Random(field)
    whole = {name: (folder / name).read_bytes() for name in (snapshot.FACTS, snapshot.MANIFEST)}
    allowed = (phalanx.SnapshotError, phalanx.UsageError)
    for turn in range(20):
        odd = ODD[turn % len(ODD)] if turn < len(ODD) else rng.choice(ODD)
        deep = turn >= len(ODD)

        def change(state, odd=odd, deep=deep):
            state[field] = replaced(state[field], rng, odd) if deep else odd

        sealed(folder, change)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with norm_recipe(STEPS).start(run_dir=run_dir, engine="inline", on_snapshot_error="stop") as run:
                    assert run.steps in (OLDER, NEWER)
                    run.evaluate(lambda output, target: torch.tensor(0.0), (torch.zeros(1, 3, 6, 6), torch.zeros(1)))
            except allowed:
                pass
            except Exception as error:
                raise AssertionError(f"{field} with {odd!r}") from error
        for name, content in whole.items():
            (folder / name).write_bytes(content)


def test_deep_nesting(run_dir, wanted):
    """JSON of any depth is refused, not a crash."""
    folder = folder_of(run_dir, NEWER)
    deep = b"[" * 100_000 + b"]" * 100_000
    (folder / snapshot.FACTS).write_bytes(deep)
    seal = {"schema": 1, snapshot.FACTS: snapshot.hashlib.sha256(deep).hexdigest()}
    (folder / snapshot.MANIFEST).write_text(json.dumps(seal))
    with pytest.warns(UserWarning, match="state.json cannot be used"):
        assert_same(go_on(run_dir), wanted)


def test_nothing_is_unpickled(run_dir, wanted, monkeypatch):
    """A run goes on, and a snapshot is loaded, where unpickling is impossible."""

    def refuse(*arguments, **options):
        raise AssertionError("something was unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr("marshal.loads", refuse)
    assert phalanx.load(run_dir).step == NEWER
    assert_same(go_on(run_dir), wanted)
    with pytest.raises(AssertionError):
        pickle.loads(pickle.dumps(1))  # noqa: S301


def test_other_things_in_the_directory(run_dir, wanted):
    """Files and folders of other names are left alone."""
    for name in ("notes.txt", "snapshots/notes.txt", "snapshots/step-5", "snapshots/step-0000000000zz/file"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text("mine")
    assert_same(go_on(run_dir), wanted)
    assert (run_dir / "snapshots/step-5").read_text() == "mine"
    assert len(snapshot_folders(run_dir)) == 3
