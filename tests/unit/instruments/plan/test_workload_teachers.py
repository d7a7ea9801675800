"""Engines of teachers beside the learner, and the policy scored in another precision: memory and seconds by hand."""

import pytest

from megatron_rl.instruments.plan.generation import flops_forward
from megatron_rl.instruments.plan.hardware import GIB, PREFILL_MFU
from megatron_rl.instruments.plan.learner import stage_parameters
from megatron_rl.instruments.plan.memory import MemoryPlan, host_phase, largest_utilization, memory_plan
from megatron_rl.instruments.plan.search import problems
from megatron_rl.instruments.plan.timing import step_time
from tests.support.planned import DENSE, MOE, work
from tests.support.rounding import rounded

EACH = ("batch.filter_groups=false", "batch.max_generations=1", "rollout.tensor_parallel=1")
SHARE = (*EACH, "rollout.gpu_memory_utilization=0.3")
ITEM = "teachers' engines, which stay"
BESIDE = {"learning", "generating", "teaching", "handing over the weights"}


def holding(plan: MemoryPlan) -> dict[str, float]:
    """Bytes of teachers' engines by phase."""
    return {phase.name: dict(phase.items)[ITEM] for phase in plan.phases if ITEM in dict(phase.items)}


@pytest.mark.parametrize(
    ("teacher", "engines"),
    [
        ("teacher={}", 1),
        ("teacher={by_source: [{data_sources: [a]}]}", 2),
        ("teacher={engine: learner}", 0),
        ("teacher={engine: vllm_server, path: model, addresses: ['http://a:1']}", 0),
    ],
)
def test_each_engine_of_a_teacher_keeps_its_share_of_a_gpu(teacher, engines):
    w = work(DENSE, "h100-80", *SHARE, teacher)
    plan, share = memory_plan(w), 0.3 * w.gpu.memory_gib * GIB
    assert holding(plan) == (dict.fromkeys(BESIDE, rounded(engines * share, scale=1e12)) if engines else {})
    assert ("teaching" in {phase.name for phase in plan.phases}) == (engines > 0)
    alone = work(DENSE, "h100-80", *SHARE)
    assert largest_utilization(w) <= largest_utilization(alone) / (1 + engines) + 1e-9


def test_beside_servers_a_teacher_is_on_the_learners_gpus():
    w = work(DENSE, "h100-80", *SHARE, "rollout.engine=vllm_server", "rollout.max_staleness=0", "teacher={}")
    assert set(holding(memory_plan(w))) == {"learning", "teaching"}


def test_what_a_teacher_reads_is_a_pass_of_its_engine_and_logits():
    """Of the tokens that one step computes, in the engine's type and in fp32."""
    w = work(DENSE, "h100-80", *SHARE, "teacher={}", "rollout.max_num_batched_tokens=4096")
    length = w.mean_square / w.mean_sequence
    flops = flops_forward(w.architecture, w.trained_tokens / w.ranks, length, w.gpu.attention_cost)
    plan = memory_plan(w)
    time = step_time(w, plan.engine)
    assert time.teachers == rounded(flops / (w.gpu.flops("bf16") * PREFILL_MFU[False]), scale=1e3)
    assert time.learning == rounded(
        time.old_logprobs + time.teachers + time.update + time.optimizer, scale=time.learning
    )
    (teaching,) = (phase for phase in plan.phases if phase.name == "teaching")
    assert dict(teaching.items)["logits of what a teacher reads"] == 4096 * w.architecture.vocab_size * (2 + 4)


def test_a_share_that_does_not_do_is_refused():
    """Twice half of a GPU beside a learner; and a share that leaves a teacher no cache."""
    half = work(DENSE, "h100-80", *EACH, "rollout.gpu_memory_utilization=0.5", "teacher={}")
    messages = problems(half, memory_plan(half), list)
    assert any(message.startswith("generating: ") for message in messages)
    assert any("with teacher.engine vllm_server they have GPUs of their own" in message for message in messages)
    small = work(DENSE, "h100-80", *EACH, "rollout.gpu_memory_utilization=0.2", "teacher={}")
    assert any("a teacher's cache does not hold" in m for m in problems(small, memory_plan(small), list))


def test_scoring_costs_a_pass_in_its_type_and_weights_for_its_time():
    """No host memory, and no copy: the weights are the policy's."""
    plain, same, wide, seldom = (
        work(MOE, "h100-80", *keys)
        for keys in ((), ("scoring=bf16",), ("scoring=fp32",), ("scoring={dtype: bf16, every: 5}",))
    )
    engine = memory_plan(plain).engine
    times = [step_time(w, engine) for w in (plain, same, wide, seldom)]
    one_pass = step_time(work(MOE, "h100-80", "batch.minibatches=4"), engine).old_logprobs
    assert [time.second_models for time in times[:2]] == [0.0, one_pass]
    assert times[2].second_models > one_pass
    assert times[3].second_models == rounded(one_pass / 5)
    assert len({time.offload for time in times}) == 1
    total = max(stage.total for stage in stage_parameters(plain.architecture, plain.parallel))
    sizes = []
    for w in (same, wide):
        (phase,) = (phase for phase in memory_plan(w).phases if phase.name == "second model")
        sizes.append(dict(phase.items)["its weights and forward pass"])
        assert host_phase(w, memory_plan(w)).items == host_phase(plain, memory_plan(plain)).items
    assert sizes[0] > 2 * total
    assert sizes[1] - sizes[0] >= 2 * total
    assert [phase.name for phase in memory_plan(wide).phases[:2]] == ["learning", "generating"]
    head = work(MOE, "h100-80", "scoring={dtype: bf16, fp32_head: true}")
    assert head.scoring.recipe.precision.fp32_head
