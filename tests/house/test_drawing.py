"""The drawing of the rooms shows what the imports say: whoever changes them draws it again, or this fails."""

from __future__ import annotations

import pytest
import rooms

pytestmark = pytest.mark.house

AGAIN = "python tests/house/rooms.py draws it again"
HOUSE = {"roof": {"floor", "ground"}, "floor": {"ground"}, "shed": {"ground"}, "ground": set[str]()}


def test_the_document_says_what_the_imports_say():
    """docs/rooms.md has every room of today with its imports of today."""
    assert rooms.PAGE.read_text(encoding="utf-8") == rooms.page(rooms.rooms()), AGAIN


def test_the_picture_is_of_these_rooms():
    """docs/rooms.svg carries the signature of today's rooms, and shows all their names."""
    picture = rooms.PICTURE.read_text(encoding="utf-8")
    assert rooms.signature(rooms.rooms()) in picture, AGAIN
    assert [room for room in rooms.rooms() if room != rooms.EVERYBODYS and f">{room}</text>" not in picture] == []


def test_a_changed_import_changes_the_drawing():
    """One import more makes another document and another signature."""
    graph = rooms.rooms()
    changed = {**graph, "step": graph["step"] | {"shared"}}
    assert rooms.page(changed) != rooms.page(graph)
    assert rooms.signature(changed) != rooms.signature(graph)


def test_only_arrows_that_say_something_are_drawn(tmp_path):
    """An arrow that follows from two others is left out, rooms stand above what they import, and the file is stable."""
    assert rooms.levels(HOUSE) == {"roof": 2, "floor": 1, "shed": 1, "ground": 0}
    assert rooms.reduced(HOUSE) == {"roof": {"floor"}, "floor": {"ground"}, "shed": {"ground"}, "ground": set()}
    tall = {**HOUSE, "tower": {"shed", "roof"}}
    assert rooms.ways(tall)["tower", "shed"] == ["tower", ("tower", "shed", 2), "shed"]
    spots = rooms.places(tall)
    assert spots["roof"][1] > spots["floor"][1] == spots["shed"][1] > spots["ground"][1]
    assert len(set(spots.values())) == len(spots)
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    rooms.draw(tall, first)
    rooms.draw(tall, second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_text(encoding="utf-8").count(">tower</text>") == 1
