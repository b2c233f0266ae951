"""What ``make test`` tries: the same every time, each row and column of a cover, and the long tests that are listed."""

import ast
import itertools
import pathlib
import subprocess
import sys

import pytest

from tests import sampling
from tests.sampling import LONG_TESTS, cover, sample

TESTS = pathlib.Path(__file__).parent


def tried(cases):
    """Values of the cases that run every time."""
    assert {mark.name for case in cases for mark in case.marks} <= {"campaign"}
    return [case.values for case in cases if not case.marks]


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_so_many_cases_are_tried(count):
    """All cases are there, in order; ``count`` of them are tried."""
    cases = sample("this test", "abcdefg", count)
    assert [case.values for case in cases] == [(letter,) for letter in "abcdefg"]
    assert len(tried(cases)) == count


def test_the_same_cases_are_tried_in_every_process():
    """Neither the seed of hashes, nor PHALANX_SEED, nor the process changes what is tried; the list's name does."""
    script = "from tests.sampling import sample; print([not case.marks for case in sample('one', range(9), 4)])"
    here = f"{[not case.marks for case in sample('one', range(9), 4)]}\n"
    for seed in "12":
        environment = {"PYTHONHASHSEED": seed, "PHALANX_SEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))}
        command = [sys.executable, "-c", script]
        assert subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True).stdout == here
    assert len({str(tried(sample(name, range(9), 4))) for name in "abcdef"}) > 1


@pytest.mark.parametrize(("rows", "columns"), list(itertools.product([1, 2, 3, 8], repeat=2)))
def test_every_row_and_every_column_is_tried(rows, columns):
    """Each at least once, in as few cases as can be."""
    for number in range(20):
        cases = cover(f"list {number}", range(rows), range(columns))
        pairs = tried(cases)
        assert len(cases) == rows * columns
        assert {row for row, _ in pairs} == set(range(rows))
        assert {column for _, column in pairs} == set(range(columns))
        assert len(pairs) == max(rows, columns)


def test_marks_that_a_case_has_are_kept():
    """A case with a mark and a name of its own keeps both, whether it is tried or not."""
    case = pytest.param(1, 2, marks=pytest.mark.house, id="named")
    [kept], [left] = sample("one case", [case], 1), sample("one case", [case], 0)
    assert (kept.values, kept.id, [mark.name for mark in kept.marks]) == ((1, 2), "named", ["house"])
    assert (left.values, left.id, [mark.name for mark in left.marks]) == ((1, 2), "named", ["house", "campaign"])


class Item:
    """A test as pytest collects it."""

    def __init__(self, name, *marks):
        self.nodeid, self.marks = f"tests/test_it.py::{name}", [getattr(pytest.mark, mark).mark for mark in marks]

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, name):
        self.marks.append(getattr(pytest.mark, name).mark)


def names_tried(items, **listed):
    """Names of those that are tried where so many cases of long tests are listed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "LONG_TESTS", {f"test_it.py::{name}": count for name, count in listed.items()})
        sampling.leave_out(items)
    return [item.nodeid.split("::")[1] for item in items if not item.get_closest_marker("campaign")]


def test_of_long_tests_those_that_are_listed_are_tried():
    """Quick tests are tried, long ones if they are listed, of their cases as many as the list says."""
    cases = [Item(f"cases[{number}]", "longest") for number in range(8)]
    found = names_tried([Item("quick"), Item("listed", "long"), Item("other", "long"), *cases], listed=1, cases=3)
    assert found[:2] == ["quick", "listed"]
    assert len(found) == 5
    assert all(name.startswith("cases") for name in found[2:])


def test_a_case_may_be_listed_by_name():
    """A name with brackets is one case of a long test."""
    cases = [Item(f"cases[{letter}]", "long") for letter in "abc"]
    assert names_tried(cases, **{"cases[b]": 1}) == ["cases[b]"]


def test_a_long_list_of_cases_is_cut():
    """Of a quick test marked ``cases(2)`` two are tried, and of one with fewer all; what is left out stays so."""
    items = [Item(f"many[{number}]") for number in range(6)] + [Item("few[0]")]
    for item in items:
        item.marks.append(pytest.mark.cases(2).mark)
    items[5].add_marker("campaign")
    found = names_tried(items)
    assert len(found) == 3
    assert "few[0]" in found
    assert "many[5]" not in found


def test_of_many_cases_a_night_draws_some():
    """Another seed draws others, and in time all; what is tried every time is never left out."""
    cases = [Item(f"many[{number}]", "campaign") for number in range(9)]
    items = [Item("quick"), Item("alone", "campaign"), *cases]
    drawn = [[item.nodeid for item in sampling.draw(items, 2, str(seed))] for seed in range(40)]
    assert sampling.draw(items, 2, "0") == sampling.draw(items, 2, "0")
    assert all(len(names) == 4 and names[:2] == [items[0].nodeid, items[1].nodeid] for names in drawn)
    assert {name for names in drawn for name in names} == {item.nodeid for item in items}


def test_what_is_listed_exists():
    """Each name of the list is a test of its file."""
    for name in LONG_TESTS:
        file, _, test = name.split("[")[0].partition("::")
        tests = [node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert test in tests, f"{name} is gone: list another test of what it tried"
