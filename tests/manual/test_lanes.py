"""Lanes: replicas are dealt to devices, and devices compute at the same time."""

import threading
import time

import pytest

from phalanx.surroundings import lanes
from phalanx.surroundings.lanes import Lane


def test_replicas_are_dealt_by_device():
    """Each device is one lane with its replicas in order; the first lane has replica 0."""
    assert lanes.dealt(["b", "a", "b"]) == [Lane("b", (0, 2)), Lane("a", (1,))]


def test_a_lone_lane_runs_in_the_calling_thread():
    """With one device there is no other thread, and nothing is handed on."""
    seen = lanes.run(lanes.dealt(["a"] * 3), lambda lane: (lane.replicas, threading.get_ident()), around=lambda _: None)
    assert seen == [((0, 1, 2), threading.get_ident())]


def test_several_lanes_run_at_the_same_time():
    """Each lane waits until all have begun, and what they return comes in their order."""
    barrier = threading.Barrier(3, timeout=60)

    def computed(lane):
        barrier.wait()
        return lane.device

    assert lanes.run(lanes.dealt(["c", "a", "b"]), computed) == ["c", "a", "b"]


def test_the_first_error_comes_when_all_have_ended():
    """Of several errors the first in the order of lanes is raised, and by then no lane computes any more."""
    ended = []
    first_may_fail, last_began = threading.Event(), threading.Event()

    def computed(lane):
        if lane.device == "a":
            assert first_may_fail.wait(60)
            assert last_began.wait(60)
            raise ValueError("a")
        if lane.device == "b":
            first_may_fail.set()
            raise ValueError("b")
        last_began.set()
        time.sleep(0.1)
        ended.append(lane.device)

    with pytest.raises(ValueError, match=r"^a$"):
        lanes.run(lanes.dealt(["a", "b", "c"]), computed)
    assert ended == ["c"]
