"""Sequences between ranks: what a replica learns from is there, bit for bit, and nothing else is."""

import numpy as np
import pytest

from megatron_rl.objective.corrections import smallest_dropped
from megatron_rl.run.recorded_batches import batch_path, delete_batch, load_batch, recorded_steps
from tests.parallel.gloo import run_ranks
from tests.parallel.programs import sequences as programs
from tests.support.rounding import rounded

MODULE = "tests.parallel.programs.sequences"


def run(name: str, world_size: int, **arguments):
    return run_ranks(MODULE, name, world_size, **arguments)


def jobs(world_size: int, wanted: dict[str, tuple[str, dict]]) -> list[dict]:
    return run_ranks("tests.parallel.jobs", "run_jobs", world_size, module=MODULE, jobs=wanted)


@pytest.mark.parametrize(("world_size", "num_replicas"), [(1, 1), (2, 2), (3, 1), (4, 4), (4, 2)])
def test_every_replica_gets_what_it_learns_from_and_nothing_else(world_size, num_replicas):
    wanted = {
        f"{number} sequences, owners {owners}, routes {routes}, exact {exact}, turns {turns}": (
            "exchange",
            {
                "num_replicas": num_replicas,
                "num_sequences": number,
                "owners": owners,
                "routes": routes,
                "exact": exact,
                "turns": turns,
            },
        )
        for number, owners, routes, exact, turns in (
            (1, "in turn", True, False, False),
            (2, "all on one", False, True, False),
            (13, "any", True, False, True),
            (13, "all on one", True, True, False),
            (16, "in turn", False, True, True),
        )
    }
    for results in jobs(world_size, wanted):
        assert results.keys() == wanted.keys()
        for name, result in results.items():
            assert result["wrong"] == [], name


def test_numbers_of_every_item_are_on_every_rank():
    for rank in jobs(4, {str(n): ("numbers", {"num_items": n}) for n in (0, 1, 2, 9)}):
        for number, result in rank.items():
            assert result == [[i, -i / 3] for i in range(int(number))]


def test_rewards_metrics_and_samples_do_not_depend_on_who_holds_what():
    """One rank holds all; three hold some; three hold all, as servers leave it."""
    (alone,) = run("scored", 1, owners=[0, 0, 0, 0])
    assert {raw for raw, _, _ in alone["rewards"]} == {0.0, 1.0}, "right and wrong answers are among them"
    assert alone["metrics"]["response/repetition_frac"] > 0
    assert alone["metrics"]["reward/masked_frac"] == 0.25
    for owners in ([2, 0, 1, 0], [None] * 4, [1] * 4):
        for rank, of_rank in enumerate(run("scored", 3, owners=owners)):
            for name in ("rewards", "metrics", "advantages", "ratios"):
                assert of_rank[name] == alone[name], (owners, rank, name)
            if rank == 0:
                assert of_rank["texts"] == alone["texts"], "the main rank shows them"


M2PO = {"mode": "m2po", "threshold": 0.3}


def test_denominators_are_those_of_all_ranks_together():
    total = sum(s.num_trained for s in programs.whole(9, seed=2, routes=False).sequences)
    for rank in run("denominators", 4, correction={"mode": "mis", "cap": 2.0, "renormalize": True}):
        assert rank["found"] == rank["expected"]
        assert 0 < rank["found"][0] < total, "some tokens are left out, not all"


def test_the_sum_of_the_weights_is_that_of_all_ranks_together():
    """Of float32 weights in float64: each is given exactly, so that only their sum is rounded."""
    total = sum(s.num_trained for s in programs.whole(9, seed=2, routes=False).sequences)
    ranks = run("denominators", 4, correction={"mode": "tis", "cap": 2.0, "normalize": True})
    for rank in ranks:
        tokens, sequences, _, weight_sum, num_weights, _ = rank["found"]
        assert (tokens, sequences, num_weights) == (total, 9, total)
        assert weight_sum == rounded(rank["expected"][3], total)
        assert weight_sum == ranks[0]["found"][3], "every rank divides by the same number"
        assert 0 < weight_sum < 2 * total


def test_the_second_moment_is_that_of_all_ranks_together():
    ranks = run("denominators", 4, correction=M2PO)
    limits = {smallest_dropped(r[k][-1], 0.3).item() for r in ranks for k in r}
    assert len(limits) == 1
    assert 0.3 < limits.pop() < float("inf")
    assert {len(r["found"][-1]) for r in ranks} == {1}, "no rank has the squares of another"


@pytest.mark.parametrize("routes", [False, True])
def test_parts_of_all_ranks_are_the_batch(routes, tmp_path):
    paths = run("record", 3, folder=str(tmp_path), routes=routes)
    assert {*paths} == {str(batch_path(tmp_path, 0))}
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["step_00000000.0000.safetensors", "step_00000000.0001.safetensors", "step_00000000.json"]
    loaded = load_batch(batch_path(tmp_path, 0))
    assert (loaded.policy_version, loaded.metrics) == (5, {"loss": 0.5})
    for sequence, want in zip(loaded.batch.sequences, programs.whole(7, seed=3, routes=routes).sequences, strict=True):
        assert programs.same(sequence, want)
        assert np.array_equal(sequence.current_logprobs, want.inference_logprobs * 3)
        assert (sequence.id, sequence.advantage, sequence.reward) == (want.id, want.advantage, want.reward)


def test_parts_of_old_batches_are_deleted(tmp_path):
    run("record", 3, folder=str(tmp_path), routes=False)
    description = batch_path(tmp_path, 0)
    description.write_text(description.read_text().replace('"kept": true', '"kept": false'))
    batch_path(tmp_path, 1).write_text('{"kept": false, "parts": []}')
    assert delete_batch(tmp_path, 0)
    assert recorded_steps(tmp_path) == [1]
    assert [file.name for file in tmp_path.iterdir()] == [batch_path(tmp_path, 1).name]


def test_a_part_that_cannot_be_written_is_the_error_of_all_and_leaves_nothing(tmp_path):
    messages = run("record_on_a_full_disk", 3, folder=str(tmp_path))
    assert all("File too large" in message for message in messages)
    assert not list(tmp_path.iterdir())
