"""What code keeps from chunk to chunk of an evaluation is found over hosts, too."""

import pytest

from tests.callbacks.test_state_in_evaluations import HONEST, job
from tests.hosts.worlds import world

NAMES = ["a model that caches constants"]
CODE = f"""
import warnings
from tests.callbacks.test_state_in_evaluations import HONEST, KEEPING, job
def digest(make_model, metric):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return job(make_model, metric(), workers=4).digest
for name in {NAMES}:
    tried(lambda: digest(*HONEST[name]))
tried(lambda: digest(*KEEPING["a model with a cache"]))
"""


@pytest.mark.longest
def test_a_run_over_hosts_ends_by_it():
    """Who looks first ends the run in both processes; honest code has the digest of one process without a word."""
    found = world(CODE)
    expected = [job(HONEST[name][0], HONEST[name][1](), engine="inline").digest for name in NAMES]
    assert [told[:-1] for told in found] == [expected] * 2
    ends = [told[-1] for told in found]
    assert all("metric 'acc' of samples" in end for end in ends), ends
    assert any(end.startswith("StateError") for end in ends), ends
