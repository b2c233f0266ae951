"""The walks of CONTRIBUTING are what a run really does: each file they name is entered, by the process they say."""

import functools

import pytest

from tests.walks import walking

# Files that the caller enters, in a run of eight steps; lower them whenever you can.
ENTERED = {"inline": 53, "workers": 57}
TOLD = functools.cache(walking.entered)
# Of some rows of the guide's table, quick tests that enter all the files of the row.
TRIED = {
    "order of samples, random keys, seeding": [
        "plan/test_order.py::test_without_shuffle_a_long_epoch_takes_no_memory",
        "plan/test_keys.py::test_vectors_are_pinned",
        "engines/test_owned_generators.py::test_generators_have_streams_of_their_own",
    ],
    "what a step is, the order of the fold": [
        "plan/test_fold.py::test_absent_replicas_are_pushed_too",
        "exactness/test_one_replica.py::test_tied_weights_stay_tied",
    ],
    "what lies where in shared memory": [
        "engines/test_state.py::test_places_do_not_overlap",
        "engines/test_state.py::test_the_caller_gets_what_it_put",
        "engines/test_one_writer.py::test_every_role_can_write_its_own_and_nothing_else",
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("job", ENTERED)
def test_a_run_enters_few_files(job):
    """A run in this process, and the caller of one in two workers, enter no more files than they are allowed."""
    paths = TOLD(job)["caller"]
    print(f"{job}: the caller enters {len(paths)} files")
    assert len(paths) <= ENTERED[job], paths


@pytest.mark.long
@pytest.mark.parametrize("job", walking.JOBS)
def test_walks_are_true(job):
    """Each file that a walk names is entered by such a process of a run with workers, in the third after a SIGKILL."""
    found = TOLD(job)
    for number in walking.JOBS[job]:
        walk = walking.walks(walking.GUIDE.read_text())[number]
        print(number + 1, {who: f"{len(walk.get(who, ()))} of {len(paths)} files" for who, paths in found.items()})
        assert walking.missed(walk, found) == [], "python -m tests.walks.walking prints what is entered"


def test_the_guide_has_three_walks():
    """Each names files, and not only of one process."""
    found = walking.walks(walking.GUIDE.read_text())
    assert len(found) == 3
    assert all(paths for walk in found for paths in walk.values())


def test_a_walk_that_is_wrong_is_seen():
    """A file that nobody enters is told, and so is one that another process enters."""
    text = "### A walk\n- **caller**: `run/run.py` asks\n  `step.py`\n- **worker**: `step.py`\n\n### Next\n"
    [walk] = walking.walks(text)
    assert walk == {"caller": ["run/run.py", "step.py"], "worker": ["step.py"]}
    assert walking.missed(walk, {"caller": ["run/run.py"], "worker": ["step.py"]}) == ["caller: step.py"]
    assert walking.missed(walk, {"caller": ["run/run.py", "step.py"], "worker": ["step.py"]}) == []


def test_what_came_before_the_beginning_is_left_out():
    """After the caller began anew, older processes count no more, and a new one is told by what it enters."""
    lines = ["1 ", "1 a.py", "2 ", f"2 {walking.WORKER}", "1 ", "1 b.py", "2 c.py", "3 ", "3 d.py"]
    lines += [f"3 {walking.WORKER}", "4 e.py"]
    found = walking.sorted_out(lines, "1")
    assert found == {"caller": ["b.py"], "worker": ["d.py", walking.WORKER], "zygote": ["e.py"]}


def test_the_table_names_what_exists():
    """Each row of the guide's table names files of the package, and tests, that are there."""
    found = walking.rows(walking.GUIDE.read_text())
    assert len(found) >= 18
    for change, (paths, tests) in found.items():
        assert tests, change
        assert all((walking.ROOT / "src/phalanx" / path).exists() for path in paths if path.endswith(".py")), change
        assert all((walking.HERE.parent / test).exists() for test in tests), change


@pytest.mark.long
def test_tests_of_a_row_enter_its_files():
    """The recorder sees that: of some rows, whose tests are quick."""
    found = walking.rows(walking.GUIDE.read_text())
    entered = {path: change for change in TRIED for path in found[change][0]}
    for change, tests in TRIED.items():
        assert all(any(test.startswith(named) for named in found[change][1]) for test in tests), change
    assert entered.keys() <= walking.entered_by([test for tests in TRIED.values() for test in tests])


def test_a_row_that_names_nothing_is_seen():
    """A cell without a path in it has none, and a word that is no path does not count."""
    text = "| you want | look at | tests |\n|---|---|---|\n| a stream | `run/run.py`, [a](b) | none |\n"
    assert walking.rows(text) == {"a stream": [["run/run.py"], []]}
