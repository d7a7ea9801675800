"""`plan`: parameter counts, memory and time against closed forms, and refusals that say what to do."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest

from megatron_rl.__main__ import main
from megatron_rl.checkpoint.hf_folder import model_shapes
from megatron_rl.config import load_recipe
from megatron_rl.config.learner import LoraConfig, ParallelConfig
from megatron_rl.instruments.plan import GPUS, make_plan, make_workload, summary
from megatron_rl.instruments.plan.hardware import ALLOCATOR, GIB, PROCESS_GIB
from megatron_rl.instruments.plan.learner import (
    active_parameters,
    adapter_parameters,
    checkpoint_cost,
    learner_memory,
    stage_parameters,
    total_parameters,
)
from megatron_rl.instruments.plan.memory import memory_plan
from megatron_rl.instruments.plan.report import render
from megatron_rl.instruments.plan.timing import num_tensors
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from, read_architecture, shape_of
from megatron_rl.model.families import FAMILIES
from megatron_rl.rollout.servers.weight_broadcast import CHUNK_BYTES, NUM_BUFFERS
from tests.support.planned import DENSE, MOE, STAYS, work
from tests.support.rounding import printed, rounded
from tests.support.tiny import MODEL, REPOSITORY

STAYS_FLAGS = [argument for setting in STAYS for argument in ("--set", setting)]


# ---------------------------------------------------------------- parameters
def test_published_sizes():
    """Totals as the checkpoints' own cards state them."""
    published = {
        "Qwen3-30B-A3B": "30.5",
        "Qwen3-4B-Base": "4.0",
        "Qwen3-8B-Base": "8.2",
        "Qwen3-14B-Base": "14.8",
        "DeepSeek-R1-Distill-Qwen-1.5B": "1.78",
        "Qwen2.5-Math-1.5B": "1.54",
        "OctoThinker-3B-Hybrid-Base": "3.21",
        "Qwen1.5-MoE-A2.7B": "14.3",
        "GLM-4.5-Air": "106.9",  # "106B" on its card
        "DeepSeek-V3": "671",
        "Kimi-K2-Instruct": "1026",  # "1T" on its card
        "OLMoE-1B-7B-0924": "6.9",
        "gpt-oss-20b-bf16": "20.91",
        "gpt-oss-120b-bf16": "116.83",
        "Ling-mini-2.0": "16.26",
        "Moonlight-16B-A3B": "15.96",  # "15.29B", without embeddings, and "16B"
    }
    for name, billions in published.items():
        total = total_parameters(architecture_from(KNOWN_MODELS[name])) / 1e9
        assert total == printed(float(billions), len(billions.partition(".")[2])), name


def test_count_is_that_of_a_checkpoint():
    from safetensors import safe_open

    architecture = read_architecture(MODEL)
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    count = sum(math.prod(shape) for shape in shapes)
    assert total_parameters(architecture) == count
    assert num_tensors(architecture) == len(shapes)
    idle = 4 * 3 * 128 * 64 * (8 - 2)
    assert active_parameters(architecture) == count - idle - 128 * 128


@pytest.mark.parametrize("name", [next(iter(family.known)).rpartition("/")[2] for family in FAMILIES.values()])
def test_count_is_that_of_the_table_of_weights(name):
    architecture = architecture_from(KNOWN_MODELS[name])
    shapes = model_shapes(architecture).values()
    biases = sum(architecture.moe_layers) * architecture.num_experts * architecture.sigmoid_router  # not trained
    assert total_parameters(architecture) == sum(math.prod(shape) for shape in shapes) - biases
    assert num_tensors(architecture) == len(shapes)


@pytest.mark.parametrize("name", ["Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "Qwen3-4B-Base", "Qwen3-14B-Base"])
def test_shards_add_up(name):
    """All ranks of a layout together hold the model once, but for what every tensor rank repeats."""
    a = architecture_from(KNOWN_MODELS[name])
    whole = stage_parameters(a, ParallelConfig())[0]
    staged = stage_parameters(a, ParallelConfig(pipeline=2))
    again = a.vocab_size * a.hidden_size if a.tie_embeddings else 0  # the last stage's copy of the tied table
    assert sum(stage.total for stage in staged) == whole.total + again
    sharded = stage_parameters(a, ParallelConfig(tensor=4))[0]
    of_heads, routers = 2 * a.head_dim * a.qk_layernorm, (a.num_experts + a.shared_expert_gate) * a.hidden_size
    repeated = a.num_layers * (2 * a.hidden_size + of_heads + routers) + a.hidden_size
    assert 4 * sharded.dense == whole.dense + 3 * repeated
    if a.is_moe:
        assert stage_parameters(a, ParallelConfig(expert=8, expert_tensor=2))[0].expert * 16 == whole.expert


def test_adapters_of_experts():
    a = architecture_from(KNOWN_MODELS["Qwen3-30B-A3B"])
    h, q, kv, f, r = 2048, 4096, 512, 768, 8
    parallel = ParallelConfig(tensor=4, expert=8, pipeline=2)
    attention = r * (h + (q + 2 * kv) // 4) + r * (q // 4 + h)
    expert = r * (h + 2 * f) + r * (f + h)
    for stage in stage_parameters(a, parallel):
        assert adapter_parameters(a, LoraConfig(rank=r), parallel, stage) == (24 * attention, 24 * 16 * expert)


def test_adapters_of_latent_vectors_and_shared_experts():
    a = architecture_from(KNOWN_MODELS["DeepSeek-V3"])
    h, heads, r = 7168, 128, 8
    parallel = ParallelConfig(tensor=4, expert=8)
    (stage,) = stage_parameters(a, parallel)
    queries = (h + 1536) + (1536 + heads * 192 // 4)
    keys = (h + 512 + 64) + (512 + heads * 256 // 4)
    attention = r * (queries + keys + (heads * 128 // 4 + h))

    def block(width: int) -> int:
        return r * (h + 2 * width // 4) + r * (width // 4 + h)

    dense = 61 * attention + 3 * block(18432) + 58 * block(2048)
    expert = 58 * 32 * r * (h + 2 * 2048 + 2048 + h)
    assert adapter_parameters(a, LoraConfig(rank=r), parallel, stage) == (dense, expert)


# ---------------------------------------------------------------- memory
def test_static_memory_of_a_rank():
    """2 bytes of weights, 4 of gradients; 12 of Adam over the ranks that share a weight: 8 for dense, 4 for experts."""
    w = work()
    stage = stage_parameters(w.architecture, w.parallel)[0]
    memory = memory_plan(w).learner
    assert memory.weights == 2 * stage.total
    assert memory.gradients == 4 * stage.total
    assert memory.moments + memory.masters == 12 * (stage.dense / 8 + stage.expert / 4)
    (fp32,) = learner_memory(w.architecture, w.recipe.learner.model_copy(update={"dtype": "fp32"}), 32, 1024)
    assert (fp32.weights, fp32.masters) == (2 * memory.weights, 0)


def test_context_parallel_ranks_share_a_row_and_adams_states():
    """Half of the tokens in half of the replicas: activations and communication of the row are halved, Adam's shards
    stay, and every rank gets the other's keys and values."""
    one = work()
    two = one.with_keys("learner", parallel=one.parallel.model_copy(update={"context": 2}))
    assert (two.data_parallel, two.microbatch_tokens) == (one.data_parallel // 2, one.microbatch_tokens)
    a, b = (memory_plan(w).learner for w in (one, two))
    assert (a.weights, a.gradients, a.moments, a.masters) == (b.weights, b.gradients, b.moments, b.masters)
    assert a.activations == 2 * b.activations
    row = two.microbatch_tokens // 2
    others = 4 * row * 2 * 2 * 4 * 128 / 4  # k, v and gradients; two turns; 4 heads over TP4
    assert b.buffers == row * 2048 * 2 + others


def test_long_sequences_are_planned_with_context_parallelism():
    long = ("rollout.max_response_length=30720", "learner.max_tokens_per_microbatch=32768", "learner.recompute=none")
    wide = {layout.parallel.context for layout in make_plan(work(MOE, "h100-80", *long)).layouts}
    assert wide == {1, 2, 4, 8}
    assert {layout.parallel.context for layout in make_plan(work(DENSE)).layouts} == {1, 2}, "short sequences"


def test_recomputation_and_microbatches_move_memory_as_they_should():
    def dynamic(**changes) -> float:
        return memory_plan(work(DENSE).with_keys("learner", **changes)).learner.dynamic

    assert dynamic(recompute="none") > 3 * dynamic(recompute="full")
    assert 1.5 * dynamic() < dynamic(max_tokens_per_microbatch=32768) <= 2 * dynamic()  # twice, but for what is fixed
    assert dynamic(recompute="selective") == dynamic(recompute="none")  # a dense model has no experts to recompute
    moe = work().with_keys("learner", recompute="selective")
    assert (
        memory_plan(moe).learner.dynamic
        < 0.6 * memory_plan(work().with_keys("learner", recompute="none")).learner.dynamic
    )


def test_first_stage_keeps_most_microbatches():
    stages = learner_memory(
        work().architecture,
        work().recipe.learner.model_copy(update={"parallel": ParallelConfig(pipeline=4)}),
        4,
        8192,
        8,
    )
    kept = [stage.activations for stage in stages]
    assert kept[0] > 3.5 * kept[2] / 2
    assert [stage.head > 0 for stage in stages] == [False, False, False, True]


def test_cache_holds_what_is_left():
    w = work()
    engine = memory_plan(w).engine
    per_token = 2 * 48 * 1 * 128 * 2  # keys and values, layers, one of 4 heads a rank, width, bytes
    assert engine.token_bytes == per_token
    budget = 0.4 * 79.1 * 2**30
    assert engine.tokens == int((budget - engine.weights - engine.activations - engine.graphs) // per_token)
    assert engine.weights * 4 / 2 / 1e9 == printed(30.53, 2)
    fixed = memory_plan(work(MOE, "h100-80", "rollout.kv_cache_gib=2")).engine
    assert fixed.cache == 2 * 2**30


def test_a_cache_of_latent_vectors_is_whole_on_every_rank_of_an_engine():
    recipe = REPOSITORY / "recipes" / "families" / "grpo-moonlight-16b-a3b-1n8g-tp2ep8-r3-tis.yaml"
    assert memory_plan(work(recipe)).engine.token_bytes == 27 * (512 + 64) * 2  # layers, vector and shared key, bytes


def test_placements():
    engines = (
        ["vllm"],
        ["vllm_server", "rollout.servers.count=4", "rollout.gpu_memory_utilization=0.9"],
        ["exact", "rollout.tensor_parallel=1"],
    )
    here, servers, exact = (memory_plan(work(DENSE, "h100-80", "rollout.engine=" + e, *more)) for e, *more in engines)
    at_rest = dict(here.phases[1].items)["learner at rest"]
    assert at_rest == here.learner.static
    assert servers.engine.tokens > here.engine.tokens
    assert "learner at rest" not in dict(servers.phases[1].items)
    assert exact.engine is None
    assert exact.phases[0].total < here.phases[0].total  # no engine asleep beside it


def test_weights_that_are_broadcast_to_servers_need_room_for_two_chunks():
    servers = ("rollout.engine=vllm_server", "rollout.servers.count=4")
    kinds = [
        memory_plan(work(MOE, "h100-80", *servers, f"rollout.servers.weights={w}")) for w in ("broadcast", "files")
    ]
    sent, through_files = (dict(plan.phases[0].items) for plan in kinds)
    assert sent.pop("weights on their way to servers") == NUM_BUFFERS * CHUNK_BYTES["cuda"]
    assert sent == through_files


def test_servers_that_sample_ahead_hide_the_shorter_of_generating_and_learning():
    servers = ("rollout.engine=vllm_server", "rollout.servers.count=4", "rollout.gpu_memory_utilization=0.9")
    plans = [make_plan(work(MOE, "h100-80", *servers, f"rollout.max_staleness={k}")) for k in (0, 1)]
    apart, ahead = (plan.time for plan in plans)
    learning = apart.learning
    assert apart.total == rounded(apart.generate + learning + apart.refit)
    assert ahead.total == rounded(max(ahead.generate, learning) + apart.refit)
    line = f"{-min(ahead.generate, learning):8.1f} s  generating and learning at the same time (rollout.max_staleness)"
    assert [line in render(plan, detail=True) for plan in plans] == [False, True]


# ---------------------------------------------------------------- offload
ASIDE = [f"learner.offload.{part}=true" for part in ("gradients", "optimizer", "weights", "during_passes")]


def at_rest(w: Workload) -> float:
    (generating,) = (phase for phase in memory_plan(w).phases if phase.name == "generating")
    return dict(generating.items)["learner at rest"]


def test_what_leaves_is_not_there_while_the_engine_generates():
    """32 ranks, experts over 8 of them: see `test_static_memory_of_a_rank`."""
    stage = stage_parameters(work().architecture, work().parallel)[0]
    sizes = [4 * stage.total, 12 * (stage.dense / 8 + stage.expert / 4), 2 * stage.total]
    assert at_rest(work()) == rounded(sum(sizes))
    for size, setting in zip(sizes, ASIDE[:3], strict=True):
        assert at_rest(work(MOE, "h100-80", setting)) == rounded(sum(sizes) - size)
    assert at_rest(work(MOE, "h100-80", *ASIDE)) == 0


def test_states_and_activations_are_not_there_together():
    """One node: Adam's states are most of a rank, so the update is the peak, without activations."""
    settings = ["rollout.gpu_memory_utilization=0.3", *ASIDE[:2]]
    together = memory_plan(work(MOE, "h100-80", *settings, nodes=1))
    apart = memory_plan(work(MOE, "h100-80", *settings, ASIDE[3], nodes=1))
    saved = dict(together.phases[0].items)["activations and temporaries"] - apart.learner.optimizer
    assert together.learner.states > together.learner.passes
    assert together.phases[0].total - apart.phases[0].total == rounded((1 + ALLOCATOR[1]) * saved)
    assert dict(apart.phases[0].items)["optimizer states"] == apart.learner.states


def test_host_memory_of_a_node(capsys):
    """Eight ranks of one node hold 12 bytes of every weight, 2 for the weights, responses and a checkpoint."""
    node = [str(MOE), "--gpu", "h100-80", "--nodes", "1", *(a for s in ASIDE for a in ("--set", s))]
    plan = make_plan(work(MOE, "h100-80", *ASIDE, nodes=1))
    learner = plan.memory.learner
    saved = checkpoint_cost(plan.work).host
    assert plan.host.total == rounded(8 * (learner.states + learner.weights + PROCESS_GIB * GIB) + 8 * saved)
    assert 12 * 30.5e9 < 8 * learner.states < 12 * 30.6e9 + 8 * 12 * 1e6, "norms and routers are on several ranks"
    assert main(["plan", *node]) == 0
    needed = plan.host.total / GIB
    assert main(["plan", *node, "--host-memory", str(needed + 1)]) == 0
    message = error_of(capsys, *node, "--host-memory", str(needed - 60))
    assert "host memory: " in message
    assert ", 60 GiB more than the " in message
    assert "Turn off learner.offload.weights or learner.offload.optimizer" in message


def test_heads_take_a_kibibyte_a_token_at_128():
    """On the host 8 bytes of each of k tokens for every sampled one; on the GPU those of one update of a replica."""
    centred = ("objective.policy_term=reinforce", "objective.score_centering=true", "rollout.sampled_head=128")
    without, beside = (
        make_plan(work(MOE, "h100-80", "objective.policy_term=reinforce")),
        make_plan(work(MOE, "h100-80", *centred)),
    )
    host = dict(beside.host.items)["heads of sampled tokens, 1024 bytes each"]
    w = beside.work
    assert host == rounded(1024 * w.sampled_sequences * w.mean_response / w.nodes)
    assert beside.host.total - without.host.total == rounded(host, scale=beside.host.total)
    sizes = [dict(plan.memory.phases[0].items) for plan in (without, beside)]
    tokens = w.recipe.num_sequences * w.mean_response / w.recipe.batch.minibatches / w.data_parallel
    assert sizes[1].pop("heads") == rounded(128 * (12 * tokens + 44 * w.microbatch_tokens))
    assert sizes[0] == sizes[1]
    kept = ("rollout.top_k=20", "rollout.top_p=0.9", "rollout.kept_sets=true", "rollout.sampled_head=20")
    planned = make_plan(work(MOE, "h100-80", *centred, *kept))
    assert f"heads of sampled tokens, {8 * 36} bytes each" in dict(planned.host.items)
    clipped = make_plan(work(MOE, "h100-80", *centred, "objective.policy_term=ppo_clip", "batch.minibatches=4"))
    assert f"heads of sampled tokens, {12 * 128} bytes each" in dict(clipped.host.items)  # and log po of each


def test_sets_of_a_teacher_take_eight_bytes_a_token_of_theirs():
    keys = ("teacher.engine=learner", "batch.filter_groups=false", "batch.max_generations=1")
    plans = [make_plan(work(MOE, "h100-80", *keys, f"teacher.top_k={k}")) for k in (0, 16)]
    w, host = plans[1].work, dict(plans[1].host.items)["a teacher's sets, 128 bytes a token"]
    assert host == rounded(128 * w.sampled_sequences * w.mean_response / w.nodes)
    assert plans[1].host.total - plans[0].host.total == rounded(host, scale=plans[1].host.total)
    sizes = [dict(plan.memory.phases[0].items) for plan in plans]
    tokens = w.recipe.num_sequences * w.mean_response / w.recipe.batch.minibatches / w.data_parallel
    assert sizes[1].pop("sets") == rounded(16 * (12 * tokens + 60 * w.microbatch_tokens))
    assert sizes[0] == sizes[1]


def test_the_report_says_what_each_setting_gains():
    plan = make_plan(work(MOE, "h100-80", *ASIDE, "rollout.gpu_memory_utilization=0.8", nodes=1))
    text = render(plan, detail=True)
    rows = re.findall(r"^  (none|[gowP]+) +[\d.]+ +([\d.]+) +(\d+) +([\d.]+) +(\d+); ", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["none", "g", "go", "goP", "gow", "gowP"]
    rest, tokens, host = ([float(row[i]) for row in rows] for i in (1, 2, 4))
    assert rest == sorted(rest, reverse=True)
    assert tokens[:3] == sorted(tokens[:3])
    assert host == sorted(host)
    assert "gowP" in next(line for line in text.splitlines() if line.endswith("← the recipe's"))
    assert re.search(rf"{plan.time.offload:8.1f} s .* copies to and from host memory \(learner.offload\)", text)
    assert summary(plan).endswith(
        f"{plan.time.offload:.1f} s of it offload, {plan.host.total / GIB:.0f} GiB of host memory a node"
    )


def error_of(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def test_what_does_not_fit_is_refused_with_what_to_do(capsys):
    message = error_of(
        capsys, str(DENSE), "--gpu", "h100-80", *STAYS_FLAGS, "--set", "rollout.gpu_memory_utilization=0.85"
    )
    missing = float(re.search(r"generating: .* GiB a GPU, ([\d.]+) GiB more than the 79.1", message)[1])
    assert 5 < missing < 20
    remedy = re.search(r"gpu_memory_utilization to at most ([\d.]+)", message)[1]
    share = f"rollout.gpu_memory_utilization={remedy}"
    assert main(["plan", str(DENSE), "--gpu", "h100-80", *STAYS_FLAGS, "--set", share]) == 0
    settings = re.search(r"let the learner leave: ((?:--set \S+ ?)+)", message)[1].rstrip(".;").split()
    own = ["--set", "rollout.gpu_memory_utilization=0.85"]
    assert main(["plan", str(DENSE), "--gpu", "h100-80", *own, *settings]) == 0


def test_too_large_a_microbatch_is_refused_with_one_that_fits(capsys):
    large = ["--set", "learner.recompute=none", "--set", "learner.max_tokens_per_microbatch=32768"]
    message = error_of(capsys, str(DENSE), "--gpu", "a100-80", *large)
    assert "learning: " in message
    assert "set learner.recompute: full" in message
    tokens = re.search(r"max_tokens_per_microbatch to (\d+)", message)[1]
    for remedy in ("learner.recompute=full", f"learner.max_tokens_per_microbatch={tokens}"):
        assert main(["plan", str(DENSE), "--gpu", "a100-80", *large, "--set", remedy]) == 0
    more = work(DENSE, "a100-80", "learner.recompute=none", f"learner.max_tokens_per_microbatch={int(tokens) + 1024}")
    assert not memory_plan(more).phases[0].is_sure


def test_plan_needs_neither_torch_nor_an_engine():
    program = (
        "import sys; from megatron_rl.__main__ import main; "
        f"status = main(['plan', {str(MOE)!r}, '--gpu', 'h100-80']); "
        "print([m for m in ('torch', 'vllm', 'megatron', 'transformers') if m in sys.modules]); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


# ---------------------------------------------------------------- sampling
def test_a_round_longer_than_its_deadline_does_not_pass():
    (problem,) = make_plan(work(MOE, "h100-80", "rollout.deadline_s=1")).problems
    assert re.fullmatch(r"generating: \d+ s a round, longer than rollout.deadline_s \(1\).*", problem)
    assert make_plan(work(MOE, "h100-80", "rollout.deadline_s=null")).problems == []
    assert main(["plan", str(MOE), "--gpu", "h100-80", "--set", "rollout.deadline_s=1"]) != 0


def test_a_weight_update_holds_the_experts_of_a_layer():
    """Qwen3-30B-A3B, bf16: a projection of 128 experts is 0.375 GiB. Three stacks, one more beside the last of them,
    and a quarter of a layer in an engine of 4 GPUs: 1.78 GiB, where two tables of the vocabulary are 1.16."""
    recipe = load_recipe(REPOSITORY / "recipes/router_replay/grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml")
    dense = load_recipe(REPOSITORY / "recipes/length_decay/rloo-qwen3-8b-base-2n8g-tp4-auto.yaml")
    sizes = {}
    for name, wanted in (("moe", recipe), ("dense", dense)):
        work = make_workload(wanted, shape_of(wanted.model.path)[0], GPUS["h100-80"])
        (phase,) = (phase for phase in memory_plan(work).phases if phase.name == "handing over the weights")
        sizes[name] = dict(phase.items)["on their way"]
    projection = 128 * 2048 * 768 * 2
    assert sizes["moe"] == rounded(4 * projection + 3 * projection / 4)
    assert 2 * 151936 * 2048 * 2 / GIB < 1.2 < 1.6 < sizes["moe"] / GIB < 2
    assert sizes["dense"] == rounded(2 * 151936 * 4096 * 2)
