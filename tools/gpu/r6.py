"""R6 and R7, speed at Qwen3-30B-A3B's widths: our generation beside raw vLLM, our update beside bare Megatron-Core.

Each pair is in one process. Then their share of the GPU's rates, and what `plan` said of time and memory.
"""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu.r4 import check
from tools.gpu.run import ROOT, NotRun, Problem, Run

PLANTS = ("slow", "wrong_plan")
MODEL, LAYERS = "Qwen3-30B-A3B", 8
TINY = ROOT / "recipes" / "tiny"
SIZES = {"prompts": 16, "group": 16, "length": 256, "sequences": 32, "longest": 2048, "tokens": 16384, "rounds": 5}
REHEARSED = {"prompts": 1, "group": 2, "length": 4, "sequences": 4, "longest": 64, "tokens": 256, "rounds": 3}
# Our time over the engine's alone. On tiny shapes our own work is most of the time.
MOST, MOST_REHEARSED = 1.25, 6.0
MEMORY, MEMORY_REHEARSED, TIME = 1.1, 1.25, 2.0  # factors between measured and planned
TIMES = ("update, s", "generation, s")


def main(run: Run) -> None:
    found: dict[str, Any] = {}
    # Products, attention and copies with torch's own kernels: the peak and the bandwidth to measure by.
    run.part("rates", lambda: found.setdefault("rates", check(run, "rates", 1)["figures"]))
    for name in ("update", "generation"):
        run.part(name, partial(beside, run, name, found))
    run.part("plan", partial(planned, run, found))


def made_up_model(folder: Path, changes: dict[str, Any], device: str) -> str:
    """Make a model at ``folder``, unless it is there: the tiny one with ``changes`` in its configuration and random
    weights in bf16, in files of one layer each."""
    import torch
    from safetensors.torch import save_file

    from megatron_rl.checkpoint.hf_folder import model_shapes
    from megatron_rl.model.architecture import read_architecture

    if folder.exists():
        return str(folder)
    shutil.copytree(TINY / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text()) | changes | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    parts: dict[str, dict[str, Any]] = {}
    torch.manual_seed(0)
    for name, shape in model_shapes(read_architecture(folder)).items():
        tensor = torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02
        part = name.partition(".layers.")[2].partition(".")[0] or "outside"
        parts.setdefault(part, {})[name] = (tensor + 1 if name.endswith("norm.weight") else tensor).cpu()
    place = {}
    for part, tensors in parts.items():
        file = f"model-{part}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return str(folder)


def widths(rehearse: bool) -> dict[str, Any]:
    """What differs from the tiny model's configuration."""
    from megatron_rl.model.architecture import KNOWN_MODELS

    if rehearse:
        return {}
    known = {name: value for name, value in KNOWN_MODELS[MODEL].items() if name != "architectures"}
    return known | {"num_hidden_layers": LAYERS, "num_local_experts": known["num_experts"]}


def recipe_of(model: str, device: str, sizes: dict[str, int]) -> Any:
    from megatron_rl.config import load_recipe

    return load_recipe(
        TINY / "grpo.yaml",
        [
            f"runtime.device={device}",
            f"model.path={model}",
            "name=campaign-1n1g",
            *(f"{engine}.dtype=bf16" for engine in ("learner", "rollout")),
            f"batch={{prompts: {sizes['prompts']}, minibatches: 1}}",
            f"rollout.num_samples={sizes['group']}",
            f"rollout.max_response_length={sizes['length']}",
            f"rollout.max_num_seqs={sizes['prompts'] * sizes['group']}",
            "rollout.stop_token_ids=[]",
            "rollout.verify_refit=false",
            f"rollout.kv_cache_gib={16 if device == 'cuda' else 0.0625}",
            f"learner.max_tokens_per_microbatch={sizes['tokens']}",
            "learner.optimizer.lr=1e-9",
            "monitor.gradient_noise=false",
        ],
    )


def beside(run: Run, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Ours beside the engine alone, by both clocks."""
    sizes = REHEARSED if run.rehearse else SIZES
    model = made_up_model(run.folder / "widths", widths(run.rehearse), run.device)
    values = {"model": model, "device": run.device, "sizes": sizes}
    (results,) = run.ranks(1, {name: (f"tools.gpu.r6.{name}", values)}, 240).whole()
    found[name] = results[name]
    clock = "processor time" if run.rehearse else "wall clock"
    mine, engine = (found[name]["seconds"][clock][side] for side in ("ours", "engine"))
    most = MOST_REHEARSED if run.rehearse else MOST
    figures = found[name] | {"ours over engine": mine / engine}
    if "rates" in found:
        figures |= shares(run, name, found)
    if not mine <= most * engine:
        raise Problem(f"ours takes {mine:.3f} s, the engine alone {engine:.3f} s: more than {most} times; {figures}")
    return figures


def generation(model: str, device: str, sizes: dict[str, int]) -> dict[str, Any]:
    from megatron_rl.data import load_prompts, load_tokenizer
    from megatron_rl.rollout.vllm_engine import VllmGenerator
    from tools.bench.engines import bench_generation

    recipe = recipe_of(model, device, sizes)
    prompts = list(load_prompts(recipe.data.train, load_tokenizer(model), recipe.data.prompt))[: sizes["prompts"]]
    engine = VllmGenerator(recipe.rollout, recipe.model.path, max_prompt_length=recipe.data.prompt.max_length)
    _, seconds = bench_generation(engine, prompts, sizes["group"], sizes["rounds"])
    engine.close()
    return {"seconds": seconds, "tokens": sizes["prompts"] * sizes["group"] * sizes["length"]}


def update(model: str, device: str, sizes: dict[str, int]) -> dict[str, Any]:
    """On a CPU memory is summed from the allocator's events (`tools.dev.measure_memory`)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from megatron_rl.learner.learner import Learner
    from tools.bench.engines import bench_update
    from tools.bench.lib.cases import made_up_batch
    from tools.dev.measure_memory import peak_bytes

    recipe, batch = recipe_of(model, device, sizes), made_up_batch(sizes["sequences"], 12, sizes["longest"])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) if device == "cpu" else nullcontext() as seen:
        learner = Learner(recipe)
        for _ in range(2):
            learner.update(batch)
    mapped = {file.stat().st_size for file in Path(model).glob("*.safetensors")}
    peak = peak_bytes(seen, mapped) if device == "cpu" else torch.cuda.max_memory_allocated()
    seconds = bench_update(learner, batch, sizes["rounds"])
    return {"seconds": seconds, "lengths": [s.whole_length for s in batch.sequences], "peak_gib": peak / 2**30}


def work_of(run: Run, sizes: dict[str, int]) -> Any:
    """What `plan` reckons with. A CPU is no GPU of its list: its figures are those of an H200, and not judged."""
    from megatron_rl.instruments.plan import GPUS, make_workload
    from megatron_rl.model.architecture import read_architecture

    recipe = recipe_of(str(run.folder / "widths"), run.device, sizes)
    return make_workload(recipe, read_architecture(recipe.model.path), GPUS["h200-141"], 1, 1, float(sizes["length"]))


def shares(run: Run, name: str, found: dict[str, Any]) -> dict[str, float]:
    """The share of the measured bandwidth that a decoding step reaches, or of the rate of products that an update
    does: by the bytes and the operations that the arithmetic needs, not those that kernels make."""
    from megatron_rl.instruments.plan.generation import engine_memory
    from megatron_rl.instruments.plan.timing import flops_forward

    sizes = REHEARSED if run.rehearse else SIZES
    work, seconds = work_of(run, sizes), ours(found, name)
    if name == "update":
        done = 3 * sum(flops_forward(work.architecture, length, length) for length in found[name]["lengths"])
        return {"share of the rate of products": done / seconds / found["rates"]["products"]}
    engine = engine_memory(work.recipe, work.architecture, work.gpu, 0.9)
    context = sizes["prompts"] * sizes["group"] * (12 + sizes["length"] / 2)
    num_bytes = engine.weights + context * engine.token_bytes  # so many sequences need all experts
    return {"share of the bandwidth": num_bytes * sizes["length"] / seconds / found["rates"]["copies"]}


def planned(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """R7: what `plan` says of the learner's memory, and of the time of both phases, beside what was measured.

    A rehearsal judges memory alone: `plan` knows no CPU's rates.
    """
    from megatron_rl.instruments.plan.generation import engine_memory
    from megatron_rl.instruments.plan.learner import learner_memory
    from megatron_rl.instruments.plan.timing import step_time

    if "update" not in found:
        raise NotRun("update: no figures")
    sizes, lengths = (REHEARSED if run.rehearse else SIZES), found["update"]["lengths"]
    work = work_of(run, sizes)
    times = step_time(work, engine_memory(work.recipe, work.architecture, work.gpu, 0.9))
    held = learner_memory(
        work.architecture, work.recipe.learner, 1, min(sum(lengths), sizes["tokens"]), 1, fused=not run.rehearse
    )[0]
    pairs = {  # measured, planned; times of as many tokens and sequences as there were
        "memory, GiB": (found["update"]["peak_gib"], (held.static + held.dynamic) / 2**30),
        "update, s": (ours(found, "update"), times.update * sum(lengths) / work.trained_tokens + times.optimizer),
    }
    if "generation" in found:
        planned_s = times.generate * sizes["prompts"] * sizes["group"] / work.sampled_sequences
        pairs["generation, s"] = ours(found, "generation"), planned_s
    if run.plant == "wrong_plan":
        pairs = {name: (measured, plan / 3) for name, (measured, plan) in pairs.items()}
    figures = {name: {"measured": measured, "plan": plan} for name, (measured, plan) in pairs.items()}
    factors = (
        {"memory, GiB": MEMORY_REHEARSED} if run.rehearse else {"memory, GiB": MEMORY} | dict.fromkeys(TIMES, TIME)
    )
    over = {name: measured / plan for name, (measured, plan) in pairs.items() if name in factors}
    if wrong := [name for name, factor in over.items() if not 1 / factors[name] <= factor <= factors[name]]:
        raise Problem(f"{'; '.join(wrong)}: plan is off by more than {[factors[name] for name in wrong]}: {figures}")
    return figures


def ours(found: dict[str, Any], name: str) -> float:
    return found[name]["seconds"]["wall clock"]["ours"]
