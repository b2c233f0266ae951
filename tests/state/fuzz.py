"""Files of a run that are changed at random, and all ways in which they are read.

Each way ends in an error of phalanx's own or in the right answer. Where the changed file says what the answer is, and
no checksum is left that knows better, any answer is right: numbers can be forged.
"""

import copy
import functools
import json
import pathlib
import re
import shutil
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import EMA, Log, SaveBest, Thaw
from phalanx.callbacks.best import best_in
from phalanx.checkpoint import snapshot, tensors
from phalanx.checkpoint.chain import BEGINNING, CHAIN, LINK, Links, line_after, records_of
from phalanx.checkpoint.chained import NEXT
from phalanx.checkpoint.directory import BATCH
from phalanx.checkpoint.directory import LOG as EVENTS
from phalanx.definition.digest import leaf_hash
from phalanx.lab import pages, sweeps
from phalanx.proof.verify import certify, check_certificate
from tests.state.runs import NEWER, folder_of

STEPS, FAILED = 6, 2  # of the whole run; the step that fails in the run that does
TOO_MUCH = 100.0  # a target at which the loss raises
X = torch.arange(48, dtype=torch.float32).reshape(16, 3) / 48
Y = X.sum(1, keepdim=True)
LONG = 1 << 20  # characters of a line that is too long
DEEP = 100_000  # lists in lists
HUGE = ("9" * 5000, "1e999", "-1e999", "-1", str(2**63), str(2**64 + 1), "1e308", "0.5", "9" * 400, "-0")
WORDS = ("NaN", "Infinity", "-Infinity", "null", "true", '"x"', "[]", "{}", '"\\ud800"', '""')
BAD = (b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\0", b"\xef\xbb\xbf", b"\x1b[2J", b"\r", b"\n", b'"', b"\\", b"{", b"]")
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
ENTRY = re.compile(rb'"[^"\n]{1,40}": ?("[^"\n]{0,80}"|-?[\d.e+-]+)')


class PlantedError(Exception):
    """What the loss raises."""


NAME = "0.weight"  # of a tensor
VALUES = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**30, 0.0, -0.5, 1e308, "", "F32", "I64", "tensor", "!", "é",
    "\ud800", [], [0], [[]], {}, {"!": "tensor", "is": [NAME, [1], "cpu"]}, {"!": "tuple", "is": 3},
    {"!": "dict", "is": [[[], 1]]}, {"!": "float", "is": "inf"}, float("inf"), float("nan"),
)  # fmt: skip


def slots(value):
    """Every place in JSON values, as a container and a key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from slots(item)


def mutated(rng, value):
    """Change JSON values somewhere: another value, a copy of another place, one thing less, one more, or a key."""
    container, key = rng.choice(list(slots(value)))
    kind = rng.randrange(5)
    if kind == 0:
        container[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == 1:
        other, place = rng.choice(list(slots(value)))
        container[key] = json.loads(json.dumps(other[place]))
    elif kind == 2:
        del container[key]
    elif kind == 3 and isinstance(container, list):
        container.insert(key, copy.deepcopy(rng.choice(VALUES)))
    elif isinstance(container[key], int):
        container[key] += rng.choice([-1, 1, 8, -container[key] - 1, 2**62])
    elif isinstance(container, dict):
        container[rng.choice(["step", "dtype", NAME, ""])] = container.pop(key)


def loss(output, target):
    if target.max() >= TOO_MUCH:
        raise PlantedError
    return F.mse_loss(output, target)


def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def recipe(steps=STEPS, **changes):
    """A small recipe, with state in its optimizer."""
    optimizer = functools.partial(torch.optim.AdamW, lr=0.05)
    given = {"replicas": 2, "batch_size": 8, "steps": steps, "optimizer": optimizer}
    return phalanx.Recipe(make_model, (X, Y), loss, **(given | changes))


def train(run_dir, steps=STEPS, **options):
    """The run: it thaws, averages, evaluates, keeps the best and logs."""
    callbacks = [Thaw("bias", epoch=1), EMA(0.9), SaveBest("loss"), Log("csv")]
    evaluation = phalanx.Evaluation({"loss": F.mse_loss}, (X, Y), every_steps=2)
    given = {"snapshot_every": 2, "keep_snapshots": 2, "chain": "every"}
    return recipe(steps).train(
        run_dir=run_dir, engine="inline", progress=False, callbacks=callbacks, evaluation=evaluation,
        **(given | options),
    )  # fmt: skip


def fail(run_dir):
    """A run that fails in a batch that the caller brought."""
    with recipe().start(run_dir=run_dir, engine="inline", progress=False, snapshot_every=1) as run:
        for _ in range(FAILED):
            run.step()
        try:
            run.step((X[:8], Y[:8] + TOO_MUCH))
        except phalanx.WorkerError:
            return


@dataclass
class Setting:
    """A folder with a run that goes on, one that failed, a certificate and weights; what is right of them."""

    root: pathlib.Path
    digest: str = ""
    states: dict[int, Any] = field(default_factory=dict)  # weights by step
    replica: float = 0.0  # the loss of a replica of step 3
    claim: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, root):
        """Make all of it."""
        made = cls(root)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.digest = train(root / "whole").digest
            shutil.rmtree(root / "whole")
            train(root / "run", NEWER)
            shutil.copytree(root / "run", root / "other")
            fail(root / "failed")
            recipe(NEWER).train(run_dir=root / "plain", engine="inline", progress=False)
            _, made.claim = certify(recipe(NEWER), root / "plain")
        shutil.rmtree(root / "plain")
        with (root / "run" / EVENTS).open("a") as file:  # as an audit ends a run
            told = {"time": 1.0, "event": "error", "error": "CorruptionError", "why": "x", "step": 1, "replica": 1}
            told |= {"phase": "", "workers": [0, 1], "sums": [1, 2], "samples": [1, 2]}
            file.write(json.dumps(told) + "\n")
        (root / CERTIFICATE).write_text(json.dumps(made.claim, indent=1) + "\n")
        for run in ("run", "other", "failed"):
            timeless(root / run / EVENTS)
        made.states = {step: weights(phalanx.load(folder_of(root / "run", step))) for step in (2, NEWER)}
        shutil.copy(best_of(root / "run"), root / GIVEN)
        made.replica = phalanx.replay(recipe(), root / "run", step=3, replica=1, progress=False).loss
        return made


CERTIFICATE, GIVEN = "certificate.json", "given.safetensors"
RECORDS = records_of(pathlib.Path(CHAIN)).name


def timeless(path):
    """Times, processes and order in a log are always the same, so that a seed plays a mutation again."""
    order = ("start", "snapshot", "step", "error", "end")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    events.sort(key=lambda event: (event["step"], order.index(event["event"]) if event["event"] in order else -1))
    known = {"seconds": 0.5, "pid": 1}
    told = [
        {**event, **{name: known[name] for name in known if name in event}, "time": float(number)}
        for number, event in enumerate(events)
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in told))


def weights(loaded):
    return {name: tensor.tolist() for name, tensor in loaded.weights.items()}


def best_of(run_dir):
    (path,) = (run_dir / "best").iterdir()
    return path


# What is changed in the bytes of a file.


def flipped(rng, data):
    """Some bits."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 8])):
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def cut(rng, data):
    """Its end is gone."""
    return data[: rng.choice([0, 1, rng.randrange(len(data)), len(data) - 1])]


def zeroed(rng, data):
    """A stretch is zeros, as after a power loss."""
    begin = rng.randrange(len(data))
    end = min(len(data), begin + rng.choice([1, 16, 512, 4096]))
    return data[:begin] + bytes(end - begin) + data[end:]


def moved(rng, data):
    """A stretch is gone, or is there again elsewhere."""
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    place = rng.choice([begin, rng.randrange(len(data))])
    return data[:begin] + data[end:] if rng.random() < 0.5 else data[:place] + data[begin:end] + data[place:]


def strange(rng, data):
    """Bytes that are no UTF-8, a byte order mark, zeros, escapes, quotes."""
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.choice(BAD) * rng.choice([1, 1, 3]) + data[place:]


def lines(rng, data):
    """A line is gone, twice there, elsewhere, too long, torn, or joined with the next one."""
    parts = data.splitlines(keepends=True)
    number = rng.randrange(len(parts))
    kind = rng.randrange(6)
    if kind == 0:
        del parts[number]
    elif kind == 1:
        parts.insert(rng.randrange(len(parts) + 1), parts[number])
    elif kind == 2:
        rng.shuffle(parts)
    elif kind == 3:
        parts[number] = parts[number].rstrip() + rng.choice([b" ", b"9", b"x", b",", b'"']) * LONG + b"\n"
    elif kind == 4:
        parts[number] = parts[number][: rng.randrange(len(parts[number]))]
    else:
        parts[number] = parts[number].rstrip(b"\n")
    return b"".join(parts)


def replaced(rng, data, pattern, text):
    """Something else in the place of a match."""
    found = list(pattern.finditer(data))
    if not found:
        return strange(rng, data)
    match = rng.choice(found)
    return data[: match.start()] + text(match) + data[match.end() :]


def number(rng, data):
    """A number is huge, or negative, or no number."""
    return replaced(rng, data, NUMBER, lambda _: rng.choice(HUGE + WORDS).encode())


def nested(rng, data):
    """Lists in lists, or objects in objects, in the place of a number."""
    one, other = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = rng.choice([3, 60, 900, DEEP])
    inside = b"0" if one != b"[" else b""
    return replaced(rng, data, NUMBER, lambda _: one * depth + inside + other * (depth if rng.random() < 0.7 else 0))


def key(rng, data):
    """A key is there twice, once with another value."""
    other = rng.choice(HUGE + WORDS).encode()

    def twice(match):
        name = match.group().partition(b":")[0]
        return match.group() + b", " + (name + b": " + other if rng.random() < 0.5 else match.group())

    return replaced(rng, data, ENTRY, twice)


def values(rng, data):
    """Of a document of JSON, or of a line that is one, values and keys are others, more or less."""
    try:
        parts, index, whole = [data], 0, json.loads(data)
    except ValueError:
        parts = data.splitlines(keepends=True)
        index = rng.randrange(len(parts))
        whole = json.loads(parts[index])
    for _ in range(rng.choice([1, 1, 3])):
        mutated(rng, whole)
    parts[index] = json.dumps(whole).encode().ljust(len(parts[index]) - 1) + b"\n"
    return b"".join(parts)


RAW = (flipped, cut, zeroed, moved, strange)
TEXT = (*RAW, lines, number)
JSON = (*TEXT, nested, key, values, values)


def header(change):
    """Change the header of a file of tensors as text, and say how long it is now; or lie about that."""

    def changed(rng, data):
        size = int.from_bytes(data[:8], "little")
        text = change(rng, data[8 : 8 + size])
        length = rng.choice([len(text)] * 8 + [1 << 62, (1 << 64) - 1, 0, len(text) + 1])
        return length.to_bytes(8, "little") + text + data[8 + size :]

    changed.__name__ = f"header, {change.__name__}"
    return changed


TENSORS = (*RAW, *(header(change) for change in JSON))


# Checksums and links that are made to agree with what was changed.


def relinked(data):
    """A chain whose links are right for what its lines say."""
    first, *rest = data.splitlines(keepends=True)
    try:
        facts = json.loads(first)
        width, before = int(facts["width"]), str(facts.get("before", BEGINNING))
        made = []
        for line in rest:
            text = line.decode()
            made.append(line_after(before, "{" + text[LINK.stop + 3 :].rstrip(), width))
            before = made[-1][LINK]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, MemoryError):
        return data
    return first + "".join(made).encode()


def seal(folder):
    """Make the checksums of a snapshot agree with what is there, as far as it can be read."""
    path = folder / snapshot.FACTS
    try:
        state = json.loads(path.read_bytes())
        hashes = {name: hashes_of((folder / name).read_bytes()) for name in (snapshot.WEIGHTS, snapshot.TRAINING)}
        if any(found is not None and found != state["hashes"][name] for name, found in hashes.items()):
            state["hashes"] = {name: found or state["hashes"][name] for name, found in hashes.items()}
            path.write_bytes(json.dumps(state).encode())
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    text = {"schema": snapshot.SCHEMA, snapshot.FACTS: snapshot.hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / snapshot.MANIFEST).write_text(json.dumps(text))


def hashes_of(data):
    """The hash of each tensor in such a file, as the header describes it; None where that cannot be told."""
    size = int.from_bytes(data[:8], "little")
    try:
        entries = json.loads(data[8 : 8 + size])
        entries.pop(tensors.METADATA, None)
        places = {name: entry["data_offsets"] for name, entry in entries.items()}
        return {
            name: leaf_hash(entries[name]["dtype"], entries[name]["shape"], memoryview(data)[8 + size :][begin:end])
            for name, (begin, end) in places.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


# How files are read. Each way returns what is wrong with the answer, in words; "" if nothing is.


def going_on(setting, place, forged):
    """The same call goes on."""
    found = train(place / "run").digest
    return "" if forged or found == setting.digest else "another digest"


def loading(setting, place, forged):
    loaded = phalanx.load(place / "run")
    right = loaded.step in setting.states and weights(loaded) == setting.states[loaded.step]
    return "" if forged or right else "other weights"


def warming(setting, place, forged):
    """A snapshot, or a file, to begin from."""
    recipe(1).train(warm_start=place / "run", engine="inline", progress=False)
    return ""


def warming_from_file(setting, place, forged):
    recipe(1).train(warm_start=place / GIVEN, engine="inline", progress=False)
    return ""


def comparing(setting, place, forged):
    """With the run as it was."""
    difference = phalanx.diff(place / "run", place / "other")
    str(difference)
    if difference is not None or forged:
        return ""
    for step in (2, NEWER):
        snapshot.read(folder_of(place / "run", step))  # else they are not the same
    with Links(place / "run" / CHAIN) as mine, Links(place / "other" / CHAIN) as theirs:
        common = range(min(len(mine), len(theirs)))
        return "" if all(mine[step] == theirs[step] for step in common) else "the same, though the chains differ"


def comparing_files(setting, place, forged):
    difference = phalanx.diff(place / GIVEN, place / "other-given.safetensors")
    str(difference)
    if difference is None:
        mine, theirs = (tensors.read_file(place / name) for name in (GIVEN, "other-given.safetensors"))
        same = {name: (each.shape, bytes(each.content)) for name, each in mine.items()} == {
            name: (each.shape, bytes(each.content)) for name, each in theirs.items()
        }
        return "" if same else "the same, though they differ"
    return ""


def verifying(setting, place, forged):
    """A run that was right is the same, unless the chain, its records or a snapshot was changed."""
    found = phalanx.verify(recipe(), place / "run", progress=False)
    if found.status == 0:
        return "" if found.steps == NEWER else f"the same, with {found.steps} steps"
    return f"status {found.status}: {found.text}" if not forged and found.status == 1 else ""


def certifying(setting, place, forged):
    certify(recipe(), place / "run")
    return ""


def replaying(setting, place, forged):
    found = phalanx.replay(recipe(), place / "run", step=3, replica=1, progress=False)
    return "" if forged or found.loss == setting.replica else "another loss"


def replaying_the_failure(setting, place, forged):
    """What failed fails again."""
    try:
        phalanx.replay(recipe(), place / "failed", progress=False)
    except phalanx.WorkerError as error:
        return "" if forged or isinstance(error.__cause__, PlantedError) else f"fails otherwise: {error.__cause__!r}"
    return "" if forged else "does not fail"


def listing(setting, place, forged):
    """As ``phalanx runs`` does; the other run is listed, too."""
    rows = sweeps.rows_of(place)
    assert [*sweeps.table(rows)]
    other = next(row for row in rows if row["run"] == "other")
    return "" if other["steps"] == NEWER and other["loss"] is not None else "another run is not listed as it is"


def reporting(setting, place, forged):
    """As ``phalanx report`` does."""
    pages.report([place / "run", place / "other"], place / "report.html")
    return "" if "other" in (place / "report.html").read_text() else "no page"


def checking(setting, place, forged):
    """A certificate is right only if it says what came out."""
    found = check_certificate(place / CERTIFICATE, recipe(NEWER))
    claim = json.loads((place / CERTIFICATE).read_bytes()) if found.status == 0 else setting.claim
    same = all(claim[name] == setting.claim[name] for name in ("steps", "chain", "digest"))
    return "" if same else "the same, though it says something else"


def exporting(setting, place, forged):
    """As ``phalanx export --best`` does."""
    newest = snapshot.read(folder_of(place / "run", NEWER))
    _, path = best_in(place / "run", tensors.states_in(newest.facts, newest.training))
    tensors.read_weights(path)
    return ""


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it is, what is changed in it, how it is read, and whether its content is the answer."""

    path: str
    changes: tuple
    ways: tuple
    forges: tuple = ()  # ways whose answer it decides, though no checksum was made anew
    seals: Any = None  # makes checksums agree


OF_RUN = (going_on, verifying, replaying, comparing, listing, reporting)
IN_SNAPSHOT = (loading, going_on, warming, comparing, verifying, replaying, certifying)
NEWEST = str(folder_of("run", NEWER))


def reseal(place):
    seal(place / NEWEST)


def relink(place):
    path = place / "run" / CHAIN
    path.write_bytes(relinked(path.read_bytes()) if path.stat().st_size else b"")


KINDS = {
    "manifest": Kind(f"{NEWEST}/{snapshot.MANIFEST}", JSON, IN_SNAPSHOT),
    "state": Kind(f"{NEWEST}/{snapshot.FACTS}", JSON, (*IN_SNAPSHOT, exporting), seals=reseal),
    "weights": Kind(f"{NEWEST}/{snapshot.WEIGHTS}", TENSORS, IN_SNAPSHOT, seals=reseal),
    "training": Kind(f"{NEWEST}/{snapshot.TRAINING}", TENSORS, (*IN_SNAPSHOT, exporting), seals=reseal),
    "chain": Kind(f"run/{CHAIN}", JSON, (*OF_RUN, certifying), (verifying,), seals=relink),
    "records": Kind(f"run/{RECORDS}", JSON, (*OF_RUN, certifying), (verifying, replaying)),
    "events": Kind(f"run/{EVENTS}", JSON, (*OF_RUN,)),
    "events of a failure": Kind(f"failed/{EVENTS}", JSON, (replaying_the_failure, listing), (replaying_the_failure,)),
    "batch of a failure": Kind(f"failed/{BATCH}", TENSORS, (replaying_the_failure,), (replaying_the_failure,)),
    "next": Kind(f"run/{NEXT}", JSON, (going_on,)),
    "log": Kind("run/log.csv", TEXT, (going_on,)),
    "certificate": Kind(CERTIFICATE, JSON, (checking,)),
    "weights that are given": Kind(GIVEN, TENSORS, (warming_from_file, comparing_files)),
    "best weights": Kind("run/best", TENSORS, (exporting, going_on)),
}


def fresh(setting, place):
    """A copy of everything."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(setting.root, place, symlinks=True)
    shutil.copy(setting.root / GIVEN, place / "other-given.safetensors")


def strike(setting, place, name, rng):
    """Change a file of this kind at random, and read it in some way; returns what was done, and what is wrong then."""
    kind = KINDS[name]
    fresh(setting, place)
    path = place / kind.path
    path = best_of(place / "run") if path.is_dir() else path
    change, way = rng.choice(kind.changes), rng.choice(kind.ways)
    before = path.read_bytes()
    try:
        path.write_bytes(change(rng, before))
    except (ValueError, LookupError):  # it is no JSON, or there is nothing more to change
        path.write_bytes(strange(rng, before))
    sealed = kind.seals is not None and rng.random() < 0.5
    if sealed:
        kind.seals(place)
    what = f"{change.__name__}{', checksums agree' if sealed else ''}: {way.__name__}"
    return what, read(setting, place, way, forged=sealed or way in kind.forges)


REFUSED = "refused by an error of phalanx's own"


def read(setting, place, way, *, forged):
    """What is wrong with the answer, in words; "" if it is right, ``REFUSED`` if there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return way(setting, place, forged)
        except phalanx.PhalanxError as error:
            return REFUSED if len(str(error)) < 10_000 else f"a message of {len(str(error))} characters"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
