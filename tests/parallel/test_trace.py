"""`megatron-rl trace` over all recipes at paper scale: `plan` says what the real learner holds, and saves fit.

Recipes whose learners have the same shape are traced once. Two cases have all their layers, and those are slow; the
others have a few: every kind of memory grows by the same bytes with each layer.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.instruments.trace import why_untraced
from megatron_rl.model.architecture import shape_of
from tests.parallel.programs.trace import workload
from tests.support.slow import slow_but
from tests.support.tiny import REPOSITORY
from tests.support.zygote import run_command, zygote

RECIPES = REPOSITORY / "recipes"
PAPER = [path for path in sorted(RECIPES.rglob("*.yaml")) if re.search(r"\dn\dg", path.name)]
MOE = str(RECIPES / "router_replay" / "grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml")
DENSE = {
    name: str(RECIPES / path)
    for name, path in {
        "8b": "length_decay/rloo-qwen3-8b-base-2n8g-tp4-auto.yaml",
        "14b": "fp16/dapo-qwen3-14b-8n8g-tp4.yaml",
    }.items()
}
LORA = str(RECIPES / "fp16" / "lora-grpo-tis-qwen2.5-math-1.5b-1n8g-dp8.yaml")
GIB = 1 << 30


def learner_shape(path: Path) -> tuple:
    """What decides about bytes and collectives of a learner."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = load_recipe(path)
    learner, size = recipe.learner, re.search(r"(\d+)n(\d+)g", path.name)
    ranks, p = int(size[1]) * int(size[2]), learner.parallel
    layout = (p.tensor, p.pipeline, p.context, p.expert, p.expert_tensor)
    architecture = str(shape_of(recipe.model.path)[0])
    return recipe.rollout.engine == "exact", architecture, ranks, layout, learner.dtype, str(learner.lora)


SHAPES: dict[tuple, Path] = {}
for _path in PAPER:
    SHAPES.setdefault(learner_shape(_path), _path)
BUILT = {str(path.relative_to(RECIPES)): path for shape, path in SHAPES.items() if not shape[0]}
EXACT = {str(path.relative_to(RECIPES)): path for shape, path in SHAPES.items() if shape[0]}

CASES: dict[str, dict[str, Any]] = {
    "30b": {"recipe": MOE, "checkpoint_format": "fully_reshardable"},
    "30b, four layers": {"recipe": MOE, "layers": 4, "checkpoint_format": "fully_reshardable"},
    "8b": {"recipe": DENSE["8b"]},
    "8b, three layers": {"recipe": DENSE["8b"], "layers": 3},
    "pipeline": {"recipe": MOE, "layers": 4, "overrides": ["learner.parallel.pipeline=4"]},
    "last rank": {"recipe": MOE, "layers": 1, "ranks": [31]},
    "fp32": {"recipe": DENSE["8b"], "layers": 1, "overrides": ["learner.dtype=fp32", "rollout.dtype=fp32"]},
    "bucket format": {"recipe": MOE, "layers": 1, "checkpoint_format": "dp_reshardable"},
    **{name: {"recipe": str(path), "layers": 1} for name, path in BUILT.items()},
}
PASSES: dict[str, tuple[str, list[str]]] = {
    "no recomputation": (MOE, ["learner.recompute=none"]),
    "selective recomputation": (MOE, ["learner.recompute=selective"]),
    "full recomputation": (MOE, []),
    "experts cut in tensors": (MOE, ["learner.recompute=none", "learner.parallel.expert_tensor=4"]),
    "context": (MOE, ["learner.recompute=none", "learner.parallel.context=2"]),
    "dense": (DENSE["8b"], ["learner.recompute=none"]),
    "fp16": (DENSE["14b"], ["learner.recompute=none"]),
    "adapters": (LORA, []),
}
CASES |= {
    name: {"recipe": recipe, "layers": 2, "overrides": overrides, "passes": True}
    for name, (recipe, overrides) in PASSES.items()
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Mapping[str, dict[str, Any]]:
    """Each case is traced when it is first asked for."""
    folder = tmp_path_factory.mktemp("trace")

    class Traced(dict):
        def __missing__(self, case: str) -> dict[str, Any]:
            out = folder / f"{len(self)}.json"
            arguments = {"cases": [CASES[case]], "out": str(out)}
            child = zygote().start("tests.parallel.programs.trace", "trace_all", arguments, log=folder / "log")
            assert child.wait() == 0, child.output
            (self[case],) = json.loads(out.read_text())
            return self[case]

    return Traced()


def test_every_paper_recipe_has_the_shape_of_a_case():
    assert len(PAPER) > 60
    assert {learner_shape(path) for path in PAPER} == {learner_shape(p) for p in (*BUILT.values(), *EXACT.values())}


@pytest.mark.parametrize("case", slow_but(["8b, three layers", "no recomputation"], CASES))
def test_plan_says_what_the_learner_holds(traced, case):
    for rank in traced[case]["traces"]:
        kinds = {kind: size for kind, size in rank["static"].items() if kind != "other"}
        assert {"weights", "gradients", "master weights", "moments", "all static"} == kinds.keys()
        assert all(size["holds"] for size in kinds.values()), rank
        # Rotary frequencies, loss scale and steps: nothing large is without a name.
        assert 0 <= rank["static"]["other"]["traced"] < 1e-3 * kinds["all static"]["traced"]


@pytest.mark.parametrize(
    ("case", "layers"), slow_but([("30b, four layers", 4)], [("30b, four layers", 4), ("30b", 48)]), ids=str
)
def test_a_save_of_the_moe_recipe(traced, case, layers):
    """Must hold: Megatron's reshardable state gathers all experts of a rank in fp32, one kind of state at a time,
    beside the share that is sent: 4 bytes a parameter, and a quarter of it on 4 ranks that share the experts."""
    (rank,) = traced[case]["traces"]
    experts = layers * 128 // 8 * 3 * 2048 * 768
    save = rank["phases"]["checkpoint"]
    assert save["device_transient"] == experts * 4 + experts
    assert layers < 48 or round(save["device_transient"] / GIB) == 17
    gathered = [call for call in save["collectives"] if call["group"] == "expert_data_parallel"]
    assert gathered == [
        {"kind": "allgather", "group": "expert_data_parallel", "group_size": 4, "count": 3, "bytes": 3 * experts * 4}
    ]
    assert rank["checkpoint"]["fits"] == (save["device_transient"] <= rank["checkpoint"]["free_beside_sleeping_engine"])


@pytest.mark.slow
def test_a_runs_own_save_takes_nothing_on_the_device_and_asks_no_other_rank(traced):
    for case in CASES:
        a = shape_of(load_recipe(CASES[case]["recipe"]).model.path)[0]
        biases = 4 * a.num_experts * a.sigmoid_router  # of one router at a time
        for rank in traced[case]["traces"]:
            if rank["checkpoint"]["format"] == "own":
                save = rank["phases"]["checkpoint"]
                assert save["device_transient"] <= biases, case
                assert not save["collectives"], case
                assert rank["checkpoint"]["fits"], case


def test_the_bucket_format_gathers_nothing(traced):
    (rank,) = traced["bucket format"]["traces"]
    assert not [call for call in rank["phases"]["checkpoint"]["collectives"] if call["kind"] != "allgather_object"]
    assert rank["checkpoint"]["fits"]


def test_weights_to_the_engine_are_whole_tensors_of_the_model(traced):
    """The largest of them, gathered and joined: the table of the vocabulary, twice."""
    (rank,) = traced["8b, three layers"]["traces"]
    sent = rank["phases"]["weights to the engine"]
    assert sent["device_transient"] == pytest.approx(2 * 151936 * 4096 * 2, rel=0.01)
    assert sum(call["count"] for call in sent["collectives"]) == 3 * 4 + 2  # parameters that ranks share


def test_ranks_of_a_pipeline(traced):
    stages = traced["pipeline"]["traces"]
    assert [(rank["rank"], rank["stage"], rank["num_layers"]) for rank in stages] == [(0, 0, 1), (8, 1, 1), (24, 3, 1)]
    first, middle, last = (rank["parameters"] for rank in stages)
    table = 151936 // 4 * 2048
    assert (first - middle, last - middle) == (table, table + 2048)


@pytest.mark.parametrize("case", slow_but(["no recomputation", "full recomputation"], PASSES))
def test_plan_says_what_a_forward_and_a_backward_pass_add(traced, case):
    (rank,) = traced[case]["traces"]
    passes = rank["passes"]
    assert passes["traced"] == pytest.approx(passes["planned"], rel=0.05)


@pytest.mark.slow
def test_recomputation_is_traced(traced):
    """The agreement is not that of a constant: what is not recomputed is kept."""
    full, selective, none = (
        traced[name]["traces"][0]["passes"]["traced"]
        for name in ("full recomputation", "selective recomputation", "no recomputation")
    )
    assert full < selective < none


def test_collectives_of_an_update(traced):
    """Two layers, 16 experts on a rank. The 4 ranks that share experts add their gradients in fp32 and hand weights
    out in 16 bits. Expert-parallel ranks exchange k rows of a token with k probabilities, take the rows back, and
    exchange the gradients of all three."""
    (rank,) = traced["no recomputation"]["traces"]
    experts, tokens, row = 2 * 16 * 3 * 2048 * 768, 16384 // 4, 2 * 2048
    calls = {
        (name, call["kind"], call["group"]): call
        for name in ("forward and backward", "update")
        for call in rank["phases"][name]["collectives"]
    }
    assert calls["forward and backward", "reduce_scatter", "expert_data_parallel"]["bytes"] == 4 * experts
    gathered = calls["update", "allgather", "expert_data_parallel"]
    assert gathered["bytes"] == gathered["count"] * 2 * experts
    exchanged = calls["forward and backward", "alltoall", "expert_model_parallel"]
    rows = 2 * 8 * tokens  # of both layers
    assert (exchanged["count"], exchanged["bytes"]) == (2 * 6, 4 * rows * row + 2 * rows * 2)


@pytest.mark.parametrize("kind", ["weights", "gradients", "moments", "masters"])
@pytest.mark.parametrize("factor", [0.94, 1.06])
def test_a_plan_that_is_wrong_by_six_percent_is_found(traced, monkeypatch, kind, factor):
    from megatron_rl.instruments import trace as tracing

    (rank,) = traced["8b, three layers"]["traces"]
    static = {name: size["traced"] for name, size in rank["static"].items() if name != "all static"}
    trace = tracing.RankTrace(0, 16, 0, 3, rank["parameters"], "own", static)
    work = workload(DENSE["8b"], 3, [])
    assert not [line for line in tracing.compare_static(work, trace) if not line.holds]
    (stage,) = tracing.learner_stages(work)
    wrong = replace(stage, **{kind: factor * getattr(stage, kind)})
    monkeypatch.setattr(tracing, "learner_stages", lambda work: [wrong])
    lines = {line.kind for line in tracing.compare_static(work, trace) if not line.holds}
    assert lines == {"master weights" if kind == "masters" else kind}


STREAM = """
import torch
from megatron_rl.process.devices import leave_default_stream
from megatron_rl.instruments.fake_rank import fake_rank
with fake_rank(0, 1, None):
    leave_default_stream(torch.device("cuda"))
"""


def test_a_traced_learner_leaves_the_default_stream():
    """In a process of its own: vLLM, where it was imported, has replaced `torch.cuda.set_stream` already."""
    done = subprocess.run([sys.executable, "-c", STREAM], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command(tmp_path):
    recipe = "recipes/fp16/lora-grpo-tis-qwen2.5-math-1.5b-1n8g-dp8.yaml"
    done = run_command("megatron_rl", ["trace", recipe, "--json", "--rank", "7"], tmp_path)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["traces"]
    assert rank["rank"] == 7
    done = run_command("megatron_rl", ["trace", recipe, "--rank", "8"], tmp_path)
    assert (done.returncode, "--rank 8; the job has ranks 0 to 7" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("recipe", "overrides", "reason"),
    [
        (MOE, [], ""),
        (DENSE["8b"], [], ""),
        (MOE, ["learner.parallel.pipeline=4"], "stages of a pipeline"),
        (MOE, ["learner.parallel.expert=1"], "without expert parallelism"),
        (str(next(iter(EXACT.values()))), [], "exact mode reads the lengths"),
    ],
)
def test_an_update_that_needs_values_is_not_traced(recipe, overrides, reason):
    reasons = why_untraced(workload(recipe, 4, overrides))
    assert reasons.startswith(reason)
    assert bool(reasons) == bool(reason)


@pytest.mark.parametrize("recipe", slow_but([next(iter(EXACT))], EXACT))
def test_exact_mode_is_refused_as_in_training_without_triton_and_traced_at_rest_with_it(recipe, tmp_path):
    done = run_command("megatron_rl", ["trace", str(EXACT[recipe])], tmp_path)
    if importlib.util.find_spec("triton") is None:
        assert (done.returncode, "rollout.engine: exact on cuda" in done.stderr) == (2, True), done.stderr
    else:
        assert (done.returncode, "exact mode reads the lengths" in done.stdout) == (0, True), done.stderr
