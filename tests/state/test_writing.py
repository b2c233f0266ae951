"""However a snapshot's writing ends, in the middle of it too: what was whole before is whole, and the run goes on."""

import contextlib
import errno
import functools
import io
import itertools
import os
import shutil
import signal
import stat
import warnings

import pytest

import phalanx
from phalanx.callbacks import Log
from phalanx.checkpoint import files, snapshot
from phalanx.checkpoint.directory import RunDirectory, newest_of
from tests.sampling import cover, sample
from tests.state.runs import NEWER, OLDER, assert_same, contents, folder_of, listed, norm_recipe, steps_in

# Children only write files; where jax is loaded it warns of every fork.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

STEPS = 6
KILLED = 99


@pytest.fixture(scope="module")
def next_state(tmp_path_factory):
    """The state that is to be written next, of step 5."""
    folder = tmp_path_factory.mktemp("next")
    norm_recipe(NEWER + 1).train(run_dir=folder, engine="inline")
    return newest_of(folder)


@pytest.fixture(scope="module")
def wanted():
    """What the run would have been."""
    return norm_recipe(STEPS).train(engine="inline")


@pytest.fixture
def run_dir(tmp_path, good):
    """A copy of such a directory."""
    shutil.copytree(good, tmp_path / "run")
    return tmp_path / "run"


class Count:
    """Operations so far; at the fatal one, the process is gone."""

    def __init__(self, fatal):
        self.fatal, self.done = fatal, 0

    def __call__(self):
        """Whether this is the one."""
        self.done += 1
        return self.done == self.fatal


class Torn(io.FileIO):
    """A file of which half of a write is there when the process is killed."""

    count = None

    def write(self, data):
        if Torn.count():
            super().write(bytes(data)[: len(data) // 2])
            os._exit(KILLED)
        return super().write(data)


OPERATIONS = ("open", "mkdir", "rename", "fsync", "unlink", "rmdir")


def fatally(original, count, when, *arguments, **options):
    fatal = count()
    if fatal and when == "before":
        os._exit(KILLED)
    try:
        return original(*arguments, **options)
    finally:  # also after one that raises, as removing what is not there does
        if fatal:
            os._exit(KILLED)


def watch(count, when):
    """From here on, count each operation on files, and die at the fatal one: before it is done, or after."""
    for name in OPERATIONS:
        setattr(os, name, functools.partial(fatally, getattr(os, name), count, when))
    fdopen = os.fdopen

    def opened(fd, mode, buffering=-1, **options):
        return io.BufferedWriter(Torn(fd, "wb"), buffering) if mode == "wb" else fdopen(fd, mode, buffering, **options)

    os.fdopen = opened
    Torn.count = count


WAYS = [("before", 1), ("before", 2), ("after", 1), ("after", 2)]


def write_and_die(run_dir, state, keep, fatal, when):
    """Write a snapshot in a process that dies at an operation; returns what that exited with."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            directory = RunDirectory(run_dir, keep)
            watch(Count(fatal), when)
            directory.write(state)
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*chain.jsonl' cannot go on after step 4")  # this snapshot has no link there
@pytest.mark.long
@pytest.mark.parametrize(("when", "keep"), sample("deaths while writing", WAYS, 1))
def test_a_death_at_every_operation(tmp_path, good, next_state, wanted, when, keep):
    """Killed at any operation of a write: the last good snapshot loads, nothing is in the way of the next run."""
    older, newer = contents(snapshot.read(folder_of(good, NEWER))), contents(next_state)
    found = []
    for fatal in range(1, 200):
        run_dir = tmp_path / str(fatal)
        shutil.copytree(good, run_dir)
        ended = write_and_die(run_dir, next_state, keep, fatal, when)
        assert ended in (KILLED, 0)
        state = contents(newest_of(run_dir))
        assert state in (older, newer)
        found.append(state == newer)
        seen = []
        result = norm_recipe(STEPS).train(
            run_dir=run_dir, keep_snapshots=keep, engine="inline", callbacks=[seen.append]
        )
        assert_same(result, wanted)
        assert [report.step for report in seen] == list(range(5 if found[-1] else 4, STEPS))
        assert not list((run_dir / "snapshots").glob(".tmp-*"))
        assert len(steps_in(run_dir)) <= keep
        shutil.rmtree(run_dir)
        if not ended:
            break
    assert not ended
    assert fatal > 20  # operations
    assert found == sorted(found)  # the old one until the new one is there
    assert {False, True} == set(found)


def careless(target):
    """Write as one would without thinking: files of the final name, one after another."""
    os.mkdir(target)
    return contextlib.nullcontext(target)


@pytest.mark.long
def test_a_careless_writer_is_found_out(tmp_path, good, next_state, monkeypatch):
    """The test above can fail: written in place, a snapshot of which half is there is found, and passed over."""
    monkeypatch.setattr(files, "whole_folder", careless)
    for fatal in range(1, 20):
        shutil.copytree(good, tmp_path / str(fatal))
        write_and_die(tmp_path / str(fatal), next_state, 2, fatal, "after")
    with pytest.warns(UserWarning, match="cannot be used") as told:
        assert all(newest_of(tmp_path / str(fatal)) for fatal in range(1, 20))
    assert len(told) > 5


@pytest.mark.campaign
def test_a_death_while_a_damaged_one_is_replaced(tmp_path, good, next_state, wanted):
    """What stands in the place of a snapshot goes away first; killed at any operation of that, the older one loads."""
    for fatal in range(1, 200):
        run_dir = tmp_path / str(fatal)
        shutil.copytree(good, run_dir)
        shutil.copytree(folder_of(good, OLDER), folder_of(run_dir, NEWER + 1))
        os.truncate(folder_of(run_dir, NEWER + 1) / snapshot.WEIGHTS, 9)
        ended = write_and_die(run_dir, next_state, 2, fatal, "before")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = norm_recipe(STEPS).train(run_dir=run_dir, engine="inline")
        assert_same(result, wanted)
        shutil.rmtree(run_dir)
        if not ended:
            break
    assert not ended


def test_leftovers_of_any_kind(run_dir, wanted):
    """What an interrupted writer may have left is cleared away; what only looks like it, a link, leads nowhere."""
    snapshots = run_dir / "snapshots"
    (run_dir / "precious").mkdir()
    (run_dir / "precious" / "file").write_text("mine")
    (snapshots / ".tmp-1").mkdir(mode=0o700)
    (snapshots / ".tmp-1" / "weights.safetensors").write_bytes(b"half")
    (snapshots / ".tmp-2").mkdir()
    (snapshots / ".tmp-3").symlink_to(run_dir / "precious")
    (run_dir / ".tmp-4").write_text("half of next.json")
    assert_same(norm_recipe(STEPS).train(run_dir=run_dir, engine="inline"), wanted)
    assert (run_dir / "precious" / "file").read_text() == "mine"
    assert not (snapshots / ".tmp-1").exists()
    assert not (snapshots / ".tmp-2").exists()
    assert not (run_dir / ".tmp-4").exists()


def test_a_log_is_on_the_disk_before_a_snapshot_is(tmp_path, monkeypatch):
    """A power loss takes what is not synced, and a run goes on from its snapshot: no line before it may be missing."""
    log, synced, lines = tmp_path / "log.csv", [0], {}
    sync, write = os.fsync, snapshot.write

    def noting(number):
        sync(number)
        if os.path.realpath(f"/proc/self/fd/{number}") == str(log.resolve()):
            synced.append(os.fstat(number).st_size)

    def written(state, target):
        lines[state.step] = log.read_bytes()[: synced[-1]].count(b"\n") - 1 if state.step else 0
        write(state, target)

    monkeypatch.setattr(os, "fsync", noting)  # planted
    monkeypatch.setattr(snapshot, "write", written)  # planted
    norm_recipe(STEPS).train(run_dir=tmp_path, engine="inline", snapshot_every=2, callbacks=[Log("csv")])
    assert lines == {0: 0, 2: 2, 4: 4, 6: 6}


# Writes that fail.

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


class Failing(io.FileIO):
    """A file that takes half of a write, and then no more."""

    number = errno.ENOSPC

    def write(self, data):
        super().write(bytes(data)[: len(data) // 2])
        raise OSError(Failing.number, os.strerror(Failing.number))


class Broken:
    """A disk on which an operation fails while ``on`` holds for the step of the snapshot that is being written."""

    def __init__(self, monkeypatch, operation, number, on):
        self.number, self.on, self.step, self.failed = number, on, None, 0
        write = snapshot.write

        def noted(state, target):
            self.step = state.step
            try:
                write(state, target)
            finally:
                self.step = None

        monkeypatch.setattr(snapshot, "write", noted)
        if operation == "write":
            fdopen = os.fdopen
            monkeypatch.setattr(Failing, "number", number)

            def opened(fd, mode="r", buffering=-1, **options):
                if mode == "wb" and self.due():
                    return io.BufferedWriter(Failing(fd, "wb"), buffering)
                return fdopen(fd, mode, buffering, **options)

            monkeypatch.setattr(os, "fdopen", opened)
            return
        name = operation.split()[0]
        original = getattr(os, name)

        def failing(*arguments, **options):
            meant = True
            if operation == "open":  # tidying up opens folders
                meant = bool(arguments[1] & os.O_CREAT)
            elif operation == "fsync of a folder":
                meant = stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            if meant and self.due():
                raise OSError(number, os.strerror(number))
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, failing)

    def due(self):
        if self.step is None or not self.on(self.step):
            return False
        self.failed += 1
        return True


PLACES = ("mkdir", "open", "write", "fsync", "rename", "fsync of a folder")


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "operation", "number"),
    [
        *cover("failing writes", itertools.product([1], PLACES), ERRORS),
        *sample("failing writes of workers", itertools.product([2], PLACES, [errno.ENOSPC]), 2),
    ],
)
def test_a_write_that_fails_is_told(tmp_path, monkeypatch, wanted, operation, number, workers):
    """A warning says which and why; the run goes on to its digest, older snapshots are whole, and nothing is left."""
    broken = Broken(monkeypatch, operation, number, lambda step: step in (3, 4))
    options = {"engine": "inline"} if workers == 1 else {"engine": "processes", "workers": 2}
    with pytest.warns(UserWarning, match=r"snapshot of step [34] could not be written to .*the run goes on") as told:
        result = norm_recipe(STEPS).train(run_dir=tmp_path, snapshot_every=1, keep_snapshots=9, **options)
    assert len(told) == 2
    assert all(os.strerror(number) in str(warning.message) for warning in told)
    assert broken.failed >= 2
    assert_same(result, wanted)
    assert not list((tmp_path / "snapshots").glob(".tmp-*"))
    assert set(steps_in(tmp_path)) >= {0, 1, 2, 5, 6}
    for step in steps_in(tmp_path):
        assert snapshot.read(folder_of(tmp_path, step)).step == step


@pytest.mark.long
@pytest.mark.parametrize(("operation", "number"), cover("writes that end the run", PLACES, ERRORS))
def test_a_write_that_fails_ends_the_run(tmp_path, monkeypatch, wanted, operation, number):
    """With on_snapshot_error="stop": an error with the state; later, the run goes on from the snapshot before."""
    Broken(monkeypatch, operation, number, lambda step: step == 3)
    options = {"run_dir": tmp_path, "snapshot_every": 1, "engine": "inline"}
    with pytest.raises(phalanx.SnapshotError, match=r"snapshot of step 3 could not be written") as caught:
        norm_recipe(STEPS).train(on_snapshot_error="stop", **options)
    assert caught.value.result.steps >= 3
    assert_same(caught.value.result, norm_recipe(caught.value.result.steps).train(engine="inline"))
    assert not list((tmp_path / "snapshots").glob(".tmp-*"))
    monkeypatch.undo()
    assert_same(norm_recipe(STEPS).train(**options), wanted)


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 4, 5])
@pytest.mark.parametrize("step", [4, 5, STEPS])
def test_no_failure_is_swallowed_at_the_end(tmp_path, monkeypatch, step, every):
    """With "stop", the last snapshots count as much as others: the error comes, and has the trained state."""
    if step % every and step != STEPS:
        pytest.skip("not written there")
    Broken(monkeypatch, "fsync", errno.ENOSPC, lambda now: now == step)
    options = {"run_dir": tmp_path, "snapshot_every": every, "on_snapshot_error": "stop", "engine": "inline"}
    with pytest.raises(phalanx.SnapshotError, match=f"snapshot of step {step} ") as caught:
        norm_recipe(STEPS).train(**options)
    assert caught.value.result is not None
    assert caught.value.result.steps >= step


def test_the_first_snapshot_fails(tmp_path, monkeypatch):
    """A full disk is found before the first step."""
    Broken(monkeypatch, "write", errno.ENOSPC, lambda step: True)
    seen = []
    options = {"on_snapshot_error": "stop", "engine": "inline", "callbacks": [seen.append]}
    with pytest.raises(phalanx.SnapshotError, match="snapshot of step 0 could not be written"):
        norm_recipe(STEPS).train(run_dir=tmp_path, **options)
    assert seen == []
    monkeypatch.undo()
    norm_recipe(1).train(run_dir=tmp_path, engine="inline")


def test_a_disk_that_never_works(tmp_path, monkeypatch, wanted):
    """Each failure is told at the caller's line, and the run ends in its digest."""
    Broken(monkeypatch, "open", errno.EROFS, lambda step: True)
    with pytest.warns(UserWarning, match="could not be written") as told:
        assert_same(norm_recipe(STEPS).train(run_dir=tmp_path, snapshot_every=1, engine="inline"), wanted)
    assert len(told) >= STEPS + 1
    assert {item.filename for item in told} == {__file__}
    assert listed(tmp_path) == {"snapshots": None}


@pytest.mark.long
def test_a_held_run_has_the_error_with_its_state(tmp_path, monkeypatch):
    """Stepping by hand, the error that a snapshot failed has the state too, and the run can be stepped on."""
    Broken(monkeypatch, "fsync", errno.ENOSPC, lambda step: step == 2)
    options = {"run_dir": tmp_path, "snapshot_every": 1, "on_snapshot_error": "stop", "engine": "inline"}
    with norm_recipe(STEPS).start(**options) as run:
        run.step()
        run.step()
        with pytest.raises(phalanx.SnapshotError, match="step 2") as caught:
            run.step()
        assert caught.value.result.steps == 3
        run.finish()
        result = run.result()
    assert_same(result, norm_recipe(STEPS).train(engine="inline"))


def test_preempted_says_only_what_is_true(tmp_path, monkeypatch):
    """If the state could not be saved at SIGTERM, nobody is told that it was."""
    before = signal.getsignal(signal.SIGTERM)
    Broken(monkeypatch, "fsync", errno.ENOSPC, lambda step: step == 3)

    def strike(report):
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(phalanx.RunError) as caught:
            norm_recipe(STEPS).train(run_dir=tmp_path, engine="inline", callbacks=[strike])
    assert "3 steps was saved" not in str(caught.value) or phalanx.load(tmp_path).step == 3
    assert caught.value.result.steps == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_errors_in_the_writer_are_not_lost(tmp_path, monkeypatch):
    """An error that is none of the disk's ends the writing of a snapshot too; it is told, and frees the state."""
    original = snapshot.write

    def write(state, target):
        if state.step == 2:
            raise MemoryError("no room")
        original(state, target)

    monkeypatch.setattr(snapshot, "write", write)
    options = {"run_dir": tmp_path, "snapshot_every": 1, "on_snapshot_error": "stop", "engine": "inline"}
    with pytest.raises(phalanx.SnapshotError, match=r"snapshot of step 2 could not be written.*no room"):
        norm_recipe(STEPS).train(**options)


@pytest.mark.long
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", PLACES)
def test_save_that_fails(tmp_path, monkeypatch, operation, number):
    """run.save raises, leaves nothing that could be taken for a snapshot, and the run goes on."""
    Broken(monkeypatch, operation, number, lambda step: step == 1)
    with norm_recipe(STEPS).start(engine="inline") as run:
        next(run)
        with pytest.raises(phalanx.SnapshotError, match="could not be written"):
            run.save(tmp_path / "saved")
        assert not list(tmp_path.glob(".tmp-*"))
        monkeypatch.undo()
        if not (tmp_path / "saved").exists():  # it may be whole, and only not known to last
            run.save(tmp_path / "saved")
        assert phalanx.load(tmp_path / "saved").step == 1
        run.finish()


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_as_many_are_kept_as_asked_for(tmp_path, keep):
    """The newest stay."""
    norm_recipe(STEPS).train(run_dir=tmp_path, snapshot_every=1, keep_snapshots=keep, engine="inline")
    assert steps_in(tmp_path) == list(range(STEPS + 1))[-keep:]


def test_the_beginning_and_the_end_are_kept(tmp_path):
    """With "auto", a short run has these two."""
    norm_recipe(STEPS).train(run_dir=tmp_path, engine="inline")
    assert steps_in(tmp_path) == [0, STEPS]


@pytest.mark.parametrize("umask", [0, 0o022])
def test_only_the_owner_may_read(tmp_path, umask):
    """Files are 0600, folders 0700, the run's own too, whatever the umask."""
    before = os.umask(umask)
    try:
        norm_recipe(2).train(run_dir=tmp_path / "run", engine="inline")
        with norm_recipe(2).start(engine="inline") as run:
            run.save(tmp_path / "saved")
    finally:
        os.umask(before)
    for top in (tmp_path / "run", tmp_path / "saved"):
        for path in [top, *top.rglob("*")]:
            mode = stat.S_IMODE(path.lstat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), f"{path} is {mode:o}"


@pytest.mark.long
@pytest.mark.parametrize("what", ["a file", "in a file", "read-only"])
def test_directories_that_cannot_be_used(tmp_path, what):
    """One sentence names the argument and why."""
    (tmp_path / "file").write_text("text")
    path = {"a file": "file", "in a file": "file/run", "read-only": "closed/run"}[what]
    (tmp_path / "closed").mkdir(mode=0o500)
    if what == "read-only" and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(phalanx.UsageError, match=r"run_dir is .*cannot be used"):
        norm_recipe(2).train(run_dir=tmp_path / path, engine="inline")
