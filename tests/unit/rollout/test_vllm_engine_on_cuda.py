"""vLLM's own configuration classes take what we start engines with on CUDA, for every recipe at paper scale.

The platform is CUDA with the device's answers replaced (`tests.support.cuda_platform`); one process makes all
configurations. No engine is started and no kernel runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.rollout import ON_CUDA
from megatron_rl.model.architecture import shape_of
from megatron_rl.rollout.engine_arguments import VLLM_DTYPE
from tests.support import cuda_platform
from tests.support.patience import PATIENCE_S
from tests.support.slow import asked, slow_but
from tests.support.tiny import REPOSITORY

pytestmark = pytest.mark.skipif(cuda_platform.MISSING is not None, reason=str(cuda_platform.MISSING))

PLAN = re.compile(r"# Plan: (\d+) × (\S+):")
PLACES = ("learner", "server")
SAMPLING = ("engine", "num_samples", "temperature", "top_p", "top_k", "stop_token_ids", "deadline_s", "verify_refit")
SCHEDULING = ("max_staleness", "servers")
"""Keys of `rollout` that no engine is started with."""
MUTATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"enable_sleep_modes": True}, "enable_sleep_modes"),
    "not a value": ({"logprobs_mode": "processed"}, "logprobs_mode"),
    "does not divide": ({"tensor_parallel_size": 3}, "must be divisible by tensor parallel size"),
    "not on this device": ({"block_size": 3}, "[Bb]lock"),
    "longer than the model": ({"max_model_len": 10**6}, "max_model_len"),
}


def cases() -> dict[str, dict[str, Any]]:
    """One for each distinct section `rollout` with what else reaches the engine, by the name of its first recipe."""
    cases_by_name: dict[str, dict[str, Any]] = {}
    for file in sorted((REPOSITORY / "recipes").rglob("*.yaml")):
        if (plan := PLAN.search(file.read_text())) is None:
            continue
        recipe, (ranks, gpu) = load_recipe(file), plan.groups()
        parts = recipe.model_dump(mode="json", include={"rollout", "precision", "model"})
        parts["rollout"] = {k: v for k, v in parts["rollout"].items() if k not in SAMPLING + SCHEDULING}
        key = json.dumps([parts, recipe.data.prompt.max_length, recipe.routing.needs_engine_routes, plan.groups()])
        if recipe.rollout.engine != "exact":
            cases_by_name.setdefault(key, {"recipe": str(file), "ranks": int(ranks), "gpu": gpu})
    return {str(Path(case["recipe"]).relative_to(REPOSITORY / "recipes")): case for case in cases_by_name.values()}


def first_of_each() -> list[str]:
    """The first case of every GPU, engine, type, size of the tensor-parallel group, quantization, and with routes."""
    first: dict[tuple[str, Any], str] = {}
    for name, case in CASES.items():
        recipe = load_recipe(case["recipe"])
        rollout = recipe.rollout
        about = {
            "gpu": case["gpu"],
            "engine": rollout.engine,
            "dtype": rollout.dtype,
            "ranks": rollout.tensor_parallel,
            "weights": rollout.quantization.weights,
            "routes": recipe.routing.needs_engine_routes,
        }
        for value in about.items():
            first.setdefault(value, name)
    return list(dict.fromkeys(first.values()))


KERNELS = [
    (gpu, dtype, changed)
    for gpu in cuda_platform.DEVICES
    for dtype, changed in (("bf16", False), ("fp16", False), ("fp32", False), ("fp16", True))
]
"""GPU, `rollout.dtype`, and whether vLLM is left to choose."""


def kernel_case(gpu: str, dtype: str, changed: bool) -> dict[str, Any]:
    recipe = next(case["recipe"] for case in CASES.values() if "30b-a3b" in case["recipe"])
    changes = {"moe_backend": "auto", "attention_backend": None} if changed else {}
    keys = [f"rollout.dtype={dtype}", "rollout.tensor_parallel=1"]
    return {"place": "learner", "gpu": gpu, "recipe": recipe, "ranks": 1, "set": keys, "changes": changes}


CASES = cases()
FIRST = next(iter(CASES))


@pytest.fixture(scope="module")
def started(request) -> dict[tuple[str, str], dict[str, Any]]:
    """(place, recipe or mutation) → what vLLM made of it, for those that the tests of this run ask for."""
    wanted = {}
    for place, name in asked(request, "place", "name"):
        changes = {"changes": MUTATIONS[name][0]} if name in MUTATIONS else {}
        wanted[place, name] = {"place": place, **CASES[FIRST if changes else name], **changes}
    wanted |= {("kernels", *case): kernel_case(*case) for case in asked(request, "gpu", "dtype", "changed")}
    for where, path, alone in asked(request, "where", "path", "alone"):
        for try_ in NODES:
            case = CASES[path] | {"place": where, "everything": True, "nvcc": try_ == "nvcc", "left alone": alone}
            wanted["node", where, path, alone, try_] = case
    command = [sys.executable, "-m", "tests.unit.rollout.programs.vllm_on_cuda"]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        input=json.dumps(list(wanted.values())),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(wanted, json.loads(done.stdout), strict=True))


NODES = ("no nvcc", "nvcc", "no nvcc again")
SUMS = [(place, name, False) for place in PLACES for name in first_of_each()]
ALL_SUMS = [(place, name, False) for place in PLACES for name in CASES]


def of_path(started: dict, *case: Any) -> dict[str, tuple[str, str]]:
    """What a compiler on PATH changes in vLLM's configuration; names that differ without one are numbers drawn."""
    found = [started["node", *case, try_] for try_ in NODES]
    assert [one.get("error") for one in found] == [None] * len(NODES)
    bare, with_nvcc, again = (one["everything"] for one in found)
    return {name: (bare[name], with_nvcc[name]) for name in bare if bare[name] == again[name] != with_nvcc[name]}


@pytest.mark.parametrize(("where", "path", "alone"), slow_but(SUMS, ALL_SUMS))
def test_no_choice_of_vllm_depends_on_path(started, where, path, alone):
    assert of_path(started, where, path, alone) == {}


SHARED = next(
    name
    for name, case in CASES.items()
    if case["gpu"] == "h100-80" and load_recipe(case["recipe"]).rollout.tensor_parallel > 1
)


@pytest.mark.parametrize(("where", "path", "alone"), [("learner", SHARED, True)])
def test_left_alone_vllm_fuses_sums_where_it_finds_a_compiler(started, where, path, alone):
    """It then loads the fusion's kernels, which a build for CPUs does not have."""
    bare, with_nvcc, _ = (started["node", where, path, alone, try_] for try_ in NODES)
    assert bare["everything"]["compilation_config.pass_config.fuse_allreduce_rms"] == "False"
    assert "no attribute 'rotary_embedding'" in with_nvcc["error"]


def expected(recipe: Recipe, place: str, ranks: int) -> dict[str, Any]:
    rollout = recipe.rollout
    rounds = rollout.quantization.of_weights if rollout.quantization.weights else None
    in_a_rank = "ExecutorWithExternalLauncher" if ranks > 1 else "UniProcExecutor"
    in_a_server = "MultiprocExecutor" if rollout.tensor_parallel > 1 else "UniProcExecutor"
    return {
        "error": None,
        "shadowed": [],
        "device": "cuda",
        "second runner": True,
        "async scheduling": True,
        "graphs": "FULL_AND_PIECEWISE",
        "eager": False,
        "sleep mode": place == "learner",
        "routes": recipe.routing.needs_engine_routes,
        "logprobs": "processed_logprobs",
        "dtype": VLLM_DTYPE[rollout.dtype],
        "length": recipe.data.prompt.max_length + rollout.max_response_length,
        "seed": rollout.seed,
        "tensor parallel": rollout.tensor_parallel,
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        "executor": in_a_rank if place == "learner" else in_a_server,
        "sequences": rollout.max_num_seqs,
        "utilization": rollout.gpu_memory_utilization,
        "quantization": None if rounds is None else [ON_CUDA[rounds], ["*.mlp.gate", "*.mlp.shared_expert_gate"]],
        "cache type": "fp8" if rollout.quantization.kv_cache else "auto",
        "cache bytes": None if rollout.kv_cache_gib is None else int(rollout.kv_cache_gib * 2**30),
        "prefix caching": True,
        "weight transfer": {"learner": "megatron_rl_stream", "server": "megatron_rl_servers"}[place],
        "attention": "TRITON_ATTN" if rollout.dtype == "fp32" else "FLASH_ATTN",
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", slow_but(first_of_each(), CASES))
def test_vllm_takes_what_we_start_it_with(started, name, place):
    case = CASES[name]
    recipe = load_recipe(case["recipe"])
    wanted = expected(recipe, place, case["ranks"])
    if shape_of(recipe.model.path)[0].latent is not None:
        del wanted["attention"]  # vLLM chooses among those for latent attention
    got = started[place, name]
    assert {key: got.get(key) for key in wanted} == wanted


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", MUTATIONS)
def test_an_argument_that_vllm_does_not_know_or_take_is_seen(started, name, place):
    assert re.search(MUTATIONS[name][1], started[place, name].get("error", "")), started[place, name]


def test_both_devices_of_the_papers_are_among_the_cases():
    assert {case["gpu"] for case in CASES.values()} == {"h100-80", "a100-80"}


@pytest.mark.parametrize(("gpu", "dtype", "changed"), KERNELS)
def test_every_gpu_has_the_same_kernels(started, gpu, dtype, changed):
    """Left to itself, vLLM takes FlashInfer's experts on Blackwell, in every type, and they refuse all but bf16."""
    got = started["kernels", gpu, dtype, changed]
    assert got.get("error") is None
    attention = "TRITON_ATTN" if dtype == "fp32" else "FLASH_ATTN"
    if changed:
        blackwell = gpu == "b200"
        assert (got["experts"], got["asked attention"]) == ("FLASHINFER_TRTLLM" if blackwell else "TRITON", None)
    else:
        asked = None if dtype == "fp32" else attention
        assert (got["experts"], got["attention"], got["asked attention"]) == ("TRITON", attention, asked)
