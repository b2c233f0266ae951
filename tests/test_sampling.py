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
        self.nodeid, self.marks = f"tests/test_it.py::{name}", [getattr(pytest.mark, mark).mark for mark in marks]

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, name):
        self.marks.append(getattr(pytest.mark, name).mark)

    @property
    def drawn(self):
        """Whether it is tried; and the draw has left it one mark, or none."""
        added = [mark.name for mark in self.marks if mark.name in ("sampled", "campaign")]
        assert len(added) <= 1
        return added != ["campaign"]


def rotated(monkeypatch, seed):
    """Names of tests that this seed draws, of a folder with thirteen that take long."""
    monkeypatch.setattr(sampling, "SEED", seed)
    items = [Item("quick"), Item("eight[other]", "long", "campaign")]
    items += [Item(letter, "long") for letter in "abcdefghijkl"] + [Item(f"eight[{case}]", "long") for case in range(8)]
    sampling.rotate(items)
    assert items[0].drawn
    assert not items[1].drawn
    return {item.nodeid.split("::")[1] for item in items[2:] if item.drawn}


def test_tests_that_take_long_rotate(monkeypatch):
    """Two of thirteen are drawn, of one with eight cases two; the same with the same seed, each with some seed."""
    runs = [rotated(monkeypatch, seed) for seed in range(300)]
    assert runs[0] == rotated(monkeypatch, 0)
    assert all(len({name.split("[")[0] for name in names}) == 2 for names in runs)
    assert {len([name for name in names if "[" in name]) for names in runs} == {0, 2}
    assert set.union(*runs) == {*"abcdefghijkl", *(f"eight[{case}]" for case in range(8))}


def test_what_takes_longest_rotates_as_one(monkeypatch):
    """Two of seventeen are drawn, from whatever folders; what else takes long there has a draw of its own."""
    seen = set()
    for seed in range(100):
        monkeypatch.setattr(sampling, "SEED", seed)
        items = [Item(f"longest {number}", "longest") for number in range(17)] + [Item("alone", "long")]
        apart = [Item("apart", "longest", "accelerator"), Item("quick and apart", "accelerator")]
        for number, item in enumerate(items):
            item.nodeid = item.nodeid.replace("tests", f"tests/{number % 3}")
        sampling.rotate(items + apart)
        assert all(item.drawn for item in apart)
        drawn = {item.nodeid for item in items if item.drawn}
        assert items[-1].nodeid in drawn
        assert len(drawn) == 3
        seen |= drawn
    assert seen == {item.nodeid for item in items}


def test_one_alone_in_its_folder_always_runs():
    """No folder loses its only test."""
    alone = Item("alone", "long")
    sampling.rotate([alone])
    assert alone.drawn


@pytest.mark.parametrize("also", [[], ["long"]])
def test_cases_of_a_long_list_rotate(monkeypatch, also):
    """So many cases as the mark says, or all where there are fewer; each case with some seed, others left alone."""
    seen = set()
    for seed in range(30):
        monkeypatch.setattr(sampling, "SEED", seed)
        items = [Item(f"listed[{case}]", *also) for case in range(6)]
        for item in items:
            item.marks.append(pytest.mark.cases(2).mark)
        items[5].add_marker("campaign")
        few = [Item(f"few[{case}]") for case in range(2)]
        for item in few:
            item.marks.append(pytest.mark.cases(3).mark)
        sampling.rotate(items + few)
        assert all(item.drawn for item in few)
        drawn = {item.nodeid for item in items if item.drawn}
        assert len(drawn) == 2
        seen |= drawn
    assert seen == {item.nodeid for item in items[:5]}
