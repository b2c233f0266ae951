"""Weights by the names that load_state_dict takes: exported, and begun from; states that are saved again."""

import functools
import itertools

import pytest
import torch

import phalanx
from phalanx.callbacks import SaveBest
from phalanx.checkpoint.named import state_dict_of
from phalanx.checkpoint.resume import read_any
from phalanx.checkpoint.tensors import write_file
from phalanx.cli.app import export_weights
from tests.families import ADAMW, FAMILIES, SGD, conv_norm
from tests.sampling import sample
from tests.state.runs import accuracy, assert_same, engine_of, killed, norm_recipe, sealed

safetensors = pytest.importorskip("safetensors.torch")
TIED, KEPT, COUNTED = "head.weight", "scale", "positions"


class Tied(torch.nn.Module):
    """A tied weight, a buffer, and a buffer that is in no state_dict."""

    def __init__(self, kept=2):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer(COUNTED, torch.arange(3), persistent=False)
        self.register_buffer(KEPT, torch.ones(kept))

    def forward(self, x):
        return self.head(self.embedding(x)) * self.scale[0]


X = torch.arange(32) % 7
TOKENS = phalanx.Evaluation(accuracy, (X, X), every_steps=2)


def tied_recipe(make_model=Tied, **changes):
    return phalanx.Recipe(
        make_model, (X, X), torch.nn.functional.cross_entropy, **({"steps": 4, "lr": 0.1, "batch_size": 8} | changes)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run in a directory, with its best weights, and its result."""
    folder = tmp_path_factory.mktemp("tied")
    options = {"callbacks": [SaveBest("accuracy")], "evaluation": TOKENS, "engine": "inline"}
    return folder / "run", tied_recipe().train(run_dir=folder / "run", **options)


@pytest.mark.parametrize("best", [False, True])
def test_an_export_is_what_the_result_saves(trained, tmp_path, capsys, best):
    """Tied names are there, buffers that are not persistent are not: a new model loads it, as it does result.save's."""
    run, result = trained
    export_weights(str(run), str(tmp_path / "exported.safetensors"), best=best)
    exported = safetensors.load_file(tmp_path / "exported.safetensors")
    result.save(tmp_path / "saved.safetensors")
    wanted = result.best.weights if best else safetensors.load_file(tmp_path / "saved.safetensors")
    assert set(exported) == {"embedding.weight", TIED, KEPT}
    assert all(torch.equal(exported[name], value) for name, value in wanted.items())
    Tied().load_state_dict(exported)
    assert "does not say" not in capsys.readouterr().out


def test_an_export_of_a_snapshot_without_names(trained, tmp_path, capsys):
    """A snapshot that does not say what a state_dict has is exported with its own names, and a sentence says so."""
    with tied_recipe().start(engine="inline") as run:
        run.save(tmp_path / "old")
    sealed(tmp_path / "old", lambda state: state["facts"].pop("state_dict") and None)
    export_weights(str(tmp_path / "old"), str(tmp_path / "exported.safetensors"))
    assert "does not say" in capsys.readouterr().out
    exported = safetensors.load_file(tmp_path / "exported.safetensors")
    assert set(exported) == {"embedding.weight", KEPT, COUNTED}
    with pytest.raises(phalanx.UsageError, match=r"no best weights.*SaveBest"):
        export_weights(str(tmp_path / "old"), str(tmp_path / "exported.safetensors"), best=True)


def test_an_export_of_the_best_needs_its_file(trained, tmp_path):
    """A snapshot alone has no best weights beside it, which is said with the way out."""
    newest = max((trained[0] / "snapshots").iterdir())
    with pytest.raises(phalanx.UsageError, match="give the directory of a run, not a snapshot"):
        export_weights(str(newest), str(tmp_path / "exported.safetensors"), best=True)


def test_names_that_lead_nowhere(tmp_path):
    """A snapshot whose names are of no weights is damaged."""
    with tied_recipe().start(engine="inline") as run:
        run.save(tmp_path / "odd")
    sealed(tmp_path / "odd", lambda state: state["facts"]["state_dict"].append([TIED, "nothing"]))
    with pytest.raises(phalanx.SnapshotError, match="the names of weights"):
        state_dict_of(read_any(tmp_path / "odd"))


def refuses_to_be_saved(module, prefix, keep_vars):
    raise RuntimeError("ask me not")


def test_a_model_without_a_state_dict(tmp_path):
    """Hooks that raise in state_dict end no run: the snapshot says nothing of names."""

    def make_model():
        model = Tied()
        model.register_state_dict_pre_hook(refuses_to_be_saved)
        return model

    tied_recipe(make_model, steps=1).train(run_dir=tmp_path / "run", engine="inline")
    assert state_dict_of(read_any(tmp_path / "run")) is None


def sources(trained, tmp_path):
    """What a run may begin from, all with the same weights."""
    run, result = trained
    state = result.model.state_dict()
    result.save(tmp_path / "saved.safetensors")
    untied = {name: value for name, value in state.items() if name != TIED}
    return {
        "run_dir": run,
        "file": tmp_path / "saved.safetensors",
        "state dict": state,
        "arrays": {name: value.numpy() for name, value in state.items()},
        "one of the tied": untied,
        "the other": {name: value for name, value in state.items() if name != "embedding.weight"},
        "what load gives": phalanx.load(run),
    }


def test_a_run_begins_from_any_of_them(trained, tmp_path):
    """A file, a dict and a snapshot of the same weights give the same bits, as training that model does."""
    recipe = tied_recipe(seed=5)
    digests = {
        recipe.train(warm_start=source, engine="inline").digest for source in sources(trained, tmp_path).values()
    }
    wanted = tied_recipe(trained[1].model, seed=5).train(engine="inline")
    assert digests == {wanted.digest}
    assert recipe.train(engine="inline").digest != wanted.digest


def test_a_run_begins_from_the_best(trained):
    """result.best is begun from; its weights are others than the last ones."""
    recipe = tied_recipe(seed=5)
    one, other = (recipe.train(warm_start=source, engine="inline") for source in (trained[1].best, trained[0]))
    assert one.digest == recipe.train(warm_start=trained[1].best.weights, engine="inline").digest
    assert (one.digest == other.digest) == (trained[1].best.steps == trained[1].steps)


@pytest.mark.long
def test_it_is_the_same_for_two_workers_and_resumed(trained, tmp_path):
    """Workers, and a run that was interrupted, end in the same bits; other weights end in others."""
    source = sources(trained, tmp_path)["file"]
    wanted = tied_recipe(seed=5, steps=6).train(warm_start=source, engine="inline")
    assert_same(tied_recipe(seed=5, steps=6).train(warm_start=source, **engine_of(2)), wanted)
    options = {"warm_start": source, "run_dir": tmp_path / "run", "engine": "inline"}
    tied_recipe(seed=5, steps=3).train(**options)
    assert_same(tied_recipe(seed=5, steps=6).train(**options), wanted)
    other = {name: value + 1 for name, value in safetensors.load_file(source).items()}
    assert tied_recipe(seed=5, steps=6).train(warm_start=other, engine="inline").digest != wanted.digest


MISFITS = {
    "another name": (lambda state: {**state, "odd": torch.ones(1)}, "not in the model: odd"),
    "one is missing": (lambda state: {name: state[name] for name in (TIED,)}, f"missing: {KEPT}"),
    "another shape": (lambda state: {**state, KEPT: torch.ones(3)}, r"scale is float32\[3\] there, and float32\[2\]"),
    "another dtype": (lambda state: {**state, KEPT: torch.ones(2).double()}, r"scale is float64\[2\] there"),
    "tied ones differ": (lambda state: {**state, TIED: torch.ones(7, 4)}, "one weight of the model"),
    "nothing": (lambda state: {}, "missing: embedding.weight, scale"),
    "no tensor": (lambda state: {**state, "odd": [1]}, r"warm_start has \[1\] under 'odd'"),
    "a number": (lambda state: 5, "warm_start is 5, which is no path; give a snapshot"),
    "a pickle": (lambda state: "model.pt", "may be a pickle.*weights_only=True"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit(trained, case):
    """What differs is named, and the message has the way out; nothing is trained."""
    make, words = MISFITS[case]
    with pytest.raises(phalanx.UsageError, match=words):
        tied_recipe().train(warm_start=make(trained[1].model.state_dict()), engine="inline")


def test_a_snapshot_that_does_not_fit(trained):
    """A snapshot of another model is refused in the same words as a file or a dict."""
    with pytest.raises(
        phalanx.UsageError, match="does not fit the model: missing: weight, bias; not in the model: emb"
    ):
        tied_recipe(lambda: torch.nn.Linear(2, 2)).train(warm_start=trained[0], engine="inline")


def test_a_file_that_is_cut_off(trained, tmp_path):
    """A damaged file is refused with its name."""
    path = write_file(tmp_path / "cut.safetensors", {})
    path.write_bytes(path.read_bytes()[:5])
    with pytest.raises(phalanx.SnapshotError, match=r"cut.safetensors cannot be used: it is cut off"):
        tied_recipe().train(warm_start=path, engine="inline")


def test_replace_makes_a_copy():
    """Other fields make another recipe, which ends where one written so does; unknown ones are refused as by Recipe."""
    recipe = norm_recipe(2)
    other = recipe.replace(seed=3)
    assert (recipe.seed, other.seed) == (0, 3)
    assert_same(other.train(engine="inline"), norm_recipe(2, seed=3).train(engine="inline"))
    assert other.train(engine="inline").digest != recipe.train(engine="inline").digest
    with pytest.raises(phalanx.UsageError, match="workers is not an argument of Recipe, but an option"):
        recipe.replace(workers=2)
    with pytest.raises(phalanx.UsageError, match="give exactly one"):
        recipe.replace(epochs=1)


class SavesEach:
    """Saves the state after each step."""

    def __init__(self, folder):
        self.folder = folder

    def begin(self, run):
        self.run = run

    def step(self, report):
        self.run.save(self.folder / str(report.step))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_step_that_is_done_again_is_saved_again(tmp_path, workers):
    """A callback that saves each step goes on after a kill: the same state is no error; another one there is."""
    options = {"run_dir": tmp_path / "run", "snapshot_every": 2, **engine_of(workers)}
    callbacks = [SavesEach(tmp_path / "every")]
    wanted = norm_recipe(4).train(callbacks=callbacks, **options)
    killed(tmp_path / "run")
    again = norm_recipe(4).train(callbacks=callbacks, **options)
    assert again.resumed_from == 2
    assert_same(again, wanted)
    with pytest.raises(phalanx.UsageError, match="exists already"):
        norm_recipe(1, seed=9).train(callbacks=callbacks, engine="inline")


def test_a_damaged_snapshot_is_not_the_same(tmp_path):
    """What cannot be read is not written over either."""
    with norm_recipe(1).start(engine="inline") as run:
        run.save(tmp_path / "saved")
        run.save(tmp_path / "saved")
        (tmp_path / "saved" / "state.json").write_text("{}")
        with pytest.raises(phalanx.UsageError, match="exists already"):
            run.save(tmp_path / "saved")


def test_save_and_load(tmp_path):
    """What run.save writes has the result's digest, its weights and its losses; so does the newest of a run_dir."""
    with norm_recipe(6).start(engine="inline", run_dir=tmp_path / "run", snapshot_every=5) as run:
        for _ in range(4):
            next(run)
        run.save(tmp_path / "deep" / "saved")
        result = run.result()
        run.finish()
    loaded = phalanx.load(tmp_path / "deep" / "saved")
    assert (loaded.digest, loaded.step, loaded.loss_history) == (result.digest, 4, result.loss_history)
    assert loaded.samples == result.samples
    weights = dict(result.model.named_parameters()) | dict(result.model.named_buffers())
    assert list(loaded.weights) == list(weights)
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in weights.items())
    model = conv_norm()
    model.load_state_dict(loaded.weights)
    assert phalanx.digest(model) == phalanx.digest(result.model)
    assert phalanx.load(tmp_path / "run").step == 6


def test_saved_twice(tmp_path):
    """What exists is not written over; a closed run is not saved."""
    with norm_recipe(2).start(engine="inline") as run:
        run.save(tmp_path / "saved")
        before = (tmp_path / "saved" / "manifest.json").read_bytes()
        next(run)
        with pytest.raises(phalanx.UsageError, match="exists already"):
            run.save(tmp_path / "saved")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        with pytest.raises(phalanx.UsageError, match="exists already"):
            run.save(tmp_path / "dangling")
    assert (tmp_path / "saved" / "manifest.json").read_bytes() == before
    with pytest.raises(phalanx.UsageError, match="closed"):
        run.save(tmp_path / "late")


@pytest.mark.parametrize(
    ("name", "workers"), sample("warm starts", itertools.product(["conv_norm", "odd_tensors", "counting"], [1, 2]), 1)
)
def test_warm_start(tmp_path, name, workers):
    """Training from saved weights is training the model that has them, with new optimizers and from step 0."""
    give = functools.partial(FAMILIES[name].recipe, 4, optimizer=ADAMW if name == "conv_norm" else SGD)
    with give(steps=3).start(**engine_of(workers)) as run:
        run.finish()
        run.save(tmp_path / "saved")
        trained = run.result().model
    warm = give(steps=4, seed=9).train(warm_start=tmp_path / "saved", **engine_of(workers))
    assert_same(warm, give(steps=4, seed=9, make_model=trained).train(engine="inline"))
    assert warm.digest != give(steps=4, seed=9).train(engine="inline").digest


def test_warm_start_from_a_run_and_resumed(tmp_path):
    """A run_dir may be begun from too; a run that goes on takes its own state, whatever there is to begin from."""
    norm_recipe(3).train(run_dir=tmp_path / "first", engine="inline")
    options = {"warm_start": tmp_path / "first", "engine": "inline"}
    alone = norm_recipe(6, seed=9).train(**options)
    norm_recipe(2, seed=9).train(run_dir=tmp_path / "second", **options)
    assert_same(norm_recipe(6, seed=9).train(run_dir=tmp_path / "second", **options), alone)


@pytest.mark.parametrize("place", ["nowhere", "file", "empty", "."])
def test_nothing_to_begin_from(tmp_path, place):
    """A path without a snapshot is refused, by warm_start and by load: it is named, and not as a damaged one."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty" / "snapshots").mkdir(parents=True)
    told = "has no snapshot$" if place == "empty" else "is no snapshot and no directory of a run"
    with pytest.raises(phalanx.SnapshotError, match=rf"{place}' {told}" if place != "." else told):
        phalanx.load(tmp_path / place)
    with pytest.raises(phalanx.SnapshotError, match=told):
        norm_recipe(2).train(warm_start=tmp_path / place, engine="inline")


@pytest.mark.parametrize("name", ["conv_norm", "odd_tensors", "counting", "bfloat16_model", "float64", "mixed_dtypes"])
def test_others_can_read_the_files(tmp_path, name):
    """The files are safetensors as its own library reads them, weights and optimizer state alike."""
    with FAMILIES[name].recipe(3, steps=2).start(engine="inline") as run:
        run.finish()
        run.save(tmp_path / "saved")
        model = run.result().model
    read = safetensors.load_file(tmp_path / "saved" / "weights.safetensors")
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    assert set(read) == set(weights)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in weights.items())
    training = safetensors.load_file(tmp_path / "saved" / "training.safetensors")
    assert training["loss_history"].tolist() == run.result().loss_history
