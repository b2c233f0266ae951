"""Whatever is in a file of a run, reading it ends in the right answer or in an error of phalanx's own."""

import json
import random
import tracemalloc

import pytest

import phalanx
from phalanx.checkpoint import tensors
from phalanx.checkpoint.chain import CHAIN, Links, records_of
from phalanx.checkpoint.directory import LOG
from tests.sampling import generator
from tests.state import fuzz
from tests.state.runs import NEWER

EACH, PARTS = 5, 15  # mutations in a part; parts of each kind of file. benchmarks/fuzz.py makes 10,000 of each kind
MOST = 100 << 20  # bytes


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """What is changed, each time in a copy."""
    return fuzz.Setting.make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def place(setting, tmp_path):
    """A copy."""
    fuzz.fresh(setting, tmp_path / "changed")
    return tmp_path / "changed"


def wrong_in(setting, place, kind, part):
    """What is wrong after some mutations of a kind of file, by what was done."""
    rng = generator(f"fuzz {kind} {part}")
    outcomes = [fuzz.strike(setting, place, kind, rng) for _ in range(EACH)]
    return [(what, wrong) for what, wrong in outcomes if wrong not in ("", fuzz.REFUSED)]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *((kind, 0) for kind in fuzz.KINDS),
        *(pytest.param(kind, part, marks=pytest.mark.campaign) for kind in fuzz.KINDS for part in range(1, PARTS)),
    ],
)
def test_whatever_is_in_a_file(setting, tmp_path, kind, part):
    """Mutations at random of each kind of file, in each way that reads it: right, or refused in a sentence."""
    assert not wrong_in(setting, tmp_path / "changed", kind, part)


def test_an_error_of_python_is_found(setting, tmp_path, monkeypatch):
    """The negative twin: a reader that lets through what odd JSON raises."""
    monkeypatch.setattr("phalanx.proof.verify.MALFORMED", ())  # planted
    assert any("Error: " in wrong for _, wrong in wrong_in(setting, tmp_path / "changed", "certificate", 0))


def test_a_wrong_answer_is_found(setting, tmp_path, monkeypatch):
    """The negative twin: weights that nobody compares with their checksums."""
    original = tensors.read
    monkeypatch.setattr(tensors, "read", lambda data, hashes: original(data, None))  # planted
    fuzz.fresh(setting, tmp_path / "changed")
    path = tmp_path / "changed" / fuzz.KINDS["weights"].path
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert fuzz.read(setting, tmp_path / "changed", fuzz.loading, forged=False) == "other weights"


LARGE = {
    "a long line": b"9" * (4 << 20),
    "lists in lists": b"[" * fuzz.DEEP,
    "objects in objects": b'{"a":' * fuzz.DEEP,
    "many keys": b"{" + b",".join(b'"%d":0' % number for number in range(100_000)) + b"}",
    "many lines": b"{}\n" * 200_000,
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("content", LARGE)
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_large_files_take_little_memory(setting, place, kind, content):
    """A file with nothing but this in it is read, in each way, with less than 100 MB."""
    path = place / fuzz.KINDS[kind].path
    path = fuzz.best_of(place / "run") if path.is_dir() else path
    path.write_bytes(LARGE[content])
    way = fuzz.KINDS[kind].ways[0]
    tracemalloc.start()
    try:
        assert fuzz.read(setting, place, way, forged=True) in ("", fuzz.REFUSED)
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "line", [b'x,"' + b"9" * (1 << 18), b"9" * 5000 + b",1.0"], ids=["a long field", "a long number"]
)
def test_a_log_that_is_none(place, line):
    """A run that would go on with such a log is refused by its name, and the log stays as it is."""
    path = place / "run" / "log.csv"
    before = b"step,loss\n" + line + b"\n"
    path.write_bytes(before)
    with pytest.raises(phalanx.SnapshotError, match=r"log\.csv cannot be used: "):
        fuzz.train(place / "run")
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["environment", "recipe", "steps", "chain", "digest"])
@pytest.mark.parametrize("change", ["gone", "a list"])
def test_a_certificate_that_is_none(setting, place, name, change):
    """One that lacks a field, or has something else there, is refused before anything is trained."""
    claim = {**setting.claim, name: []}
    if change == "gone":
        del claim[name]
    (place / fuzz.CERTIFICATE).write_text(json.dumps(claim))
    with pytest.raises(phalanx.UsageError, match=f"is no certificate: it.{name} is"):
        fuzz.check_certificate(place / fuzz.CERTIFICATE, fuzz.recipe(NEWER))


@pytest.mark.parametrize(
    "facts", [{}, {"names": ["bias"]}, {"names": [3], "trained": True}, {"names": 3, "trained": 1}]
)
def test_records_of_training_that_are_none(place, facts):
    """Whoever needs to know what was frozen is told which file does not say it."""
    with Links(place / "run" / CHAIN) as links:
        record = {"kind": "training", "link": links.before(2), "step": 2, **facts}
    path = records_of(place / "run" / CHAIN)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    with pytest.raises(phalanx.SnapshotError, match=rf"{path.name} cannot be used"):
        phalanx.diff(place / "run", place / "other")


@pytest.mark.parametrize(
    "facts",
    [
        {"workers": [0]},
        {"sums": [1]},
        {"step": 10**15},
        {"replica": -1},
        {"replica": 99},
        {"workers": 0},
        {"sums": "12"},
    ],
)
def test_a_log_of_events_does_not_decide_what_is_verified(place, facts):
    """What the log says of an audit may be anything: the run is the same, as its links are."""
    told = {"event": "error", "step": 1, "replica": 1, "workers": [0, 1], "sums": [1, 2], "samples": [], **facts}
    with (place / "run" / LOG).open("a") as file:
        file.write(json.dumps({"time": 1.0, **told}) + "\n")
    assert phalanx.verify(fuzz.recipe(), place / "run", progress=False).status == 0


def test_odd_values_are_shown_in_short(place):
    """What a log says of a batch is not told in full where it is odd: it may be as long as a file."""
    path = place / "failed" / LOG
    *lines, last = [json.loads(line) for line in path.read_text().splitlines() if '"error"' in line]
    assert not lines
    path.write_text(json.dumps({**last, "batch": {"!": "x" * 100_000}}) + "\n")
    with pytest.raises(phalanx.SnapshotError, match="unknown kind") as refusal:
        phalanx.replay(fuzz.recipe(), place / "failed", progress=False)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("events of a failure", 964), ("events of a failure", 3518), ("state", 5757), ("state", 6016)],
)
def test_names_and_differences_are_shown_in_short(setting, tmp_path, kind, seed):
    """Mutations of benchmarks/fuzz.py that were told in 100,000 characters: a deep name, a deep value of a recipe."""
    assert fuzz.strike(setting, tmp_path / "changed", kind, random.Random(f"{kind} {seed}"))[1] is fuzz.REFUSED
