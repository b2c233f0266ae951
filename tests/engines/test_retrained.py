"""Parameters that a run freezes and thaws between steps: the same bits in every engine, after kills and resumes."""

import functools
import json
import os
import shutil
import signal

import pytest
import torch
from torch import nn

import phalanx
from phalanx.callbacks import Thaw
from phalanx.checkpoint.chained import Chained
from phalanx.proof.verify import certify, verify
from tests.engines.moving import hurry, moves, turn_back
from tests.hosts.worlds import world
from tests.state.runs import assert_same, engine_of

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
ENCODER, AT = "encoder.*", 8  # thawed before this step, which begins epoch 2


class Net(nn.Module):
    """An encoder with BatchNorm, which may be made frozen, and a head."""

    def __init__(self, frozen=False):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)
        self.encoder.requires_grad_(not frozen)

    def forward(self, x):
        return self.head(self.encoder(x).relu())


def over(make_model=Net, **changes):
    given = {"replicas": 3, "batch_size": 12, "epochs": 4, "loss_fn": nn.functional.cross_entropy}
    return phalanx.Recipe(make_model, (X, Y), **(given | changes))


def finished(run, after=lambda run: None):
    """The rest of a run: the loop asks how many steps are done before each step."""
    while run.steps < 16:
        if run.steps == 0:
            run.freeze(ENCODER)
        if run.steps == AT:
            run.thaw(ENCODER)
        run.step()
        after(run)
    return run.result()


@functools.cache
def expected():
    """What the inline engine comes to."""
    with over().start(engine="inline") as run:
        return finished(run)


def test_what_is_frozen_stays_and_what_is_thawed_moves():
    """Until it is thawed the encoder is what it was made as; then both parts are trained."""
    seen = []
    with over().start(engine="inline") as run:
        before = {name: value.clone() for name, value in run.params.items()}
        finished(run, lambda run: seen.append(moved(before, run.params)))
    assert seen[:AT] == [{"head"}] * AT
    assert seen[AT:] == [{"head", "encoder"}] * (16 - AT)


def moved(before, after):
    return {name.partition(".")[0] for name, value in after.items() if not torch.equal(value, before[name])}


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_end_in_the_same_bits(workers):
    """Any number of workers ends in the bits of one process, and not in those of a run that freezes nothing."""
    with over().start(workers=workers) as run:
        assert_same(finished(run), expected())
    assert expected().digest != over().train(engine="inline").digest


@pytest.mark.long
def test_a_callback_and_make_model_can_do_the_same():
    """``Thaw`` and a model that is made frozen come to the same bits; thawing a step later does not."""
    assert_same(over().train(workers=2, callbacks=[Thaw(ENCODER, epoch=2)]), expected())

    def thawed(at, workers):
        with over(functools.partial(Net, frozen=True)).start(**engine_of(workers)) as run:
            for report in run:
                if report.step == at - 1:
                    run.thaw(ENCODER)
            return run.result()

    assert thawed(AT, 1).digest == thawed(AT, 2).digest == expected().digest
    assert thawed(AT + 1, 1).digest == thawed(AT + 1, 2).digest != expected().digest


@pytest.mark.long
@pytest.mark.parametrize("at", [1, AT, AT + 1, 12])
def test_workers_that_are_killed(at):
    """A worker that is killed, at the boundary where parameters are thawed too, is replaced by one that has it."""
    with over().start(workers=2) as run:
        result = finished(run, lambda run: os.kill(run.worker_pids[0], signal.SIGKILL) if run.steps == at else None)
        assert run.incidents
    assert_same(result, expected())


@pytest.mark.long
@pytest.mark.parametrize("stop", [3, AT, AT + 1])
def test_resumed_and_computed_again(stop, tmp_path):
    """A run that goes on has what was frozen, and its steps are verified and replayed with it."""
    callbacks = [Thaw(ENCODER, epoch=2)]
    with over().start(engine="inline", run_dir=tmp_path, snapshot_every=3, callbacks=callbacks) as run:
        next(report for report in run if report.step + 1 == stop)
    assert_same(over().train(workers=2, run_dir=tmp_path, callbacks=[Thaw(ENCODER, epoch=2)]), expected())
    assert verify(over(), tmp_path, progress=False).status == 0
    heads = {"head.weight", "head.bias"}
    assert phalanx.replay(over(), tmp_path, step=AT - 1, replica=1).gradients.keys() == heads
    assert phalanx.replay(over(), tmp_path, step=AT, replica=1).gradients.keys() > heads


def test_a_run_that_goes_on_from_its_beginning(tmp_path):
    """As after a loss of power before a later snapshot: what was frozen at first is noted once more, for verify."""
    with over().start(engine="inline", run_dir=tmp_path / "a", callbacks=[Thaw(ENCODER, epoch=2)]) as run:
        run.step()
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    again = over().train(engine="inline", run_dir=tmp_path / "b", callbacks=[Thaw(ENCODER, epoch=2)])
    assert (again.resumed_from, again.digest) == (0, expected().digest)
    assert verify(over(), tmp_path / "b", progress=False).status == 0


@pytest.mark.filterwarnings("ignore:the recipe may not be")
@pytest.mark.parametrize("stop", [3, AT, AT + 1])
@pytest.mark.parametrize("before", [[], [Thaw(ENCODER, epoch=3)], [Thaw(ENCODER, epoch=1)], [Thaw("*.0.*", epoch=2)]])
def test_a_resume_with_another_thaw_says_so_and_keeps_it(before, stop, tmp_path):
    """Names are frozen until the epoch of the run that goes on, also if it was another before, or none."""
    with over().start(engine="inline", run_dir=tmp_path, snapshot_every=1, callbacks=before) as run:
        next(report for report in run if report.step + 1 == stop)
    with pytest.warns(UserWarning, match="is to hold from here on|begins anew there"):
        run = over().start(engine="inline", run_dir=tmp_path, callbacks=[Thaw(ENCODER, epoch=2)])
    with run:
        for step in range(stop, 16):
            earlier = {name: value.clone() for name, value in run.params.items()}
            run.step()
            assert ("encoder" in moved(earlier, run.params)) == (step >= AT)


@pytest.mark.long
def test_a_loop_that_stops_where_it_thaws_goes_on_there(tmp_path):
    """What was thawed after the snapshot of a step is in the one that the end writes."""
    with over().start(engine="inline", run_dir=tmp_path, snapshot_every=1) as run:
        run.freeze(ENCODER)
        for report in run:
            if report.step + 1 == AT:
                run.thaw(ENCODER)
                break
    assert_same(over().train(workers=2, run_dir=tmp_path), expected())
    assert [(each["event"], each["step"]) for each in events(tmp_path)] == [("freeze", 0), ("thaw", AT)]
    assert verify(over(), tmp_path, progress=False).status == 0


def test_a_certificate_does_not_have_them(tmp_path):
    """A certificate holds a recipe alone, and training that again would freeze nothing: there is none."""
    over(epochs=2).train(engine="inline", run_dir=tmp_path, callbacks=[Thaw(ENCODER, epoch=1)])
    with pytest.raises(phalanx.UsageError, match="frozen, thawed or evaluated in it, which is not in its recipe"):
        certify(over(epochs=2), tmp_path)


def events(folder):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] in ("freeze", "thaw")]


def test_a_chain_without_them_is_noticed(tmp_path, monkeypatch):
    """Negative twin: where the chain does not say what was thawed, the step that follows differs."""
    monkeypatch.setattr(Chained, "_note_early", lambda *_: None)  # planted
    over().train(engine="inline", run_dir=tmp_path, callbacks=[Thaw(ENCODER, epoch=2)])
    assert verify(over(), tmp_path, steps=(0, AT), progress=False).status == 0
    assert f"step {AT} differs" in verify(over(), tmp_path, progress=False).text


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_the_model_to_look_at_says_what_is_trained(workers):
    """``run.model`` follows the run, and the run goes on."""
    with over().start(**engine_of(workers)) as run:
        shown = run.model
        for frozen in (True, False):
            (run.freeze if frozen else run.thaw)("head.bias", "encoder.0.*")
            names = {name for name, parameter in run.model.named_parameters() if not parameter.requires_grad}
            assert names == ({"head.bias", "encoder.0.weight", "encoder.0.bias"} if frozen else set())
            run.step()
        assert run.model is shown


WRONG = [
    (
        lambda run: run.freeze("encodr.0.weight"),
        "no parameter or module is called 'encodr.0.weight'; close to it are encoder.0",
    ),
    (lambda run: run.thaw(ENCODER, "tail.*"), "no parameter or module is called 'tail"),
    (lambda run: run.freeze("*"), "the optimizer would have no parameter to train"),
    (lambda run: run.freeze(), "no parameter or module is called ''"),
    (lambda run: run.freeze(["head"]), r"called \['head'\]; .*one by one: run.freeze\('encoder.\*', 'head'\)"),
    (lambda run: run.freeze(3), "no parameter or module is called 3"),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_names_that_are_refused_change_nothing(workers):
    """A wrong name is refused with names that are close to it, and the run goes on to its bits."""
    with over(epochs=1).start(**engine_of(workers)) as run:
        for wrong, words in WRONG:
            with pytest.raises(phalanx.UsageError, match=words):
                wrong(run)
        run.finish()
        assert run.result().digest == over(epochs=1).train(engine="inline").digest
    with pytest.raises(phalanx.UsageError, match="closed"):
        run.freeze(ENCODER)


def test_a_module_is_named_as_in_phases():
    """A module's name means its parameters, here as in a phase, and a phase takes patterns."""
    ways = [{"callbacks": [Thaw(name, epoch=1)]} for name in ("encoder", ENCODER)]
    assert len({over(epochs=2).train(engine="inline", **way).digest for way in ways}) == 1
    phase = phalanx.Phase(nn.functional.cross_entropy, parameters=["encoder.?.*", "head"])
    covered = [name for name, _ in Net().named_parameters() if phase.covers(name)]
    assert covered == [name for name, _ in Net().named_parameters()]
    assert not phase.covers("encoders.weight")


def test_a_phase_keeps_something_to_train():
    """All parameters of a phase cannot be frozen: its next step would have nothing to compute."""
    phases = [phalanx.Phase(nn.functional.cross_entropy, parameters=name) for name in ("encoder", "head")]
    recipe = over(loss_fn=None, phases=phases, epochs=1)
    with recipe.start(engine="inline") as run:
        with pytest.raises(phalanx.UsageError, match="an optimizer of phases would have no parameter to train"):
            run.freeze("head")
        run.finish()
        assert run.result().digest == recipe.train(engine="inline").digest


def test_evaluate_refuses_arguments_that_it_would_ignore():
    """``run.evaluate`` is done at once, so that it has no period."""
    with over().start(engine="inline") as run, pytest.raises(TypeError, match="every_steps"):
        run.evaluate(nn.functional.cross_entropy, (X, Y), every_steps=2)


def heads_only(named):
    return torch.optim.SGD([parameter for name, parameter in named if name.startswith("head")], lr=0.1)


def test_what_no_optimizer_has_is_not_thawed():
    """Thawing would do nothing there, so it is refused, with the way out; freezing is fine."""
    with over(optimizer=heads_only).start(engine="inline") as run:
        run.freeze(ENCODER)
        with pytest.raises(phalanx.UsageError, match=r"no optimizer has 'encoder\.0\.weight'"):
            run.thaw(ENCODER)


def test_callbacks_that_are_refused():
    """``Thaw`` needs names, an epoch from 1 on, and epochs that are known."""
    with pytest.raises(phalanx.UsageError, match="Thaw has no names"):
        Thaw(epoch=1)
    with pytest.raises(phalanx.UsageError, match="epoch is 0"):
        Thaw(ENCODER, epoch=0)
    stream = phalanx.Recipe(Net, phalanx.Stream(list), nn.functional.cross_entropy, steps=3)
    with pytest.raises(phalanx.UsageError, match="Thaw counts epochs"):
        stream.train(engine="inline", callbacks=[Thaw(ENCODER, epoch=1)])


@pytest.mark.long
def test_phases():
    """With phases, what is frozen is so in each of them."""
    phases = [
        phalanx.Phase(nn.functional.cross_entropy, parameters="encoder"),
        phalanx.Phase(nn.functional.cross_entropy, parameters=["head"], every=2),
    ]
    recipe = phalanx.Recipe(Net, (X, Y), replicas=3, batch_size=12, steps=8, phases=phases)

    def trained(workers):
        with recipe.start(**engine_of(workers)) as run:
            for report in run:
                if report.step == 2:
                    run.freeze("encoder.0.*")
                if report.step == 5:
                    run.thaw("encoder.*")
            return run.result()

    assert trained(1).digest == trained(2).digest != recipe.train(engine="inline").digest


@pytest.mark.long
def test_moving_to_workers_and_back(monkeypatch):
    """What is frozen moves with a run, to workers and back."""
    hurry(monkeypatch, over())
    turn_back(monkeypatch)
    counts, result = moves(over(epochs=20), callbacks=[Thaw(ENCODER, epoch=10)])
    assert {1, 2} == set(counts)
    assert_same(result, over(epochs=20).train(engine="inline", callbacks=[Thaw(ENCODER, epoch=10)]))


@pytest.mark.long
def test_several_devices():
    """Each device of a process freezes its own copy."""
    with over().start(devices=["cpu", "cpu"]) as run:
        assert_same(finished(run), expected())


@pytest.mark.long
def test_hosts():
    """Two processes come to the same digest; one that does not freeze what the other does ends the run."""
    code = """
from tests.engines.test_retrained import over, finished, Thaw
def trained(alike):
    if alike:
        with over().start(engine="distributed") as run:
            return finished(run).digest
    with over().start(engine="distributed") as run:
        if rank == 0:
            run.freeze("encoder.*")
        run.finish()
tried(lambda: trained(True))
tried(lambda: dist.destroy_process_group())
tried(lambda: over().train(engine="distributed", callbacks=[Thaw("encoder.*", epoch=2)]).digest)
tried(lambda: dist.destroy_process_group())
tried(lambda: trained(False))
"""
    told = world(code)
    assert [each[:3:2] for each in told] == [[expected().digest] * 2] * 2
    assert any("workers have come to different options" in each[4] for each in told)
