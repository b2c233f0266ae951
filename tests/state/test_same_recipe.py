"""How a run that goes on is compared with the one before: by what it computes, and what is told of all else."""

import dataclasses
import functools
import json
import pathlib
import shutil
import sys
import types
import warnings

import pytest
import torch
from torch.nn import functional as F

import phalanx
from phalanx.checkpoint.chained import NEXT, Behaviour
from phalanx.definition import plain
from phalanx.definition.described import compare, described
from phalanx.definition.plain import array_summary, container_summary
from phalanx.definition.reachable import installed, reachable
from tests.exactness.test_phases import recipe as with_phases
from tests.families import FAMILIES, FEATURES
from tests.state.runs import (
    accuracy,
    assert_same,
    bytes_of,
    engine_of,
    folder_of,
    killed,
    norm_recipe,
    sealed,
    steps_in,
)


def scaled(factor):
    def loss(output, target):
        return F.cross_entropy(output, target) * factor

    return loss


def steep(output, target):
    """The loss of ``cross_entropy``, with twice its gradient."""
    loss = F.cross_entropy(output, target)
    return 2 * loss - loss.detach()


def job(**changes):
    return FAMILIES["mlp"].recipe(3, **({"steps": 4} | changes))


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("stopped", [True, False])
def test_a_gradient_alone(tmp_path, workers, stopped):
    """A loss of the same value with another gradient is refused, by a checksum of one or by the norm of all."""
    options = {"run_dir": tmp_path, "snapshot_every": 2, **engine_of(workers)}
    job(steps=2 if stopped else 4).train(**options)
    if not stopped:
        killed(tmp_path)
    with pytest.raises(phalanx.UsageError, match="another gradient than before" if stopped else "to another norm"):
        job(loss_fn=steep).train(**options)


@pytest.mark.parametrize("stopped", [True, False])
def test_what_was_computed_is_what_refuses(tmp_path, monkeypatch, stopped):
    """Negative twin: a loss that reads the same is refused by its value, and without comparing it would go on."""

    class Read(torch.nn.Module):
        def forward(self, output, target):
            return F.cross_entropy(output, target) * float((tmp_path / "factor").read_text())

    options = {"run_dir": tmp_path / "run", "engine": "inline", "snapshot_every": 2}
    (tmp_path / "factor").write_text("1.0")
    job(steps=2 if stopped else 4, loss_fn=Read()).train(**options)
    if not stopped:
        killed(tmp_path / "run")
    (tmp_path / "factor").write_text("2.0")
    with pytest.raises(phalanx.UsageError, match=r"another recipe: (replica 0 of )?step 2 comes to another loss"):
        job(loss_fn=Read()).train(**options)
    monkeypatch.setattr(Behaviour, "of_replica", lambda *_: "")
    monkeypatch.setattr(Behaviour, "of_step", lambda *_: "")
    assert job(loss_fn=Read()).train(**options).resumed_from == 2


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_was_refused_has_nothing_to_give(tmp_path, workers):
    """After a refused step there is no result, no snapshot and no further step; the error has no result either."""
    options = {"run_dir": tmp_path, "snapshot_every": 2, **engine_of(workers)}
    job().train(**options)
    killed(tmp_path)
    with job(loss_fn=scaled(2.0)).start(**options) as run:
        with pytest.raises(phalanx.UsageError, match="another recipe") as caught:
            next(run)
        assert getattr(caught.value, "result", None) is None
        for ask in (run.result, run.step, functools.partial(run.save, tmp_path / "saved")):
            with pytest.raises(phalanx.RunError, match="its recipe is another than that of the snapshot"):
                ask()
    assert steps_in(tmp_path) == [2]


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("step", [0, 2])
def test_a_run_that_was_refused_changes_no_file(tmp_path, workers, step):
    """Neither at the beginning, where only the chain tells what was done, nor later; the right recipe goes on."""
    options = {"run_dir": tmp_path, "snapshot_every": 2, "keep_snapshots": 9, **engine_of(workers)}
    whole = job().train(**options)
    killed(tmp_path, step)
    kept = bytes_of(tmp_path)
    with pytest.raises(phalanx.UsageError, match=f"step {step} comes to another loss"):
        job(loss_fn=scaled(2.0)).train(**options)
    assert bytes_of(tmp_path) == kept
    again = job().train(**options)
    assert (again.resumed_from, again.chain) == (step, whole.chain)
    assert bytes_of(tmp_path) != kept


WIDTH = {"hidden": 16}


def wide_model():
    return torch.nn.Sequential(
        torch.nn.Linear(5, WIDTH["hidden"]), torch.nn.ReLU(), torch.nn.Linear(WIDTH["hidden"], 3)
    )


def test_a_changed_model_is_refused(tmp_path, monkeypatch):
    """A global makes another shape: an error names it; if told to go on, one names the parameter and both shapes."""
    FAMILIES["mlp"].recipe(3, make_model=wide_model).train(run_dir=tmp_path, engine="inline")
    monkeypatch.setitem(WIDTH, "hidden", 17)
    recipe = FAMILIES["mlp"].recipe(3, make_model=wide_model)
    with pytest.raises(phalanx.UsageError, match=r"\(its global WIDTH\)\['hidden'\] is 17 here, and 16 there"):
        recipe.train(run_dir=tmp_path, engine="inline")
    shapes = r"0\.weight is float32\[16, 5\] .*float32\[17, 5\] here"
    with pytest.warns(UserWarning, match="WIDTH"), pytest.raises(phalanx.PhalanxError, match=shapes):
        recipe.train(run_dir=tmp_path, engine="inline", resume="anyway")


def test_another_recipe_goes_on_anyway(tmp_path):
    """resume="anyway" goes on with another recipe: a warning and the log say what differs, and then it is its own."""
    give = functools.partial(FAMILIES["mlp"].recipe, 3, steps=4)
    options = {"run_dir": tmp_path, "engine": "inline"}
    give(steps=2, loss_fn=scaled(1.0)).train(**options)
    with pytest.warns(UserWarning, match=r"going on with another recipe .*loss_fn \(its variable factor\) is 2.0 here"):
        result = give(loss_fn=scaled(2.0)).train(resume="anyway", **options)
    assert result.resumed_from == 2
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [resumed] = [event for event in events if event["event"] == "resume"]
    assert resumed["differs"] == [
        "replica 0 of step 2 comes to another loss, another gradient than before",
        "loss_fn (its variable factor) is 2.0 here, and 1.0 there",
    ]
    assert result.digest not in {give(loss_fn=scaled(factor)).train(engine="inline").digest for factor in (1.0, 2.0)}
    give(steps=5, loss_fn=scaled(2.0)).train(**options)
    with pytest.raises(phalanx.UsageError, match=r"another recipe: .*loss_fn"):
        give(steps=5, loss_fn=scaled(1.0)).train(**options)


def test_anyway_where_nothing_differs(tmp_path):
    """resume="anyway" is resume=True where the recipe is the same: no warning, nothing in the log, the same digest."""
    norm_recipe(2).train(run_dir=tmp_path, engine="inline", resume="anyway")
    result = norm_recipe(4).train(run_dir=tmp_path, engine="inline", resume="anyway")
    assert_same(result, norm_recipe(4).train(engine="inline"))
    assert "differs" not in (tmp_path / "events.jsonl").read_text()
    for wrong in ("always", 1, None):
        with pytest.raises(phalanx.UsageError, match=r"resume is .*'anyway'"):
            norm_recipe(4).train(run_dir=tmp_path, engine="inline", resume=wrong)


@pytest.mark.parametrize(
    "recipe", [{}, {"seed": 0}, {"format": 5}, {"format": 4}, {"format": 4, "values": 1, "hints": [], "versions": {}}]
)
def test_a_description_that_is_none(tmp_path, recipe):
    """What tells of a recipe in a later format, or tells of none, is refused and changes nothing."""
    norm_recipe(2).train(run_dir=tmp_path, engine="inline", keep_snapshots=1)
    sealed(folder_of(tmp_path, 2), lambda state: state | {"recipe": recipe})
    with pytest.raises(phalanx.SnapshotError, match="its recipe"):
        norm_recipe(4).train(run_dir=tmp_path, engine="inline")
    assert steps_in(tmp_path) == [2]


@pytest.mark.long
def test_another_environment_is_told(tmp_path, monkeypatch):
    """With another version of torch, a warning says at the caller's line that bits may differ, and in what."""
    from phalanx.frameworks import registry

    norm_recipe(2).train(run_dir=tmp_path, engine="inline")
    found = registry.recorded_environment()
    assert found == json.loads(json.dumps(found))
    name = next(iter(found))
    monkeypatch.setattr("phalanx.checkpoint.resume.recorded_environment", lambda: found | {name: "another"})
    with pytest.warns(UserWarning, match=f"bits may differ .*{name} is another, was ") as told:
        result = norm_recipe(4).train(run_dir=tmp_path, engine="inline")
    assert [item.filename for item in told] == [__file__]
    assert_same(result, norm_recipe(4).train(engine="inline"))


def test_anyway_after_a_kill(tmp_path):
    """resume="anyway" goes on where the first step differs; a warning and the log say in what."""
    options = {"run_dir": tmp_path, "engine": "inline", "snapshot_every": 2}
    job().train(**options)
    killed(tmp_path)
    with pytest.warns(UserWarning, match="going on with another recipe .*step 2 comes to another loss"):
        result = job(loss_fn=scaled(2.0)).train(resume="anyway", **options)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [resumed] = [event for event in events if event["event"] == "resume"]
    assert "step 2 comes to another loss" in resumed["differs"][0]
    assert phalanx.diff(tmp_path, tmp_path) is None
    assert result.steps == 4


def test_nothing_to_compare_with(tmp_path):
    """A run that was killed before it did the step after its snapshot has no values: what reads differently is told."""
    options = {"run_dir": tmp_path, "engine": "inline"}
    job(steps=2).train(**options)
    (tmp_path / NEXT).unlink()
    with pytest.warns(UserWarning, match="loss_fn .* differently.*nothing that it computes can be compared"):
        job(steps=3, loss_fn=scaled(1.0)).train(**options)


@pytest.mark.parametrize("where", ["processor", "library", "device"])
def test_elsewhere_values_are_not_compared(tmp_path, monkeypatch, where):
    """With another processor, library or device a warning tells of it, and values that differ refuse nothing."""
    options = {"run_dir": tmp_path, "engine": "inline"}
    job(steps=2).train(**options)
    if where == "processor":
        from phalanx.frameworks import registry

        found = registry.recorded_environment()
        monkeypatch.setattr("phalanx.checkpoint.resume.recorded_environment", lambda: found | {"cpu": "ABACUS"})
    elif where == "library":
        monkeypatch.setattr("phalanx.definition.described.version", lambda name: "0.0")
    else:
        from phalanx.frameworks.torch import adapter

        captured = adapter.captured
        monkeypatch.setattr(adapter, "captured", functools.partial(on_another_device, captured))
    said = {"processor": "cpu is ABACUS", "library": "torch is 0.0 here", "device": "device is mps, was cpu"}[where]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job(steps=3, loss_fn=scaled(2.0)).train(**options)
    first, second = (str(item.message) for item in told)
    assert said in first
    assert "what steps come to is not compared" in first
    assert "loss_fn reads differently; nothing that it computes can be compared" in second


def on_another_device(captured, *arguments, **options):
    found = captured(*arguments, **options)
    return dataclasses.replace(found, facts={**found.facts, "device": "mps"})


def test_nondeterministic_runs_are_not_compared(tmp_path):
    """Where replicas may differ from call to call, nothing is kept, and nothing compared."""
    options = {"run_dir": tmp_path, "engine": "inline", "nondeterministic": "allow"}
    job(steps=2).train(**options)
    assert not (tmp_path / NEXT).exists()
    with pytest.warns(UserWarning, match="nothing that it computes can be compared"):
        job(steps=3, loss_fn=scaled(2.0)).train(**options)


def test_options_of_callbacks_and_evaluations_are_told(tmp_path):
    """Another patience, or another pace of evaluations, goes on with a warning that names it."""

    def train(steps, patience=3, every=1):
        evaluation = phalanx.Evaluation({"accuracy": accuracy}, FEATURES, every_steps=every)
        callbacks = [phalanx.callbacks.EarlyStopping("accuracy", patience=patience)]
        job(steps=steps).train(run_dir=tmp_path, engine="inline", evaluation=evaluation, callbacks=callbacks)

    train(1)
    with pytest.warns(UserWarning, match=r"EarlyStopping.patience is 5 here, and 3 there"):
        train(2, patience=5)
    with pytest.warns(UserWarning, match=r"Evaluation.every_steps is 2 here, and 1 there"):
        train(3, patience=5, every=2)
    train(4, patience=5, every=2)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_functions_of_evaluations_are_told(tmp_path):
    """An evaluation with another forward_fn, or none any more, goes on with a warning that names it."""

    def train(steps, forward_fn):
        evaluation = phalanx.Evaluation({"accuracy": accuracy}, FEATURES, every_steps=1, forward_fn=forward_fn)
        job(steps=steps).train(run_dir=tmp_path, engine="inline", evaluation=evaluation)

    train(1, lambda model, batch: model(batch[0]))
    for steps, other in ((2, lambda model, batch: 2 * model(batch[0])), (3, None)):
        with pytest.warns(UserWarning, match=r"Evaluation.forward_fn reads differently"):
            train(steps, other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(4, None)


def test_brought_batches(tmp_path):
    """The same batch with another loss is refused, another batch is told of, and a run that stopped kept nothing."""
    batches = [(FEATURES[0][n : n + 6], FEATURES[1][n : n + 6]) for n in range(5)]

    def train(steps, loss_fn=F.cross_entropy, shift=0):
        recipe = phalanx.Recipe(FAMILIES["mlp"].make_model, None, loss_fn, replicas=3)
        with recipe.start(run_dir=tmp_path, engine="inline", snapshot_every=2) as run:
            while run.steps < steps:
                run.step(batches[run.steps + shift])

    train(4)
    assert not (tmp_path / NEXT).exists()
    shutil.rmtree(folder_of(tmp_path, 4))
    with pytest.raises(phalanx.UsageError, match="step 2 comes to another loss"):
        train(4, loss_fn=scaled(2.0))
    with pytest.warns(UserWarning, match="the batch of step 2 is another than before"):
        train(4, shift=1)


def test_streams(tmp_path):
    """A stream's first step is compared with its link; one that stopped kept nothing, and is told of."""

    def train(steps, loss_fn=F.cross_entropy):
        data = phalanx.Stream(lambda: iter(list(zip(*FEATURES, strict=True))))
        job(steps=steps, data=data, loss_fn=loss_fn).train(run_dir=tmp_path, engine="inline", snapshot_every=2)

    train(4)
    assert not (tmp_path / NEXT).exists()
    with pytest.warns(UserWarning, match="nothing that it computes can be compared"):
        train(5, loss_fn=scaled(2.0))
    for path in list((tmp_path / "snapshots").iterdir()):
        if path != folder_of(tmp_path, 4):
            shutil.rmtree(path)
    with pytest.raises(phalanx.UsageError, match="step 4 comes to another loss"):
        train(5)


@pytest.mark.parametrize("stopped", [True, False])
def test_phases_are_compared(tmp_path, stopped):
    """Of steps with phases the first one of the next step is compared, or all of them with the link."""
    options = {"run_dir": tmp_path, "engine": "inline", "snapshot_every": 2}
    recipe = with_phases("actor_critic", steps=2 if stopped else 4)
    recipe.train(**options)
    if not stopped:
        killed(tmp_path)
    first = recipe.phases[0]
    twice = dataclasses.replace(first, loss_fn=lambda output, target: 2 * first.loss_fn(output, target))
    with pytest.raises(phalanx.UsageError, match="step 2 comes to another"):
        dataclasses.replace(recipe, steps=4, phases=[twice, *recipe.phases[1:]]).train(**options)


class Writing(torch.nn.Module):
    """A lone replica may write its parameters, as in a plain loop."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)

    def forward(self, x):
        with torch.no_grad():
            self.layer.bias.mul_(0.5)
        return self.layer(x)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_a_replica_that_writes_parameters_is_undone(tmp_path, engine):
    """What looks ahead changes no state: the digest is that without a directory, and that of a run in one go."""
    recipe = phalanx.Recipe(Writing, FEATURES, F.cross_entropy, replicas=1, batch_size=6, steps=3)
    whole = dataclasses.replace(recipe, steps=5).train(engine="inline")
    result = recipe.train(run_dir=tmp_path, engine=engine, workers=1)
    assert_same(result, recipe.train(engine="inline"))
    assert (tmp_path / NEXT).exists()
    assert_same(dataclasses.replace(recipe, steps=5).train(run_dir=tmp_path, engine=engine, workers=1), whole)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 2}', '{"step": 2, "link": 0, "replica": 1}'])
def test_what_was_kept_may_be_damaged(tmp_path, text):
    """What no run has kept is none, and the run goes on."""
    options = {"run_dir": tmp_path, "engine": "inline"}
    job(steps=2).train(**options)
    (tmp_path / NEXT).write_text(text)
    assert_same(job(steps=4).train(**options), job(steps=4).train(engine="inline"))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool", "complex64", "bfloat16", "float16"])
def test_every_byte_of_an_array_counts(kind, dtype):
    """Up to the stated size arrays are compared whole, negative zero and NaN too; of every dtype."""
    if kind == "numpy" and dtype == "bfloat16":
        pytest.skip("numpy has none")
    array = torch.zeros(40, 30, dtype=getattr(torch, dtype))
    told = {summary_of(array if kind == "torch" else array.numpy())}
    assert told == {summary_of(array.clone())}
    for place in [(0, 0), (17, 3), (39, 29)]:
        other = array.clone()
        other[place] = True
        told.add(summary_of(other if kind == "torch" else other.numpy()))
    assert len(told) == 4


def summary_of(array):
    return tuple(array_summary(array))


@pytest.mark.parametrize("wide", [False, True])
def test_large_arrays_are_sampled(monkeypatch, wide):
    """Beyond the stated size rows are sampled, evenly, the first and the last too; the text says so."""
    monkeypatch.setattr(plain, "WHOLE_BYTES", 1 << 12)
    monkeypatch.setattr(plain, "SAMPLED_BYTES", 1 << 10)
    array = torch.zeros((9, 4096) if wide else (4096, 3))
    assert summary_of(array)[0].endswith("sampled")
    told = {summary_of(array)}
    for row in (0, -1):
        other = array.clone()
        other[row] = 1
        told.add(summary_of(other))
    assert len(told) == 3
    assert not summary_of(array[:1, :9])[0].endswith("sampled")


def test_long_lists_are_sampled(monkeypatch):
    """Beyond the stated size items of a list are sampled, the first and the last too."""
    monkeypatch.setattr(plain, "LIST_BYTES", 1 << 12)
    monkeypatch.setattr(plain, "SAMPLED_ROWS", 16)
    samples = [(torch.zeros(4), number) for number in range(1000)]
    others = [[(torch.ones(4), 0), *samples[1:]], [*samples[:-1], 1]]
    told = [container_summary(given) for given in (samples, *others)]
    assert "sampled" in told[0][0]
    assert len(set(map(tuple, told))) == 3


@pytest.mark.parametrize("theirs", [True, False])
def test_packages_of_another_environment_on_the_path_are_installed(monkeypatch, theirs):
    """Code in any site-packages goes by name and version, also where this interpreter's own are elsewhere."""
    folder = "/opt/base/lib/python3.11/site-packages" if theirs else "/home/me/project"
    module = types.ModuleType("abcdef")
    module.__file__ = f"{folder}/abcdef/core.py"
    monkeypatch.setitem(sys.modules, "abcdef", module)
    assert installed("abcdef") == ("abcdef" if theirs else None)


class Rude:
    """Raises whatever it is asked."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __reduce_ex__(self, protocol):
        raise ValueError("no")

    def __call__(self, output, target):
        return F.cross_entropy(output, target)


def test_odd_objects_are_described():
    """What cannot be looked into, holds itself or lies deep is described all the same."""
    circle = [Rude()]
    circle.append(circle)
    deep = []
    for _ in range(300):
        deep = [deep]
    loss = functools.partial(lambda kept, *args: F.cross_entropy(*args), [circle, deep, torch.empty(2, device="meta")])
    assert described(job(loss_fn=loss)) == described(job(loss_fn=loss))


def test_a_path_is_what_it_names():
    """Not what it keeps of what was asked of it; another one is told."""

    def read(path):
        return described(job(forward_fn=lambda model, batch: (model(batch[0]), path)))

    used = pathlib.Path("data/a")
    hash(str(used))
    one, same, other = map(read, (used, pathlib.Path("data", "a"), pathlib.Path("data/b")))
    assert compare(one, same).hints == []
    assert compare(one, other).hints == ["forward_fn (its variable path) as text is 'data/a' here, and 'data/b' there"]


def test_a_field_that_came_later_is_as_by_default():
    """Of a recipe and of each phase; what is not the default is told, and so is a field that is only there."""
    for recipe, name in ((job(), "loss_over"), (with_phases(), "phases[1].loss_over")):
        now, before = described(recipe), described(recipe)
        del before["values"][name]
        assert compare(now, before).differs == compare(before, now).differs == []
        now["values"][name] = "'batch'"
        assert compare(now, before).differs == [f"{name} is 'batch' here, and 'share' there"]
    unknown = described(job())
    unknown["values"]["later"] = "1"
    assert compare(described(job()), unknown).differs == ["later is absent here, and 1 there"]


def test_descriptions_are_small():
    """The usual recipe takes some KB in each snapshot, a model of hundreds of modules not much more."""
    assert len(json.dumps(described(norm_recipe(2)))) < 4000
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(300)])
    assert len(json.dumps(described(norm_recipe(2, make_model=model)))) < 16_000


@pytest.mark.long
def test_every_family_is_told_from_all_others():
    """The recipes of these tests read differently, each from all others, and the same as themselves."""
    found = [described(family.recipe(3)) for family in FAMILIES.values()]
    assert len({json.dumps(one) for one in found}) == len(FAMILIES)
    again = [described(family.recipe(3)) for family in FAMILIES.values()]
    for one, other in zip(found, again, strict=True):
        told = compare(one, json.loads(json.dumps(other)))
        assert (told.differs, told.hints, told.versions) == ([], [], [])


class Counting(torch.nn.Module):
    """Has an attribute of the name of a global, which it never reads."""

    def __init__(self):
        super().__init__()
        self.counter = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.counter(x)


counter = [0]


def test_an_attribute_is_no_global():
    """A global that code does not read is no hint, though an attribute has its name; one that it reads is."""
    assert "loss_fn (its global counter)" in dict(reachable({"loss_fn": lambda x: counter[0] * x}))
    assert not [path for path, _ in reachable({"make_model": Counting}) if "global counter" in path]
