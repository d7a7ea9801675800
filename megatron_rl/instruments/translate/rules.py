"""What of a translation depends on several keys: sizes, data, lengths, the engine, layouts and schedules.

A rule reads their values by the names that the table gives after @ (`config.foreign_keys.TABLE`). Rules were read from
the sources of `READ_FROM`. verl: `engine_workers.py` and its configurations. slime: `arguments.py`, `model.py`.
NeMo-RL: `grpo.py` and the policy workers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.learner import ParallelConfig
from megatron_rl.config.recipe import dispatcher_problems
from megatron_rl.config.rollout import MOST_KEPT
from megatron_rl.instruments.translate.objective_rules import objective
from megatron_rl.instruments.translate.shell import readable
from megatron_rl.instruments.translate.sources import read_nemo_rl, read_slime, read_verl
from megatron_rl.instruments.translate.translation import Translation, real, whole
from megatron_rl.model.architecture import KNOWN_MODELS

READERS = {"verl": read_verl, "slime": read_slime, "nemo-rl": read_nemo_rl}
ENDLESS = 100_000
"""A number of steps from which on the end of the data is meant."""
LONGEST_PROMPT, LONGEST_RESPONSE = 1024, 8192
"""Tokens where a file does not say them."""


def translate(project: str, path: Path, variables: Mapping[str, str]) -> Translation:
    """The recipe of the script or configuration of ``project``, a key of `READERS`, at ``path``."""
    t = Translation(READERS[project](path, variables))
    nodes, gpus = _name(t)
    t.take_rows()
    for rule in (_batch, _length_of_run, _model_and_data, _lengths, _rollout, _reward, objective, _optimizer):
        rule(t)
    _layout(t, nodes * gpus, min(8, gpus))
    _records(t)
    return t


def run_name(text: str, nodes: int, gpus: int) -> str:
    """A name that recipes may have, with the size of the job, from which `plan` reads it."""
    text = re.sub(r"[-_]?\b\d+n\d+g\b", "", readable(text))  # their own
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"
    return f"{name[:160]}-{nodes}n{gpus}g"


def _generating_gpus(t: Translation) -> int:
    """GPUs that generate alone; 0 where the learner's own do, or where the file does not say it."""
    if t["colocated"] is not False:
        return 0
    return max(1, whole(t["server_nodes"]) or 1) * (whole(t["server_gpus"]) or 0)


def _name(t: Translation) -> tuple[int, int]:
    nodes, gpus = whole(t["nodes"]) or 1, whole(t["gpus"]) or 8
    remark = "`plan` reads the size of the job from it"
    if t.project == "NeMo-RL" and t["colocated"] is False:
        generating = _generating_gpus(t) or gpus
        if nodes > 1:
            nodes = max(1, nodes - math.ceil(generating / gpus))
        else:
            gpus = max(1, gpus - generating)
        remark += "; further GPUs generate"
    t.put("name", run_name(str(t["name"] or t.path.stem), nodes, gpus), remark)
    return nodes, gpus


def _batch(t: Translation) -> None:
    """Sizes of a step. An update has so many prompts in verl, and so many responses in slime and NeMo-RL."""
    prompts, samples = t.ours("batch.prompts"), t.ours("rollout.num_samples")
    unit, what = (prompts, "prompts") if t.project == "verl" else (prompts * samples, "responses")
    unit = max(1, unit)
    size = min(whole(t["update_size"]) or unit, unit)
    updates = whole(t["updates"]) or unit // size
    if unit % size and not whole(t["updates"]):
        t.guess("batch.minibatches", updates, f"{size} does not divide the {unit} {what} of a step")
    else:
        t.put("batch.minibatches", updates, f"{unit} {what} of a step / {size} of an update")
    asked = whole(t["asked"]) or math.ceil(prompts * (real(t["times"]) or 1))
    if not t["filter"]:
        if t.is_set("asked") and asked > prompts:
            t.lose("asked", "a step waits for its longest response")
        return
    t.put("batch.filter_groups", True)
    if isinstance(t["filter"], str) and not t["filter"].endswith("check_reward_nonzero_std"):
        t.guess("batch.filter_groups", True, "groups with equal rewards are left out, whatever your function does")
    if (metric := t["filter_metric"]) is not None:
        t.put("batch.filter_metric", "raw_reward" if metric == "acc" else "reward", "acc is the reward unshaped")
    if (rounds := whole(t["rounds"]) or 0) > 0:
        t.put("batch.max_generations", rounds)
    else:
        t.guess("batch.max_generations", 20, f"{t.project} samples until the batch is full, without a limit")
    if asked > prompts:
        t.put("batch.generation_prompts", asked)


def _length_of_run(t: Translation) -> None:
    steps, epochs = whole(t["steps"]), real(t["epochs"])
    if steps and steps < ENDLESS:
        t.put("num_steps", steps, f"NeMo-RL ends before, after {epochs:g} epochs" if t.project == "NeMo-RL" else "")
    elif epochs and not t.ours("batch.filter_groups"):
        t.put("num_epochs", int(epochs) if epochs.is_integer() else epochs)
    else:
        t.guess("num_steps", 500, f"the file says {epochs or 'no'} epochs, and not how many steps they take")


def _model_and_data(t: Translation) -> None:
    model = str(t.path_of("model", "MODEL") or "MODEL").rstrip("/")
    if rounded := re.fullmatch(r"(.*)-(FP8|fp8|INT4|int4)", model) if t.project == "slime" else None:
        model, kind = rounded[1], rounded[2].lower()
        t.put("rollout.quantization.weights", kind, "slime's engine loads a rounded checkpoint")
        t.guess("model.path", model, f"the checkpoint without {kind}: the learner loads it, and the engine rounds it")
    else:
        t.put("model.path", model)
    begins, same = t["begins_from"], [t.values.get(key) for key in ("--save", "--ref-load", "--hf-checkpoint")]
    if begins == "resume_path" or (t.project == "slime" and begins and begins not in same):
        t.lose("begins_from", "the run begins from other weights; export them, and name their folder in model.path")
    for part, prefix in (("train", ""), ("validation", "val_")):
        columns = ("prompt_key", "answer_key")
        names = {name: t[prefix + name if t.project == "NeMo-RL" else name] for name in columns}
        given = t.path_of(part, "DATA.jsonl")
        if given is None and part == "train":
            t.guess("data.train", [{"path": "DATA.jsonl"}], "the file names no training data")
        if given is not None:
            names = {key: str(name) for key, name in names.items() if name not in (None, "prompt")}
            t.put(f"data.{part}", _sources(t, given, names))
    if t.project == "slime":
        t.put("data.prompt.chat_template", "auto" if t["template"] is True else "none")


def _sources(t: Translation, given: Any, names: dict[str, str]) -> list[dict[str, Any]]:
    """Files of rows, given as paths, as names and paths by turns (slime), or as sections (NeMo-RL)."""
    words = given if isinstance(given, list) else [given]
    if t.project == "slime" and len(words) > 1:
        return [
            {"path": readable(str(path)), "name": readable(str(name))} | names
            for name, path in zip(words[::2], words[1::2])
        ]
    sources = []
    for word in words:
        own = names
        if isinstance(word, dict):
            columns = {"prompt_key": "input_key", "answer_key": "output_key"}
            own = {ours: str(word[key]) for ours, key in columns.items() if key in word}
            word = word.get("data_path") or word.get("dataset_name")
        sliced = re.fullmatch(r"(.*)@\[0?:(\d+)\]", readable(str(word)))
        source = {"path": sliced[1], "limit": int(sliced[2])} if sliced else {"path": readable(str(word))}
        if t.project == "NeMo-RL" and not re.search(r"[./]", source["path"]):
            t.note(f"{word}: put the file with its rows in its place (.jsonl, .parquet)")
            source["path"] += ".jsonl"
        sources.append(source | own)
    return sources


def _lengths(t: Translation) -> None:
    prompt, response, total = whole(t["prompt"]), whole(t["response"]), whole(t["total"])
    why = f"{t.project} bounds prompt and response together, by {total}" if total else "the file does not say it"
    if total and response is None:
        response = total if t.project == "NeMo-RL" else max(1, total - (prompt or LONGEST_PROMPT))
    if total and (prompt or LONGEST_PROMPT) + (response or 0) > total:
        if prompt is None or prompt >= total:
            prompt = min(LONGEST_PROMPT, total // 2 if response >= total else total - response)
        t.guess("data.prompt.max_length", prompt, why)
        t.guess("rollout.max_response_length", min(response, total - prompt), why)
    else:
        for ours, value, otherwise in (
            ("data.prompt.max_length", prompt, LONGEST_PROMPT),
            ("rollout.max_response_length", response, LONGEST_RESPONSE),
        ):
            if value is None:
                t.guess(ours, otherwise, why)
            else:
                t.put(ours, value)
    if t.project == "NeMo-RL" or (t.project == "slime" and prompt is None):
        t.guess("data.prompt.overlong", "drop", f"{t.project} takes longer prompts, or cuts them")
    elif t.project == "slime" or t["overlong"] is True:
        t.put("data.prompt.overlong", "drop")
    elif t["truncation"] in ("left", "right", "middle"):
        t.guess("data.prompt.overlong", "drop", "verl cuts longer prompts")
    else:
        t.put("data.prompt.overlong", "error")


def _rollout(t: Translation) -> None:
    alone = t["colocated"] is False
    engine = "vllm_server" if alone or t["ahead"] is True else "vllm"
    theirs = "sglang" if t.project == "slime" else readable(str(t["engine"]))
    if theirs == "vllm" and (alone or t["ahead"] is not True):
        t.put("rollout.engine", engine)
    elif theirs == "vllm":
        t.guess("rollout.engine", engine, "generation ahead of the learner needs servers")
    else:
        t.guess("rollout.engine", engine, f"in place of {theirs}; mismatch and speed are others")
    size = whole(t["engine_ranks"]) or 1
    if (fitting := _fits_heads(t, size)) == size:
        t.put("rollout.tensor_parallel", size)
    else:
        t.guess("rollout.tensor_parallel", fitting, f"{size} do not divide the model's heads; there are more engines")
    if alone and (generating := _generating_gpus(t) or (whole(t["gpus"]) if t.project == "NeMo-RL" else 0)):
        t.put("rollout.servers.count", max(1, generating // fitting), f"{generating} GPUs / {fitting} of a server")
    if t["ahead"] is True:
        t.put("rollout.max_staleness", max(1, whole(t["age"]) or 1))
    if t["ahead"] is True and t["in_flight"] is True:
        t.put("rollout.in_flight.mode", "abort_and_resume" if t["anew"] is True else "keep", "as for keys and values")
    if t.project == "NeMo-RL" and engine == "vllm" and 0 < t.ours("rollout.top_k") <= MOST_KEPT:
        t.put("rollout.kept_sets", True, "NeMo-RL's learner takes its softmax over the tokens that are left, too")
    if t.project != "verl" and not alone and t["aside"] is not True:
        for part in ("weights", "optimizer", "gradients"):
            t.put(f"learner.offload.{part}", True, f"{t.project} moves the learner aside")


def _fits_heads(t: Translation, size: int) -> int:
    """``size``, or fewer ranks that divide the model's heads: none here has a copy of a key/value head."""
    shape = KNOWN_MODELS.get(Path(str(t.ours("model.path"))).name, {})
    return math.gcd(size, shape.get("num_key_value_heads", size), shape.get("num_attention_heads", size))


def _reward(t: Translation) -> None:
    file, kind = t["reward_file"], t["reward_kind"]
    if file and t.project == "verl":
        t.put("reward.name", f"{readable(str(file))}:{t['reward_function'] or 'compute_score'}")
    elif kind in ("math", "deepscaler", "dapo") and not file:
        remark = {"deepscaler": "deepscaler scores 0 without </think>", "dapo": "dapo's reward is 1 or -1"}
        t.put("reward.name", "math", remark.get(kind, "") if t.project == "slime" else "")
    elif t.project == "verl":
        t.guess("reward.name", "math", "verl chooses by data_source (default_compute_score); see reward.by_source")
    else:
        t.guess("reward.name", "math", f"in place of {readable(str(file or kind))}; a reward is f(response, answer)")
    if t["has_buffer"] is True and (length := whole(t["buffer"])):
        t.put("reward.overlong.buffer", min(length, t.ours("rollout.max_response_length") - 1))
        t.put("reward.overlong.penalty", real(t["penalty"]))


def _optimizer(t: Translation) -> None:
    """The schedule. verl's and NeMo-RL's moves once a step, ours and slime's once an update."""
    times = 1 if t.project == "slime" else t.ours("batch.minibatches")
    remark = "counts updates" if times == 1 else f"counts updates: times {times}"
    warmup, share = whole(t["warmup"]) or 0, real(t["warmup_share"]) or 0
    length = (t.ours("num_steps") or 0) * t.ours("batch.minibatches")
    if warmup <= 0 and share > 0:
        total = times * (whole(t["decay"]) or 0) or length
        if int(share * total):
            t.put("schedule.warmup_steps", int(share * total), f"of {total} updates")
        else:
            t.lose("warmup_share", "a share of all updates: set schedule.warmup_steps to their number")
    elif warmup > 0:
        t.put("schedule.warmup_steps", warmup * times, remark)
    factor = real(t["warmup_factor"]) or 0
    start = real(t["warmup_from"]) or factor * (t.ours("learner.optimizer.lr") or 1e-6)
    if start and t.ours("schedule.warmup_steps"):
        t.put("schedule.warmup_from", start)
    style = t["style"] or "constant"
    if style in ("linear", "cosine"):
        t.put("schedule.style", style)
        floor = real(t["min_lr_ratio"])
        t.put("schedule.min_lr", real(t["min_lr"]) if floor is None else floor * t.ours("learner.optimizer.lr"))
        if decay := whole(t["decay"]):
            t.put("schedule.decay_steps", decay * times, remark)
    elif style != "constant":
        t.lose("style", "no such decay; the rate stays constant after the warm-up")
    elif t.is_set("style"):
        t.put("schedule.style", "constant")


def _layout(t: Translation, gpus: int, most_experts: int) -> None:
    name = Path(str(t.ours("model.path"))).name
    is_moe = "--num-experts" in t.values or re.search(r"-A\d", name) is not None
    is_moe = is_moe or (name not in KNOWN_MODELS and (whole(t["expert"]) or 1) > 1)
    if t.is_megatron:
        t.put("learner.parallel.tensor", whole(t["tensor"]) or 1)
    else:
        asked = max(whole(t["fsdp_tensor"]) or 1, min(4, gpus))
        why = "FSDP cuts the model over all GPUs, Megatron by matrices; `megatron-rl plan` proposes other layouts"
        t.guess("learner.parallel.tensor", _fits_heads(t, math.gcd(gpus, asked)), why)
        if is_moe:
            t.guess("learner.parallel.expert", most_experts, "as for learner.parallel.tensor")
        if t.project == "verl":
            t.guess("learner.offload.gradients", True, "FSDP frees gradients after an update")
    if is_moe and t.is_megatron:
        t.put("learner.parallel.expert", whole(t["expert"]) or 1)
        inner, tensor = whole(t["expert_tensor"]), t.ours("learner.parallel.tensor")
        if inner is not None or (tensor > 1 and t.project != "NeMo-RL"):
            remark = "" if inner else "Megatron cuts experts like the rest where nothing is said"
            t.put("learner.parallel.expert_tensor", inner or tensor, remark)
        _router(t)
    kind = t["recompute"] if t.project != "NeMo-RL" or t["recomputes"] is True else None
    if t["recomputes"] is True and not t.is_megatron:
        kind = "full"
    if kind in ("full", "selective"):
        t.put("learner.recompute", kind, "of attention and experts" if kind == "selective" else "")
    else:
        t.guess("learner.recompute", "full", f"{t.project} keeps all activations; use none where memory allows")
    _microbatch(t)
    if rank := whole(t["rank"]):
        t.put("learner.lora.rank", rank)
        otherwise = 32.0 if t.key(t.rules["rank"])[0].endswith("lora.rank") else 16.0  # verl's two kinds
        t.put("learner.lora.alpha", real(t["alpha"]) or otherwise)


def _router(t: Translation) -> None:
    """The token dispatcher, where it fits the layout, and the router's type."""
    kind = t["dispatcher"]
    if kind is not None and kind not in ("alltoall", "allgather", "flex"):
        t.lose("dispatcher", "learner.token_dispatcher is alltoall, allgather or flex; numbers are the same")
    elif dispatcher_problems(ParallelConfig.model_construct(**t.recipe["learner"]["parallel"]), kind):
        t.lose("dispatcher", "not with this layout; learner.token_dispatcher alltoall gives the same numbers")
    elif kind is not None:
        needs = "flex uses DeepEP, which has to be installed" if kind == "flex" and t["deepep"] is not True else ""
        t.put("learner.token_dispatcher", kind, needs)
    if (kind := t["router_type"]) == "fp32":
        t.put("precision.fp32_router", True)
    elif kind is not None:
        t.lose("router_type", "the router computes in the model's type, or in fp32 (precision.fp32_router)")


def _microbatch(t: Translation) -> None:
    """Tokens of a microbatch: ours are of all ranks of context parallelism, verl's and slime's of one GPU."""
    ours, context = "learner.max_tokens_per_microbatch", t.ours("learner.parallel.context") or 1
    longest = t.ours("data.prompt.max_length") + t.ours("rollout.max_response_length")
    tokens, sequences = whole(t["tokens"]), whole(t["sequences"])
    if t.project == "NeMo-RL" and t["by_tokens"] is True and tokens:
        t.put(ours, max(tokens, longest))
    elif tokens and (t["by_tokens"] is True or not sequences):
        t.put(ours, tokens * context, f"times {context} ranks of context parallelism" if context > 1 else "")
    else:
        t.guess(ours, (sequences or 1) * longest, f"{t.project} counts {sequences or 1} sequences a microbatch")


def _records(t: Translation) -> None:
    """Checkpoints, validation, and where curves go."""
    if t["saves"] is False:
        t.put("checkpoint.every", 0, "one at the end of the run is written all the same")
    if repeat := whole(t["repeat"]):
        t.put("validation.num_samples", repeat * (t.ours("validation.num_samples") or 1))
    if t["eval_top_k"] == 1:
        t.put("validation.temperature", 0.0, "the likeliest token is what temperature 0 takes")
    for key in ("temperature", "top_p"):
        if t.ours(f"validation.{key}") is None:
            t.put(f"validation.{key}", t.ours(f"rollout.{key}"), "held-out responses are sampled as in training")
    first, every = False if t["not_at_start"] is True else t["at_start"], t.ours("validation.every")
    if first is not None and first is not bool(every) and (first is False or t.is_set("at_start")):
        t.put("validation.at_start", first)
    if t.project == "NeMo-RL" and not t.ours("data.validation"):
        t.drop("validation")
    loggers = t["loggers"] if isinstance(t["loggers"], list) else [t["loggers"]]
    if "wandb" in loggers or loggers == [True]:
        t.put("monitor.sinks.wandb.project", readable(str(t["project"])))
    for key in ("entity", "group"):
        if t[key] and t.ours("monitor.sinks.wandb"):
            t.put(f"monitor.sinks.wandb.{key}", readable(str(t[key])))
