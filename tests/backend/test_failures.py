"""When ranks fail, or call what does not fit together: an error on every rank that lives, within seconds."""

import json
import pathlib
import signal

import pytest

from phalanx.backend import memory, progress
from phalanx.errors import UsageError
from tests.sampling import cover


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "count", "how"),
    cover("dead ranks", [(2, 1), (2, 2_000_000), (3, 2_000_000)], ["between", "within", "leaves"]),
)
def test_a_dead_rank_is_an_error_on_all_others(ran, size, count, how):
    """SIGKILL of a rank between or in the middle of all-reduces, or its quiet end, ends all others with an error."""
    codes, told = ran(size, "failures.dies", count, how)
    ended = 0 if how == "leaves" else -signal.SIGKILL
    assert codes == [0] * (size - 1) + [ended], "\n".join(told)


@pytest.mark.long
def test_a_dead_sender_is_an_error(ran):
    """Who waits for a message from a dead rank is told."""
    codes, told = ran(2, "failures.sender_dies")
    assert codes == [-signal.SIGKILL, 0], told


@pytest.mark.long
@pytest.mark.parametrize("kind", ["size", "kind", "op", "dtype", "moved dtype", "root"])
def test_ranks_that_differ_are_told(right, kind):
    """Different collectives, sizes, operations, dtypes or roots: an error that says what each does, and no hang."""
    right(2, "failures.differing", kind)


@pytest.mark.long
@pytest.mark.parametrize("job", ["late", "differing_sparse", "refused", "wrong_length", "broken_off", "destroyed"])
def test_other_mistakes(right, job):
    """Ranks that come late, calls that cannot be, messages of another length, Ctrl-C, groups destroyed too early."""
    right(2, f"failures.{job}")


@pytest.mark.long
@pytest.mark.parametrize("how", ["queue", "send", "poll"])
def test_a_death_is_noticed_behind_others(ran, how):
    """Also by those who wait for something later in the line, or only ask whether it is done."""
    codes, told = ran(2, "failures.queued", how)
    assert codes == [0, -signal.SIGKILL], told


@pytest.mark.campaign
def test_a_death_is_noticed_beside_a_slow_rank(ran):
    """One rank is dead, another busy."""
    codes, told = ran(3, "failures.slow_and_dead")
    assert codes == [0, 0, -signal.SIGKILL], told


def test_anybody_may_have_left(right):
    """Receiving from anybody fails only when nobody is left."""
    right(3, "failures.from_who_is_left")


class Store(dict):
    """As much of a store as joining takes."""

    def set(self, key, value):
        self[key] = value

    def get(self, key):
        return self[key]

    def add(self, key, amount):
        self[key] = self.get(key) + amount if key in self else amount
        return self[key]

    def wait(self, keys):
        assert set(keys) <= set(self)


@pytest.mark.parametrize("changed", [{"where": "another boot", "host": "other"}, {"uid": 4}])
def test_several_hosts_are_refused(changed):
    """Ranks that cannot share memory are refused with the reason, before anything is opened."""
    mine = {"host": "here", "where": memory._where(), "uid": __import__("os").getuid(), "pid": 1, "fd": 3}
    store = Store({"1 rank 1": json.dumps(mine | changed)})
    with pytest.raises(UsageError, match=r"rank 1 runs on .* one host, one user.*gloo"):
        memory.join(store, 0, 2)


def test_only_the_expected_memory_is_opened(tmp_path):
    """A store cannot make a rank map some file of its own."""
    with (tmp_path / "file").open("wb") as file:
        pathlib.Path(file.name).write_bytes(b"x" * 100)
        with pytest.raises(UsageError, match="is not the memory that rank 0 shares"):
            memory._opened(__import__("os").getpid(), file.fileno(), 100)


@pytest.mark.long
def test_nothing_is_left(right):
    """After groups ended, well or not, no process, name in /dev/shm or file remains."""
    before = set(pathlib.Path("/dev/shm").iterdir())
    right(2, "failures.late")
    assert set(pathlib.Path("/dev/shm").iterdir()) == before


def test_what_nobody_waited_for_yet_is_kept_for_old_torch(monkeypatch):
    """Torch 2.6 hands Work to C++ without its Python part: it lives until it was waited for, and no longer."""

    class Done:
        done, error, queue = True, None, None

    monkeypatch.setattr(progress, "KEEPS", True)
    work = progress.Work(Done(), 1.0, [])
    assert set(progress.UNAWAITED) == {work}
    work.wait()
    assert not progress.UNAWAITED
    monkeypatch.setattr(progress, "KEEPS", False)
    progress.Work(Done(), 1.0, [])
    assert not progress.UNAWAITED
