"""R8, a learning curve: a Qwen3-MoE of 300M parameters learns to solve word problems in bf16, fp16 and exact mode.

The first part makes the model and pre-trains it for minutes on written solutions, some of which slip. It solves part of
the problems then, as reinforcement learning wants it. Each other part is a run of one type and one seed of sampling;
`--keep FOLDER` keeps the model and the parts that are done, so that `--only "seed 1"` goes on where a run ended.
"""

from __future__ import annotations

import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu.r6 import TINY, made_up_model
from tools.gpu.run import NotRun, Problem, Run

PLANTS = ("rounded_engine",)
ARMS = ("bf16", "fp16", "exact")
SEEDS = (0, 1)
WIDTHS = {
    "hidden_size": 768,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
}
SIZES = {"seconds": 150, "sequences": 512, "tokens": 32768, "rate": 1e-3, "steps": 30, "prompts": 64, "group": 8}
REHEARSED = {"seconds": 5, "sequences": 8, "tokens": 1024, "rate": 3e-3, "steps": 3, "prompts": 2, "group": 4}
LONGEST, PROBLEMS = 64, 4096  # characters of a solution; problems to learn from
SLIP = 0.2  # share of wrong steps in the solutions of pre-training
REWARD, RHO, GATE = "critic/rewards/mean", "mismatch/rho_std", "exact/max_abs_prob_diff"
LESS = 0.5  # of bf16's mismatch is the most that fp16's may be: 1/8 by the bits of both
RISE = 0.1  # least rise of the reward, mean of the last third over that of the first


def main(run: Run) -> None:
    sizes = REHEARSED if run.rehearse else SIZES
    if not (run.folder / "model").exists():
        run.parts.pop("pre-training", None)  # of another machine
    run.part("pre-training", partial(pretrained, run, sizes))
    seeds = SEEDS[:1] if run.rehearse else SEEDS
    for seed in seeds:
        for arm in ARMS:
            run.part(f"{arm}, seed {seed}", partial(learned, run, sizes, arm, seed))
    run.part("curves", partial(compared, run))


# -- problems

TEXTS = (  # of a · b − c, and of a · b + c
    "{who} has {a} boxes of {b} {things} and gives {c} of them away. How many {things} are left?",
    "{who} has {a} bags of {b} {things} and finds {c} more. How many {things} are there now?",
)
WHO = ("Ann", "Ben", "Eva", "Ivo", "Mia", "Tom")
THINGS = ("pens", "nuts", "cards", "shells", "coins")


def problem(chance: random.Random, slip: float = 0.0) -> tuple[str, str, str]:
    """Text, solution and answer of a word problem. Its numbers have one to three digits; a step of the solution is
    wrong with probability ``slip``."""
    a, b = (chance.randint(2, 10**digits - 1) for digits in (chance.randint(1, 3), chance.randint(1, 2)))
    kind, c = chance.randrange(2), chance.randint(1, a * b)
    words = {"who": chance.choice(WHO), "things": chance.choice(THINGS), "a": a, "b": b, "c": c}

    def written(number: int) -> int:
        return number + chance.choice((-10, -1, 1, 10)) if chance.random() < slip else number

    tens, ones = written(a * (b // 10 * 10)), written(a * (b % 10))
    product = written(tens + ones)
    steps = f"{a}*{b}={tens}+{ones}={product}. "
    result = written(product - c if kind == 0 else product + c)
    answer = a * b - c if kind == 0 else a * b + c
    return TEXTS[kind].format(**words) + "\n", f"{steps}{product}{'-+'[kind]}{c}=\\boxed{{{result}}}", str(answer)


# -- parts


def pretrained(run: Run, sizes: dict[str, int]) -> dict[str, Any]:
    with (run.folder / "train.jsonl").open("w") as file:
        chance = random.Random("problems")
        for number in range(PROBLEMS):
            text, _, answer = problem(chance)
            file.write(json.dumps({"id": f"train-{number}", "problem": text, "answer": answer}) + "\n")
    changes = {} if run.rehearse else WIDTHS
    model = made_up_model(run.folder / "random", changes, run.device)
    values = {"model": model, "device": run.device, "sizes": sizes, "folder": str(run.folder / "model")}
    figures = run.ranks(1, {"pretrain": ("tools.gpu.r8.pretrain", values)}, 300).whole()[0]["pretrain"]
    first, last = figures["loss"][0], figures["loss"][-1]
    if not last < 0.8 * first:
        raise Problem(f"the loss of a character went from {first:.3f} to {last:.3f} in {figures['updates']} updates")
    return figures


def pretrain(model: str, device: str, sizes: dict[str, Any], folder: str) -> dict[str, Any]:
    """Updates towards solutions: with an advantage of 1, the gradient of an update is that of the likelihood."""
    import numpy as np

    from megatron_rl.config import load_recipe
    from megatron_rl.data import load_tokenizer
    from megatron_rl.learner.learner import Learner
    from megatron_rl.types import Batch, Rollout

    values = [f"model.path={model}", f"runtime.device={device}", "learner.dtype=bf16", "monitor.gradient_noise=false"]
    values += [f"learner.optimizer.lr={sizes['rate']}", f"learner.max_tokens_per_microbatch={sizes['tokens']}"]
    learner, tokenizer = Learner(load_recipe(TINY / "grpo.yaml", values)), load_tokenizer(model)
    chance, start, losses, updates = random.Random("solutions"), time.monotonic(), [], 0

    def solved(number: int) -> Rollout:
        text, solution, _ = problem(chance, SLIP)
        prompt, tokens = tokenizer.encode(text), tokenizer.encode(solution, add_special_tokens=False)
        response = [*tokens, tokenizer.eos_token_id]
        zeros = np.zeros(len(response), np.int32)
        name, mu = f"solution:{number}/0", zeros.astype(np.float32) - 1
        return Rollout(name, prompt, np.array(response, np.int32), mu, zeros, "stop", advantage=1.0, reward=1.0)

    while time.monotonic() - start < sizes["seconds"]:
        sequences = [solved(number) for number in range(sizes["sequences"])]
        batch = Batch(step=updates, sequences=sequences, minibatches=[list(range(len(sequences)))])
        if updates % 16 == 0:
            losses.append(-float(np.concatenate(learner.compute_logprobs(batch)).mean()))
        learner.update(batch)
        updates += 1
    losses.append(-float(np.concatenate(learner.compute_logprobs(batch)).mean()))
    learner.export_hf(Path(folder))
    return {"updates": updates, "seconds of updates": time.monotonic() - start, "loss": losses}


def learned(run: Run, sizes: dict[str, int], arm: str, seed: int) -> dict[str, Any]:
    """A run of `megatron_rl train`; its curves."""
    if not (run.folder / "model").exists():
        raise NotRun("there is no pre-trained model: run the part pre-training first, and keep it with --keep")
    name, dtype = f"{arm}-{seed}", "fp16" if arm == "fp16" else "bf16"
    values = [
        f"run_root={run.folder}",
        f"name={name}",
        f"seed={seed}",
        f"model.path={run.folder / 'model'}",
        f"data={{train: {run.folder / 'train.jsonl'}, prompt: {{max_length: 128}}}}",
        "reward.name=math",
        f"batch.prompts={sizes['prompts']}",
        f"rollout={{dtype: {dtype}, num_samples: {sizes['group']}, max_response_length: {LONGEST}}}",
        f"learner={{dtype: {dtype}, max_tokens_per_microbatch: {sizes['tokens']}, optimizer: {{lr: 1e-5}}}}",
        f"num_steps={sizes['steps']}",
        f"runtime.device={run.device}",
        "checkpoint={every: 0, keep_last: 0}",
        "validation.every=0",
        "monitor.plots=false",
    ]
    if arm != "exact":
        values += [f"rollout.kv_cache_gib={8 if run.device == 'cuda' else 0.0625}", "rollout.max_num_seqs=256"]
    command = ["train", str(TINY / ("exact.yaml" if arm == "exact" else "grpo.yaml"))]
    command += [word for value in values for word in ("--set", value)]
    job = ("tests.e2e.programs.exact_runs.train", {"runs": [command]})
    ended = run.ranks(1, {"train": job}, 300)
    file = run.folder / name / "metrics.jsonl"  # of a run that was cut off, too
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    curves = {key: [row[key] for row in rows if key in row] for key in (REWARD, RHO, GATE)}
    curves["seconds of a step"] = [row["perf/time/step"] for row in rows if "perf/time/step" in row]
    if ended.whole()[0]["train"] != [0]:
        raise Problem(f"the run left with another status than 0:\n{ended.logs[0]}")
    if arm == "exact" and set(curves[GATE]) != {0.0}:
        raise Problem(f"{GATE} is {curves[GATE]}, not 0")
    return curves


def compared(run: Run) -> dict[str, Any]:
    """Mismatch and reward of the arms beside each other, of the seeds that are there, and their picture.

    A rehearsal of three steps does not judge the reward.
    """
    done = {name: part for name, part in run.parts.items() if ", seed " in name and part["state"] == "green"}
    by_arm = {arm: [part for name, part in done.items() if name.startswith(arm)] for arm in ARMS}
    if not (by_arm["bf16"] and by_arm["fp16"]):
        raise NotRun(f"only {', '.join(done) or 'no run'} is there")
    draw(run.out.with_suffix(".png"), done)
    spread = {arm: mean([mean(part[RHO]) for part in parts]) for arm, parts in by_arm.items() if parts}
    rises = {name: mean(thirds(part[REWARD])[2]) - mean(thirds(part[REWARD])[0]) for name, part in done.items()}
    figures = {RHO: spread, "rise of the reward": rises}
    if not spread["fp16"] <= LESS * spread["bf16"]:
        raise Problem(f"{RHO} is {spread['fp16']:.2e} in fp16, {spread['bf16']:.2e} in bf16: {figures}")
    if not run.rehearse and (flat := [name for name, rise in rises.items() if not rise >= RISE]):
        raise Problem(f"the reward does not rise by {RISE} in {', '.join(flat)}: {figures}")
    return figures


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def thirds(values: list[float]) -> list[list[float]]:
    size = len(values) // 3
    return [values[:size], values[size:-size], values[-size:]]


def draw(file: Path, done: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), (REWARD, RHO), strict=True):
        for name, part in done.items():
            arm = ARMS.index(name.partition(",")[0])
            axes.plot(part[key], color=f"C{arm}", linestyle=["-", "--"][int(name[-1])], label=name)
        axes.set(xlabel="step", title=key)
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
