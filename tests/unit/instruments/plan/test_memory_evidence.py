"""What `plan` says of `recorder.evidence`: bytes of a recorded batch, disk, and at most 1% of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.config.rollout import SPARE_CANDIDATES
from megatron_rl.instruments.plan import GPUS, make_plan, make_workload
from megatron_rl.instruments.plan.hardware import GIB
from megatron_rl.instruments.plan.learner import checkpoint_cost
from megatron_rl.instruments.plan.memory import (
    EvidenceCost,
    batch_size,
    evidence_cost,
    host_phase,
    kept_set_size,
    memory_plan,
    own_code,
)
from megatron_rl.instruments.plan.report import render
from megatron_rl.instruments.plan.timing import step_time
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import read_architecture, shape_of
from megatron_rl.run.recorded_batches import record_batch
from tests.support.rounding import rounded
from tests.support.routes import random_routes, with_routes
from tests.support.tiny import MODEL, REPOSITORY, stored_rollouts, tiny_recipe
from tests.unit.instruments.plan.test_memory_own_code import R3
from tests.unit.instruments.plan.test_report import work

OFF = REPOSITORY / "recipes" / "router_replay" / "grpo-qwen3-30b-a3b-4n8g-tp4ep8-off.yaml"  # with telemetry
CHECKPOINT = 2.0**40


def cost(planned: Workload) -> EvidenceCost:
    return evidence_cost(planned, own_code(planned), CHECKPOINT)


@pytest.mark.parametrize(
    ("routing", "minibatches", "top_k"),
    [
        ({}, 1, 0),
        ({}, 2, 0),
        ({"telemetry": True}, 1, 0),
        ({"telemetry": True}, 2, 4),
        ({"replay": "r2"}, 1, 0),  # R2's routes are of the pass for old log-probs
    ],
)
def test_a_batch_has_the_planned_bytes(tmp_path, routing, minibatches, top_k):
    batch = stored_rollouts(0, minibatches=minibatches)
    for s in batch.sequences:
        s.current_logprobs = s.inference_logprobs
        s.old_logprobs = s.inference_logprobs if minibatches > 1 or "replay" in routing else None
        s.kept_tokens = np.zeros((s.length, top_k + SPARE_CANDIDATES), np.int32) if top_k else None
    if routing:
        with_routes(batch, random_routes(batch))
    arrays = load_file(record_batch(tmp_path, batch, 0).with_suffix(".safetensors"))
    responses = sum(s.length for s in batch.sequences)
    rollout = {"num_samples": 2} | ({"kept_sets": True, "top_k": top_k} if top_k else {})
    planned = replace(
        work(OFF),
        recipe=tiny_recipe(batch={"prompts": 12, "minibatches": minibatches}, rollout=rollout, routing=routing),
        architecture=read_architecture(MODEL),
        mean_response=responses / 24,
        mean_prompt=(batch.num_tokens - responses) / 24,
    )
    starts = 2 * 8  # the 0 at the start of both lists of ends
    assert batch_size(planned) + starts == rounded(float(sum(array.nbytes for array in arrays.values())))


def test_disk_and_seconds():
    """Four nodes write, and eight replicas copy and hash."""
    costs, planned = cost(work(R3)), work(R3)
    (recorder,) = [stage.seconds for stage in own_code(planned).stages if stage.name == "recorder"]
    assert costs.batch == batch_size(planned)
    assert costs.batches == 12
    assert costs.disk == 12 * costs.batch
    assert costs.after_alarm == 24 * costs.batch + CHECKPOINT
    assert costs.seconds == rounded(recorder + costs.batch / 4 / 2e9)


def test_the_disk_is_bounded():
    limit = 3.5 * batch_size(work(R3)) / GIB
    assert cost(work(R3, "h100-80", f"recorder.evidence.max_gib={limit}")).batches == 3
    assert cost(work(R3, "h100-80", "recorder.evidence.max_gib=0.1")).batches == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("recorder.evidence=null",), EvidenceCost(0.0, 0, 0.0, 0.0)),
        (("recorder.evidence=null", "recorder.record_batches=all"), EvidenceCost(0.0, 0, 0.0, 0.0)),
    ],
)
def test_turned_off_it_costs_nothing(settings, expected):
    assert cost(work(R3, "h100-80", *settings)) == expected


def test_our_own_code_has_the_recorder_only_where_it_records():
    off = own_code(work(R3, "h100-80", "recorder.evidence=null"))
    on = own_code(work(R3))
    assert [stage.name for stage in off.aside] == ["recorder"]
    assert on.aside == []
    assert on.seconds == rounded(off.seconds + off.aside[0].seconds)


def test_without_periodic_checkpoints_none_is_kept():
    costs = cost(work(R3, "h100-80", "checkpoint.every=0"))
    assert costs.after_alarm == 2 * costs.disk


@pytest.mark.parametrize(
    ("prompts", "response", "nodes"), [(128, 8192, 4), (512, 32512, 32)], ids=["2048x8k-32", "8192x32k-256"]
)
def test_it_takes_a_hundredth_of_a_step_at_most(prompts, response, nodes):
    overrides = (f"batch.prompts={prompts}", f"rollout.max_response_length={response}", "data.prompt.max_length=256")
    planned = work(R3, "h100-80", *overrides, nodes=nodes, mean_response=response, mean_prompt=256)
    costs = cost(planned)
    assert 0 < costs.seconds <= 0.01 * step_time(planned, memory_plan(planned).engine).total
    assert costs.disk <= 128 * GIB or costs.batches == 1


def test_the_command_prints_it(capsys):
    assert main(["plan", str(OFF), "--gpu", "h100-80", "--json"]) == 0
    assert '"evidence": {' in (text := capsys.readouterr().out)
    recipe = load_recipe(OFF)
    planned = make_workload(recipe, shape_of(recipe.model.path)[0], GPUS["h100-80"])
    kept = evidence_cost(planned, own_code(planned), checkpoint_cost(planned).size * planned.ranks).after_alarm
    assert f'"after_alarm": {kept}' in text


ALONE = ("learner.parallel.tensor=1", "batch.minibatches=2")  # what router_shift wants
PROPOSED = ("acceptance.tolerance=0.1", "data.validation=m.jsonl")


def test_what_remedies_keep_on_the_host_is_counted():
    """A proposed update: weights, moments and masters of every rank of a node. RSPO: 6 bytes a token, layer and expert
    of its 8; each rank has those of its replica."""
    plain = work(R3, "h100-80", *ALONE)
    shifted, proposed = (
        work(R3, "h100-80", *ALONE, "objective.router_shift=0.8"),
        work(R3, "h100-80", *ALONE, *PROPOSED),
    )
    items = [dict(host_phase(planned, memory_plan(planned)).items) for planned in (plain, shifted, proposed)]
    (scores,) = items[1].keys() - items[0].keys()
    tokens = shifted.trained_tokens / shifted.data_parallel * shifted.gpus_per_node
    assert items[1][scores] == rounded(tokens * 48 * 8 * 6, roundings=4)
    (snapshot,) = items[2].keys() - items[0].keys()
    learner = memory_plan(proposed).learner
    assert items[2][snapshot] == 8 * (learner.weights + learner.moments + learner.masters)


KEPT = ("rollout.kept_sets=true", "rollout.top_k=100", "rollout.top_p=0.9")


def test_kept_sets_take_116_numbers_a_token():
    """100 and 16 spare ones, of 4 bytes. Each rank has those of its replica: eight replicas of four ranks."""
    sets = [planned.recipe.rollout.candidates for planned in (work(R3), work(R3, "h100-80", *KEPT))]
    assert sets == [0, 116]
    planned = work(R3, "h100-80", *KEPT)
    tokens = planned.recipe.num_sequences * planned.mean_response
    assert kept_set_size(planned) == tokens * 116 * 4
    items = dict(host_phase(planned, memory_plan(planned)).items)
    (name,) = (name for name in items if "kept_sets" in name)
    assert f"{tokens * 464 / 1e9:.1f} GB a step" in name
    assert items[name] == tokens * 464 / 8 * 8
    without = host_phase(work(R3), memory_plan(work(R3)))
    assert not [name for name, _ in without.items if "kept_sets" in name]
    assert name in render(make_plan(planned), detail=True)


def test_more_tokens_a_step_leave_less_cache():
    """`rollout.max_num_batched_tokens` replaces vLLM's default, of which an engine's activations are."""
    double, default = work(R3, "h100-80", "rollout.max_num_batched_tokens=32768"), work(R3)
    assert default.gpu.batched_tokens == 16384
    assert memory_plan(double).engine.activations > memory_plan(default).engine.activations
    assert memory_plan(double).engine.tokens < memory_plan(default).engine.tokens
