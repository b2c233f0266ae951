"""What is drawn for a run: as many cases as were asked for, every row and column, and others with another seed."""

import itertools

import pytest

from tests import sampling
from tests.sampling import cover, sample


def drawn(cases):
    """Values of the cases that this run tries; the others are for campaigns."""
    assert {mark.name for case in cases for mark in case.marks} <= {"sampled", "campaign"}
    return [case.values for case in cases if case.marks[-1].name == "sampled"]


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_so_many_cases_are_drawn(count):
    """All cases are there, in order; ``count`` of them are tried, and always the same ones."""
    cases = sample("this test", "abcdefg", count)
    assert [case.values for case in cases] == [(letter,) for letter in "abcdefg"]
    assert len(drawn(cases)) == count
    assert drawn(cases) == drawn(sample("this test", "abcdefg", count))


@pytest.mark.parametrize(("rows", "columns"), list(itertools.product([1, 2, 3, 8], repeat=2)))
def test_every_row_and_every_column_is_drawn(rows, columns):
    """With any seed, each at least once, in as few cases as can be."""
    for number in range(20):
        cases = cover(f"draw {number}", range(rows), range(columns))
        pairs = drawn(cases)
        assert len(cases) == rows * columns
        assert {row for row, _ in pairs} == set(range(rows))
        assert {column for _, column in pairs} == set(range(columns))
        assert len(pairs) == max(rows, columns)


def test_another_seed_draws_others(monkeypatch):
    """Seeds matter: over twenty of them every case comes up."""
    seen = set()
    for seed in range(20):
        monkeypatch.setattr(sampling, "SEED", seed)
        seen.update(drawn(sample("one", range(5), 2)))
    assert seen == {(number,) for number in range(5)}


def test_marks_that_a_case_has_are_kept():
    """A case with a mark and a name of its own keeps both."""
    (case,) = sample("one case", [pytest.param(1, 2, marks=pytest.mark.house, id="named")], 1)
    assert (case.values, case.id, [mark.name for mark in case.marks]) == ((1, 2), "named", ["house", "sampled"])


class Item:
    """A test as pytest collects it."""

    def __init__(self, name, *marks):
        self.nodeid, self.marks = f"tests/test_it.py::{name}", list(marks)

    def get_closest_marker(self, name):
        return name in self.marks

    add_marker = property(lambda self: self.marks.append)


def rotated(monkeypatch, seed):
    """Names of tests that this seed draws, of a folder with seven that take long; the others are for campaigns."""
    monkeypatch.setattr(sampling, "SEED", seed)
    items = [Item("quick"), Item("cases[0]", "long"), Item("cases[1]", "long"), Item("cases[2]", "long", "campaign")]
    items += [Item(letter, "long") for letter in "abcdef"]
    sampling.rotate(items)
    assert items[0].marks == []
    assert items[3].marks == ["long", "campaign"]
    assert all(item.marks[1:] in (["sampled"], ["campaign"]) for item in items[1:])
    return {item.nodeid.split("::")[1] for item in items if "sampled" in item.marks}


def test_tests_that_take_long_rotate(monkeypatch):
    """Two of seven are drawn, with all their cases that were; the same with the same seed, each with some seed."""
    runs = [rotated(monkeypatch, seed) for seed in range(30)]
    assert runs[0] == rotated(monkeypatch, 0)
    assert all(len({name.split("[")[0] for name in names}) == 2 for names in runs)
    assert all(("cases[0]" in names) == ("cases[1]" in names) for names in runs)
    assert set.union(*runs) == {"cases[0]", "cases[1]", *"abcdef"}


def test_one_alone_in_its_folder_always_runs():
    """No folder loses its only test."""
    alone = Item("alone", "long")
    sampling.rotate([alone])
    assert alone.marks == ["long", "sampled"]
