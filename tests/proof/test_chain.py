"""The chain of a run: the same root wherever and however often its parts are done; a file that survives accidents."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import pytest
import torch

import phalanx
from phalanx.checkpoint.chain import ASIDE, CHAIN, ChainFile, Links
from phalanx.proof.difference import parting
from tests.families import FAMILIES
from tests.proof.jobs import mlp, ran
from tests.sampling import sample


def test_another_answer_has_another_root(tmp_path):
    """Another seed, and one step more, change the root; without a run_dir there is none."""
    roots = [
        recipe.train(run_dir=tmp_path / str(n), engine="inline", progress=False).chain
        for n, recipe in enumerate([mlp(), mlp(seed=1), mlp(steps=5)])
    ]
    assert len(set(roots)) == 3
    assert mlp().train(engine="inline", progress=False).chain is None


def test_a_resumed_run_continues_it(tmp_path):
    """Two runs that go on from a snapshot end with the root of one that was never interrupted."""
    whole = mlp(steps=9).train(run_dir=tmp_path / "whole", engine="inline", progress=False)
    for steps in (3, 6, 9):
        last = mlp(steps=steps).train(run_dir=tmp_path / "parts", engine="inline", progress=False)
    assert last.chain == whole.chain
    assert phalanx.diff(tmp_path / "whole", tmp_path / "parts") is None


@pytest.mark.parametrize("cut", [1, 100, -1])
def test_a_torn_last_line_is_done_again(tmp_path, cut):
    """A line that was being written when the machine went down, or links beyond the snapshot, are written anew."""
    recipe = mlp(steps=6)
    whole = recipe.train(run_dir=tmp_path / "whole", engine="inline", progress=False)
    mlp(steps=3).train(run_dir=tmp_path / "torn", engine="inline", progress=False)
    chain = tmp_path / "torn" / CHAIN
    text = (tmp_path / "whole" / CHAIN).read_bytes()
    width = json.loads(text.splitlines()[0])["width"]
    chain.write_bytes(chain.read_bytes() + text.splitlines(keepends=True)[4][: width + cut if cut < 0 else cut])
    with Links(chain) as links:
        assert len(links) == 3
    result = recipe.train(run_dir=tmp_path / "torn", engine="inline", progress=False)
    assert result.chain == whole.chain
    assert chain.read_bytes() == text


@pytest.mark.long
def test_links_beyond_the_snapshot_are_done_again(tmp_path):
    """A run that was killed after its newest snapshot has links of steps that come again; they end up there once."""
    script = textwrap.dedent("""
        import os, sys
        from tests.proof.jobs import mlp
        def stop(report):
            if report.step == 6:
                os._exit(1)
        mlp(steps=9).train(run_dir=sys.argv[1], engine="inline", snapshot_every=4, callbacks=[stop], progress=False)
        """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], check=False)
    assert done.returncode == 1
    with Links(tmp_path / "a" / CHAIN) as links:
        assert len(links) == 6
    result = mlp(steps=9).train(run_dir=tmp_path / "a", engine="inline", progress=False)
    assert result.resumed_from in (0, 4)  # the snapshot may have been being written
    assert result.chain == mlp(steps=9).train(run_dir=tmp_path / "b", engine="inline", progress=False).chain


@pytest.mark.long
@pytest.mark.parametrize("name", sample("families that are killed", sorted(set(FAMILIES) - {"wide_sum"}), 2))
def test_kills_leave_the_root(tmp_path, name):
    """A run in which 20 workers are killed has the root of an undisturbed one, link by link."""
    recipe = FAMILIES[name].recipe(FAMILIES[name].replicas[0], steps=40)
    quiet = ran(tmp_path / "quiet", recipe)
    workers = min(3, recipe.replicas)
    with recipe.start(run_dir=tmp_path / "killed", workers=workers, engine="processes", progress=False) as run:
        for report in run:
            if report.step % 2 and run.worker_pids:
                os.kill(run.worker_pids[report.step % len(run.worker_pids)], signal.SIGKILL)
    assert phalanx.diff(quiet, tmp_path / "killed") is None
    with Links(quiet / CHAIN) as one, Links(tmp_path / "killed" / CHAIN) as other:
        assert one.root == other.root


def test_batches_that_the_caller_brings(tmp_path):
    """They are linked by what they hold: the same batches give the same root, another number in one another root."""

    def root(name, third):
        batches = [(torch.full((8, 5), float(n)), torch.arange(8) % 3) for n in (1, 2, third)]
        recipe = phalanx.Recipe(FAMILIES["mlp"].make_model, None, FAMILIES["mlp"].loss_fn, replicas=4)
        with recipe.start(run_dir=tmp_path / name, engine="inline", progress=False) as run:
            for batch in batches:
                run.step(batch)
            return run.result().chain

    assert root("a", 3) == root("b", 3) != root("c", 4)


@pytest.mark.parametrize(("before", "after", "first"), [(2, 8, 3), (8, 2, 0)])
def test_more_replicas_need_longer_lines(tmp_path, before, after, first):
    """With more replicas, as ``resume="anyway"`` allows, a new file begins at that step; with fewer it goes on.

    The links of before are kept in either case.
    """
    mlp(before, steps=3).train(run_dir=tmp_path, engine="inline", progress=False)
    earlier = (tmp_path / CHAIN).read_bytes()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mlp(after, steps=5).train(run_dir=tmp_path, engine="inline", progress=False, resume="anyway")
    texts = "; ".join(str(warning.message) for warning in told)
    assert "replicas is" in texts
    assert ("is kept as" in texts) == bool(first)
    with Links(tmp_path / CHAIN) as links:
        assert (links.first, len(links), len(links[4]["losses"])) == (first, 5, after)
    if first:
        assert (tmp_path / ASIDE.format(1)).read_bytes() == earlier


def spoiled(path, how):
    """Damage a chain of 4 steps, in the line of step 3 or as a whole."""
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    if how == "a byte":
        lines[4] = lines[4].replace(b'"lr"', b'"1r"')
    elif how == "its last line is missing":
        del lines[4]
    elif how == "the header":
        lines[0] = lines[0].replace(b"chain", b"chair")
    path.write_bytes(b"" if how == "nothing is left" else b"".join(lines))
    return path.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("how", ["a byte", "its last line is missing", "the header", "nothing is left"])
def test_a_chain_that_cannot_be_read_is_kept(tmp_path, how):
    """Whatever became of the newest link: the file is set aside, the root is right, and verify says what is missing."""
    whole = mlp(steps=8).train(run_dir=tmp_path / "whole", engine="inline", progress=False)
    half = mlp(steps=4).train(run_dir=tmp_path / "a", engine="inline", progress=False)
    left = spoiled(tmp_path / "a" / CHAIN, how)
    assert mlp(steps=4).train(run_dir=tmp_path / "a", engine="inline", progress=False).chain == half.chain
    assert (tmp_path / "a" / CHAIN).read_bytes() == left  # nothing was added, so nothing had to change
    with pytest.warns(UserWarning, match="is kept as") if left else contextlib.nullcontext():
        result = mlp(steps=8).train(run_dir=tmp_path / "a", engine="inline", progress=False)
    assert (result.digest, result.chain) == (whole.digest, whole.chain)
    assert not left or (tmp_path / "a" / ASIDE.format(1)).read_bytes() == left
    verified = phalanx.verify(mlp(steps=8), tmp_path / "a", progress=False)
    assert (verified.status, verified.steps) == (2, 4)
    assert "begins at step 4" in verified.text
    assert phalanx.verify(mlp(steps=8), tmp_path / "a", steps=(4, 8), progress=False).status == 0


def test_a_chain_that_is_gone_begins_anew(tmp_path):
    """Where the links of earlier steps are lost, the chain says from which step on it tells anything."""
    mlp(steps=3).train(run_dir=tmp_path / "a", engine="inline", progress=False)
    (tmp_path / "a" / CHAIN).unlink()
    mlp(steps=6).train(run_dir=tmp_path / "a", engine="inline", progress=False)
    with Links(tmp_path / "a" / CHAIN) as links:
        assert (links.first, len(links)) == (3, 6)
    assert phalanx.diff(tmp_path / "a", ran(tmp_path / "b", mlp(steps=6))) is None


def test_a_damaged_link_is_named(tmp_path):
    """A line that is no link, and a file that is no chain, are told of by step and path."""
    folder = ran(tmp_path / "a", mlp(steps=3))
    text = (folder / CHAIN).read_text()
    (folder / CHAIN).write_text(text.replace('"step": 1', '"step": 7'))
    with Links(folder / CHAIN) as links, pytest.raises(phalanx.SnapshotError, match="damaged at step 1"):
        links[1]
    (tmp_path / "none.jsonl").write_text("[]\n")
    with pytest.raises(phalanx.SnapshotError, match="no chain"):
        Links(tmp_path / "none.jsonl")


def synthetic(path, steps, other_from=None):
    """A chain of so many links, made as fast as they can be hashed."""
    width, link, lines = 200, "0" * 64, []
    for step in range(steps):
        body = f'{{"step": {step}, "loss": {0.5 if other_from is not None and step >= other_from else 0.25}}}'
        link = hashlib.sha256(bytes.fromhex(link) + body.encode()).hexdigest()
        lines.append(f'{{"link": "{link}", {body[1:]}'.ljust(width - 1))
    path.write_text(json.dumps({"chain": 1, "width": width, "first": 0}) + "\n" + "\n".join(lines) + "\n")


@pytest.mark.long
def test_long_chains_are_read_whole(tmp_path):
    """In two chains of 200,000 links the first that differs is found, and the time that this takes is printed."""
    steps, planted = 200_000, 154_321
    synthetic(tmp_path / "a.jsonl", steps)
    synthetic(tmp_path / "b.jsonl", steps, planted)
    began = time.perf_counter()
    with Links(tmp_path / "a.jsonl") as one, Links(tmp_path / "b.jsonl") as other:
        found = parting(one, other)
    print(f"{time.perf_counter() - began:.4f} s")
    assert (found.step, found.phase, found.note) == (planted, "loss", "loss is 0.25 in A, and 0.5 in B")
    assert phalanx.diff(tmp_path / "a.jsonl", tmp_path / "b.jsonl").step == planted


@pytest.mark.parametrize("planted", range(9))
def test_the_step_is_exact(tmp_path, planted):
    """Wherever chains part, the step is the right one."""
    synthetic(tmp_path / "a.jsonl", 8)
    synthetic(tmp_path / "b.jsonl", 8, planted)
    with Links(tmp_path / "a.jsonl") as one, Links(tmp_path / "b.jsonl") as other:
        found = parting(one, other)
    assert (None if planted == 8 else planted) == (None if found is None else found.step)


def test_a_full_disk_stops_the_file_and_not_the_run(tmp_path, monkeypatch):
    """Where links cannot be written any more the run goes on, says so once, and still tells the root."""
    right = mlp(steps=4).train(run_dir=tmp_path / "a", engine="inline", progress=False).chain
    write = ChainFile._write  # planted

    def full(self, text):
        if '"step": 2' in text:
            raise OSError(28, "No space left on device")
        write(self, text)

    monkeypatch.setattr(ChainFile, "_write", full)
    with pytest.warns(UserWarning, match="No space left"):
        result = mlp(steps=4).train(run_dir=tmp_path / "b", engine="inline", progress=False)
    assert result.chain == right


@pytest.mark.parametrize(
    "header", ['{"chain": 1, "width": 0, "first": 0}', '{"chain": 1, "width": 9e18, "first": 0}', "{"]
)
def test_headers_that_are_none(tmp_path, header):
    """A header with impossible numbers is refused before anything is read by it."""
    (tmp_path / "chain.jsonl").write_text(header + "\n" + "x" * 100)
    with pytest.raises(phalanx.SnapshotError, match="no chain of links"):
        Links(tmp_path / "chain.jsonl")


@pytest.mark.long
@pytest.mark.parametrize(("guard", "known"), [("if __name__ == '__main__':\n    ", True), ("", False)])
def test_a_script_without_a_guard_is_not_loaded_again(tmp_path, guard, known):
    """A run notes the file of its recipe, but not of a script that would train once more when it is loaded."""
    (tmp_path / "job.py").write_text(
        "from tests.proof.jobs import mlp\nrecipe = mlp(steps=1)\n"
        f"{guard}recipe.train(run_dir='run', engine='inline', progress=False)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "job.py"], cwd=tmp_path, env=environment, check=True)
    told = json.loads((tmp_path / "run" / "chain.records.jsonl").read_text().splitlines()[0])
    assert told["origin"] == (f"{tmp_path / 'job.py'}:recipe" if known else None)
