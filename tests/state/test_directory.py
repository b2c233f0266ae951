"""A run's directory: who holds it and until when, where it lies, and a log of whole lines on a full disk too."""

import contextlib
import errno
import functools
import gc
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import warnings

import pytest

import phalanx
from phalanx.checkpoint import files
from phalanx.checkpoint.directory import RunDirectory
from phalanx.surroundings import system
from tests.state.runs import NEWER, OLDER, assert_same, engine_of, folder_of, listed, norm_recipe, steps_in

# Children only look at descriptors; where jax is loaded it warns of every fork.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
STEPS = 6


@pytest.fixture(scope="module")
def wanted():
    """What the run would have been."""
    return norm_recipe(STEPS).train(engine="inline")


def elsewhere(run_dir):
    """Whether another process may work in the directory."""
    code = (
        "import sys, phalanx.checkpoint.directory as d\n"
        "try: d.RunDirectory(sys.argv[1], 3)\n"
        "except d.UsageError as error: sys.exit(7 if 'at work' in str(error) else 8)\n"
    )
    return {0: True, 7: False}[subprocess.run([sys.executable, "-c", code, str(run_dir)], check=False).returncode]


def free(run_dir):
    """Whether the directory may be worked in, seen from here."""
    with contextlib.suppress(phalanx.UsageError):
        RunDirectory(run_dir, 3).close()
        return True
    return False


# Whose it is.


OPEN = ("", "snapshots", "chain.jsonl", f"snapshots/step-{NEWER:012d}")  # what a run goes on from


@pytest.mark.long
@pytest.mark.parametrize("name", OPEN)
def test_what_everybody_may_write_is_not_gone_on_with(tmp_path, wanted, good, name):
    """A stranger may have put weights there: refused with the path and the way out, which works; reading never is."""
    run_dir = tmp_path / "run"
    shutil.copytree(good, run_dir)
    path = run_dir / name
    path.chmod(path.stat().st_mode | 0o022)
    with pytest.raises(phalanx.UsageError, match="may be written by everybody") as refusal:
        norm_recipe(STEPS).train(run_dir=run_dir, engine="inline")
    assert repr(str(path.resolve())) in str(refusal.value)
    assert phalanx.load(run_dir).step == NEWER
    path.chmod(path.stat().st_mode & ~0o002)  # a group may write
    assert_same(norm_recipe(STEPS).train(run_dir=run_dir, engine="inline"), wanted)


@pytest.mark.parametrize("name", OPEN)
def test_what_another_user_owns_is_not_gone_on_with(tmp_path, wanted, good, monkeypatch, name):
    """The owner is named; ``resume="anyway"`` goes on."""
    run_dir = tmp_path / "run"
    shutil.copytree(good, run_dir)
    real, path = os.lstat, (run_dir / name).resolve()
    other = os.geteuid() + 1234

    def owned(target, **more):
        facts = list(real(target, **more))
        facts[4] = other if pathlib.Path(target) == path else os.geteuid()
        return os.stat_result(facts)

    monkeypatch.setattr(files.os, "geteuid", lambda: 77)  # planted: root goes on with everybody's
    monkeypatch.setattr(files.os, "lstat", owned)  # planted
    with pytest.raises(phalanx.UsageError, match=rf"belongs to another user \(uid {other}\)"):
        norm_recipe(STEPS).train(run_dir=run_dir, engine="inline")
    assert_same(norm_recipe(STEPS).train(run_dir=run_dir, engine="inline", resume="anyway"), wanted)


# Who holds it.


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the snapshot of step")  # which the later run swept away as it was written
@pytest.mark.parametrize("snapshot_every", [1, 100])
def test_two_runs_that_both_got_the_lock(tmp_path, wanted, monkeypatch, snapshot_every):
    """On a file system whose locks lie the later run goes on, to digest and root; the earlier ends, and says why."""
    whole = norm_recipe(STEPS).train(run_dir=tmp_path / "whole", engine="inline")
    monkeypatch.setattr(system.fcntl, "flock", lambda *_: None)  # planted
    options = {"run_dir": tmp_path / "run", "engine": "inline", "snapshot_every": snapshot_every}
    with norm_recipe(STEPS).start(**options) as first:
        assert [next(first).step for _ in range(2)] == [0, 1]
        later = norm_recipe(STEPS).start(**options)
        assert next(later).step == later.resumed_from
        with pytest.raises(phalanx.SnapshotError, match="another run has begun") as ended:
            first.finish()
        assert ended.value.result.steps == 3, "the state is whole"
        chain = (tmp_path / "run" / "chain.jsonl").read_bytes()
        for _ in range(2):  # also of a caller who does not take the first error for an end
            with pytest.raises(phalanx.SnapshotError, match="another run has begun"):
                first.finish()
        assert (tmp_path / "run" / "chain.jsonl").read_bytes() == chain
    with later:
        later.finish()
    result = later.result()
    assert_same(result, wanted)
    assert result.chain == whole.chain
    assert phalanx.verify(norm_recipe(STEPS), tmp_path / "run", progress=False).status == 0


def test_a_mark_that_cannot_be_read_stops_nothing(tmp_path, wanted, monkeypatch):
    """An error of the disk is no other run: steps, log and snapshots go on."""
    with norm_recipe(STEPS).start(run_dir=tmp_path, engine="inline") as run:
        next(run)

        def failing(*_):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(os, "pread", failing)  # planted
        run.finish()
        monkeypatch.undo()
    assert_same(run.result(), wanted)
    assert steps_in(tmp_path)[-1] == STEPS


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    """What is refused is not the directory, but its file system."""

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(system.fcntl, "flock", flock)  # planted
    with pytest.raises(phalanx.UsageError, match="a file system that locks no files"):
        norm_recipe(STEPS).train(run_dir=tmp_path, engine="inline")


@pytest.mark.parametrize("warm_start", ["nothing", "good", "run"])
def test_a_bad_warm_start_leaves_the_directory_free(tmp_path, wanted, good, warm_start):
    """What cannot be begun from is refused, and the next call begins, in this process too."""
    shutil.copytree(good, tmp_path / "good")
    for step in (OLDER, NEWER):
        os.truncate(folder_of(tmp_path / "good", step) / "state.json", 5)
    options = {"run_dir": tmp_path / "run", "engine": "inline"}
    with pytest.raises(phalanx.SnapshotError):
        norm_recipe(STEPS).train(warm_start=tmp_path / warm_start, **options)
    with pytest.raises(phalanx.SnapshotError):
        norm_recipe(STEPS).train(warm_start=tmp_path / warm_start, **options)
    assert_same(norm_recipe(STEPS).train(**options), wanted)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_dropped_run_leaves_the_directory_free(tmp_path, wanted, workers):
    """A run that nobody closed or entered gives back the directory when it is dropped; while it is held, it is held."""
    options = {"run_dir": tmp_path, "snapshot_every": 1, **engine_of(workers)}
    run = norm_recipe(STEPS).start(**options)
    next(run)
    run.result()  # waits for the snapshot
    assert not free(tmp_path)
    del run
    assert free(tmp_path)
    assert_same(norm_recipe(STEPS).train(**options), wanted)


def test_a_dropped_run_in_a_cycle(tmp_path):
    """A run that refers to itself is dropped like others when somebody wants its directory."""
    gc.disable()
    try:
        run = norm_recipe(STEPS).start(run_dir=tmp_path, engine="inline")
        run.itself = run
        del run
        assert free(tmp_path)
    finally:
        gc.enable()


@pytest.mark.long
def test_an_exception_between_start_and_with(tmp_path):
    """A run that was begun when something else failed is dropped with the exception."""

    def begin():
        run = norm_recipe(STEPS).start(run_dir=tmp_path, engine="inline")
        raise ValueError(run.steps)

    with pytest.raises(ValueError, match="0") as caught:
        begin()
    assert not free(tmp_path)
    del caught
    assert free(tmp_path)


@pytest.mark.long
def test_no_descriptor_is_left(tmp_path, good):
    """Dropped, refused and closed runs, and one that passes over a damaged snapshot, leave no descriptor open."""

    def once():
        shutil.copytree(good, tmp_path / "damaged")
        weights = folder_of(tmp_path / "damaged", NEWER) / "weights.safetensors"
        weights.unlink()
        weights.mkdir()
        with pytest.warns(UserWarning, match="weights.safetensors cannot be used"):
            norm_recipe(STEPS).train(run_dir=tmp_path / "damaged", engine="inline")
        shutil.rmtree(tmp_path / "damaged")
        norm_recipe(STEPS).start(run_dir=tmp_path / "run", engine="inline")
        with pytest.raises(phalanx.SnapshotError):
            norm_recipe(STEPS).start(run_dir=tmp_path / "other", warm_start=tmp_path / "nothing", engine="inline")
        norm_recipe(1).train(run_dir=tmp_path / "third", engine="inline")
        with (
            norm_recipe(1).start(run_dir=tmp_path / "third", engine="inline"),
            pytest.raises(phalanx.UsageError, match="another run is at work"),
        ):
            norm_recipe(1).start(run_dir=tmp_path / "third", engine="inline")

    once()
    gc.collect()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def forked(act):
    """What a forked child exits with after ``act()``, which returns whether all is well."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if act() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.long
def test_a_forked_child_holds_nothing(tmp_path):
    """A child neither lets go of its parent's directory nor writes there, whatever it does with its copy of the run."""
    run = norm_recipe(STEPS).start(run_dir=tmp_path, engine="inline")
    next(run)
    run.result()
    before = listed(tmp_path), (tmp_path / "events.jsonl").read_bytes()

    def drop():
        nonlocal run
        del run
        gc.collect()
        return True

    def close():
        run.close()
        return not run._saver._directory.held

    assert [forked(drop), forked(close), forked(lambda: False)] == [0, 0, 2]
    assert (listed(tmp_path), (tmp_path / "events.jsonl").read_bytes()) == before
    assert not free(tmp_path)
    assert not elsewhere(tmp_path)
    run.close()
    assert free(tmp_path)


@pytest.mark.long
def test_a_child_that_outlives_the_run(tmp_path):
    """A forked child that goes on keeps no lock: not when the run is closed, and not when its process is killed."""
    read, write = os.pipe()
    run = norm_recipe(STEPS).start(run_dir=tmp_path, engine="inline")
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    run.close()
    assert elsewhere(tmp_path)

    middle = os.fork()
    if not middle:
        kept = RunDirectory(tmp_path, 3)
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(write)
        os.read(read, 1)
        os._exit(kept.held)
    assert os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1]) == -signal.SIGKILL
    assert elsewhere(tmp_path)
    os.close(write)
    os.close(read)
    os.waitpid(child, 0)


@pytest.mark.long
def test_a_fork_that_python_does_not_see(tmp_path, monkeypatch):
    """In a process that is not the one that took the lock, nothing is unlocked or closed."""
    directory = RunDirectory(tmp_path, 3)
    owner = os.getpid()
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "getpid", lambda: owner + 1)
        assert not directory.held
        directory._held.let_go()
    assert not elsewhere(tmp_path)
    directory.close()
    directory.close()
    assert elsewhere(tmp_path)


# Where it lies.


@pytest.mark.parametrize("workers", [1, 2])
def test_the_working_directory_may_change(tmp_path, monkeypatch, wanted, workers):
    """A relative run_dir, warm_start and path of save mean what they meant at the call, wherever the process goes."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    options = {"run_dir": "run", "snapshot_every": 1, "on_snapshot_error": "stop", **engine_of(workers)}
    with norm_recipe(STEPS).start(**options) as run:
        next(run)
        monkeypatch.chdir(tmp_path / "there")
        run.save("saved")
        next(run)
        monkeypatch.chdir(tmp_path)
        run.finish()
    assert_same(run.result(), wanted)
    assert steps_in(tmp_path / "here" / "run") == [4, 5, 6]
    assert phalanx.load("there/saved").step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]

    def leave():
        os.chdir(tmp_path / "here")
        return norm_recipe(1).make_model()

    norm_recipe(1, make_model=leave).train(warm_start="there/saved", engine="inline")


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch):
    """A relative path is refused where it means nothing; an absolute one is not."""
    norm_recipe(1).train(engine="inline")  # some of torch is imported late, and wants to know where it is
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(phalanx.UsageError, match=r"run_dir is 'run'.*give an absolute path"):
        norm_recipe(1).train(run_dir="run", engine="inline")
    norm_recipe(1).train(run_dir=tmp_path / "run", engine="inline")


@pytest.mark.parametrize("path", ["", b"run", 3, "a\0b", None, ["run"]])
def test_what_is_no_path(path):
    """One sentence names the argument and the value, for each argument that is a path."""
    with norm_recipe(1).start(engine="inline") as run, pytest.raises(phalanx.UsageError, match=r"path is .*no path"):
        run.save(path)
    with pytest.raises(phalanx.UsageError, match=r"path is .*no path"):
        phalanx.load(path)
    for name in ("run_dir", "warm_start"):
        if path is not None:
            with pytest.raises(phalanx.UsageError, match=f"{name} is .*no path"):
                norm_recipe(1).train(engine="inline", **{name: path})


def test_snapshots_that_are_a_link(tmp_path, wanted):
    """Where ``snapshots`` is a link, a run is refused, and another run's snapshots stay; a run_dir may be a link."""
    options = {"snapshot_every": 1, "engine": "inline"}
    norm_recipe(STEPS).train(run_dir=tmp_path / "other", **options)
    before = listed(tmp_path / "other")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "other" / "snapshots")
    with pytest.raises(phalanx.UsageError, match=r"run_dir is .*run'.*a symbolic link .*snapshots.*; choose"):
        norm_recipe(STEPS, seed=5).train(run_dir=tmp_path / "run", keep_snapshots=1, **options)
    with pytest.raises(phalanx.SnapshotError, match="snapshots' is a symbolic link"):
        phalanx.load(tmp_path / "run")
    assert listed(tmp_path / "other") == before
    (tmp_path / "link").symlink_to("other")
    assert_same(norm_recipe(STEPS).train(run_dir=tmp_path / "link", **options), wanted)
    assert phalanx.load(tmp_path / "link").step == STEPS


def test_a_dangling_link(tmp_path):
    """A link that leads nowhere is refused too, for the run and for its snapshots."""
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "snapshots").symlink_to("nowhere")
    for name in ("link", "run"):
        with pytest.raises(phalanx.UsageError, match="run_dir is"):
            norm_recipe(1).train(run_dir=tmp_path / name, engine="inline")
    assert not (tmp_path / "nowhere").exists()


def test_links_that_come_later(tmp_path, wanted):
    """A link in the place of ``snapshots``, or another target of a run_dir that is one, leads no snapshot elsewhere."""
    options = {"snapshot_every": 1, "engine": "inline"}
    norm_recipe(STEPS, seed=5).train(run_dir=tmp_path / "other", **options)
    before = listed(tmp_path / "other")
    (tmp_path / "first").mkdir()
    (tmp_path / "link").symlink_to("first")
    with norm_recipe(STEPS).start(run_dir=tmp_path / "link", keep_snapshots=1, **options) as run:
        next(run)
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("other")
        next(run)
        run.result()
        assert steps_in(tmp_path / "first") == [2]
        (tmp_path / "first" / "snapshots").rename(tmp_path / "moved")
        (tmp_path / "first" / "snapshots").symlink_to(tmp_path / "other" / "snapshots")
        next(run)
        with pytest.warns(UserWarning, match=r"step 3 could not be written.*is no folder any more"):
            run.result()
        (tmp_path / "first" / "snapshots").unlink()
        (tmp_path / "moved").rename(tmp_path / "first" / "snapshots")
        run.finish()
    assert_same(run.result(), wanted)
    assert listed(tmp_path / "other") == before
    assert steps_in(tmp_path / "first") == [STEPS]


def test_only_snapshots_are_pruned(tmp_path):
    """What is no snapshot keeps its place, also under the name of one: files, links, other folders and their files."""
    run_dir = tmp_path / "run"
    norm_recipe(2).train(run_dir=run_dir, snapshot_every=1, keep_snapshots=1, engine="inline")
    precious = tmp_path / "precious"
    shutil.copytree(folder_of(run_dir, 2), precious)
    place = functools.partial(folder_of, run_dir)
    place(0).symlink_to(precious)
    place(1).mkdir()
    (place(1) / "mine").write_text("text")
    (run_dir / "snapshots" / "notes").mkdir()
    (run_dir / "snapshots" / "step-1").mkdir()
    before = listed(precious)
    norm_recipe(STEPS).train(run_dir=run_dir, snapshot_every=1, keep_snapshots=1, engine="inline")
    assert listed(precious) == before
    assert place(0).is_symlink()
    assert (place(1) / "mine").read_text() == "text"
    assert {path.name for path in (run_dir / "snapshots").iterdir()} == {
        "notes", "step-1", *(place(step).name for step in (0, 1, STEPS))
    }  # fmt: skip


# Its log.


def events(path):
    """The lines of a log that are whole."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class Disk:
    """A disk that takes so many bytes, and then none until there is room again; or less of each write than asked."""

    def __init__(self, monkeypatch, room, most=1 << 30):
        self.room, self.most, self.write = room, most, os.write
        monkeypatch.setattr(files.os, "write", self)

    def __call__(self, descriptor, data):
        count = min(len(data), self.room, self.most)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= count
        return self.write(descriptor, bytes(data[:count]))


def test_a_disk_that_is_full_at_any_byte(tmp_path, monkeypatch):
    """Whatever fits: there are whole lines only, in order, those before all of them, and those after when it fits.

    A warning says that lines are lost, once.
    """
    lines = [{"event": "step", "time": 0, "text": "x" * number} for number in range(4)]
    written = [json.dumps(line).encode() + b"\n" for line in lines]
    for room in range(sum(map(len, written)) + 1):
        path = tmp_path / str(room)
        descriptor = files.open_log(path)
        found = files.LineFile(descriptor, path)
        with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            disk = Disk(patched, room, most=1 + room % 7)
            for line in written[:3]:
                found.add(line)
            assert path.stat().st_size == min(room, sum(map(len, written[:3])))
            disk.room = 1 << 20
            found.add(written[3])
        os.close(descriptor)
        assert len(told) == (room < sum(map(len, written[:3])))
        assert all(f"{str(path)!r} are lost: No space left" in str(each.message) for each in told)
        fitting = [line for number, line in enumerate(lines[:3]) if sum(map(len, written[:number])) < room]
        assert events(path) == [*fitting, lines[3]]


def test_a_torn_line_of_another_process(tmp_path):
    """A last line without its end is ended by whoever opens the log next: its line is another one."""
    for torn in (b'{"ev', b'{"event": "end"}', b"\n", b"", b'{"event": "end"}\n'):
        path = tmp_path / "events.jsonl"
        path.write_bytes(b'{"event": "start"}\n' + torn)
        directory = RunDirectory(tmp_path, 3)
        directory.note("resume")
        directory.close()
        lines = path.read_bytes().split(b"\n")
        assert json.loads(lines[-2])["event"] == "resume"
        assert lines[1] == torn.rstrip(b"\n") or not torn.strip()
        assert not lines[-1]


@pytest.mark.parametrize("name", ["events.jsonl", "lock"])
def test_what_is_no_plain_file(tmp_path, name):
    """A pipe, folder or link in the place of the log or the lock is refused, and nothing waits for its other end."""
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("elsewhere", path)):
        if name == "lock" and make is os.mkfifo:
            continue  # it can be locked, and nothing is written
        make(tmp_path / name)
        with pytest.raises(phalanx.UsageError, match=r"run_dir is .*cannot be used"):
            norm_recipe(1).train(run_dir=tmp_path, engine="inline")
        (tmp_path / name).rmdir() if make is os.mkdir else (tmp_path / name).unlink()
    assert not (tmp_path / "elsewhere").exists()


FULL = """
import json, resource, sys, warnings
from tests.state.runs import norm_recipe
run_dir, room = sys.argv[1], int(sys.argv[2])
warnings.simplefilter("ignore")
with norm_recipe(40).start(run_dir=run_dir, snapshot_every=40, engine="inline") as run:
    for report in run:
        if report.step == 3:
            size = (run._saver._directory.path / "events.jsonl").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, -1))
        if report.step == 9:
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
print(run.result().digest)
"""


@pytest.mark.long
@pytest.mark.parametrize("room", [0, 1, 77, 200])
def test_a_run_on_a_full_disk(tmp_path, room):
    """No file may grow for some steps: the run ends in its digest, and its log has whole lines, the last ones too."""
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-c", FULL, str(tmp_path), str(room)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [norm_recipe(40).train(engine="inline").digest]
    found = [event["step"] for event in events(tmp_path / "events.jsonl") if event["event"] == "step"]
    assert found == sorted(set(found))
    assert {*range(4), *range(11, 40)} <= set(found)
    assert len(found) < 40


def test_gluing_would_be_noticed(tmp_path, monkeypatch):
    """Negative twin: written without care, a torn line takes the next one with it."""
    descriptor = files.open_log(tmp_path / "log")
    disk = Disk(monkeypatch, room=5)
    for line in (b'{"a": 1}\n', b'{"b": 2}\n'):
        disk(descriptor, line)
        disk.room = 100
    os.close(descriptor)
    with pytest.raises(json.JSONDecodeError):
        events(tmp_path / "log")


@pytest.mark.long
def test_who_lists_runs_refuses_no_start(tmp_path):
    """Whoever looks whether a run is at work has its lock for a moment: a run that starts just then waits for that."""
    (tmp_path / "lock").touch()
    with open(tmp_path / "lock") as lock:
        system.lock(lock, shared=True)
        threading.Timer(0.05, system.unlock, (lock,)).start()
        RunDirectory(tmp_path, 1).close()
        system.lock(lock, shared=True)
        with pytest.raises(phalanx.UsageError, match="another run"):
            RunDirectory(tmp_path, 1)
