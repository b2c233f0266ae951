import pytest

from tests.state.runs import NEWER, OLDER, norm_recipe, steps_in


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A directory with two snapshots."""
    run_dir = tmp_path_factory.mktemp("good") / "run"
    norm_recipe(NEWER).train(run_dir=run_dir, snapshot_every=2, keep_snapshots=2, engine="inline")
    assert steps_in(run_dir) == [OLDER, NEWER]
    return run_dir
