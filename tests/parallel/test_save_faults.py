"""A save that fails on one rank fails on all, at once; nobody waits for a rank that has given up."""

import pytest

from tests.parallel.gloo import run_ranks
from tests.parallel.programs.save import PLACES

SAVES = {"save": False, "save beside training": True}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    jobs: dict = {"fail": ("fail_on_one_rank", {})}
    for name, in_background in SAVES.items():
        folder = str(tmp_path_factory.mktemp("checkpoints"))
        jobs[name] = ("save_while_one_rank_cannot", {"folder": folder, "in_background": in_background})
    return run_ranks("tests.parallel.jobs", "run_jobs", 2, module="tests.parallel.programs.save", jobs=jobs)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("place", PLACES)
def test_every_rank_hears_of_it_and_the_older_checkpoint_stays(ranks, place, save):
    failing = place[-1]
    for rank in ranks:
        said = f"rank {failing}: OSError: [Errno 28] No space left on device"
        assert rank[save]["found"][place] == f"the checkpoint of step 2 could not be written: {said}"
        assert rank[save]["found"][place + ", left"] == ["step_00000001"]


@pytest.mark.parametrize("save", SAVES)
def test_the_next_save_is_whole(ranks, save):
    for rank in ranks:
        assert rank[save]["same"]
        assert rank[save]["state"] == {"note": "kept"}
        assert rank[save]["left"] == ["step_00000002"]


def test_a_failure_of_one_rank_is_told_to_all(ranks):
    for rank in ranks:
        assert rank["fail"] == [
            "Fault: rewards: rank 1: RuntimeError: out of order",
            "InputError: out of order",
            "in use",
        ]


def test_a_rank_that_is_frozen_is_not_waited_for_longer_than_the_recipe_says():
    kwargs = {"init_process_group": False, "seconds": 3.0}
    heard, _ = run_ranks("tests.parallel.programs.save", "wait_for_a_frozen_rank", 2, **kwargs)
    assert heard.keys() == {"world", "tensor"}
    assert all("Timed out waiting 3000ms" in text for text in heard.values()), heard
