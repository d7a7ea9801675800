"""slime's launch scripts as recipes.

The rules were read from slime's sources (`config.foreign_keys.READ_FROM`): `arguments.py` for sizes and defaults,
`loss.py` and `ppo_utils.py` for losses, `ray/rollout.py` for advantages, `megatron_utils/model.py` for the schedule.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.shell import readable
from megatron_rl.instruments.translate.slime_keys import DEFAULTS, EFFECTS, read_arguments
from megatron_rl.instruments.translate.translation import Translation, number, run_name

FALLBACK_PROMPT = 1024
"""Tokens of the longest prompt where a script does not say it."""


def translate(path: Path, variables: dict[str, str], train_rows: int | None = None) -> Translation:
    """The recipe of slime's launch script at ``path``. ``train_rows``: rows of its training data."""
    values, notes, main = read_arguments(path, variables)
    t = Translation("slime", str(path), values, DEFAULTS, notes)
    if (kind := t.get("--loss-type")) not in (None, "policy_loss"):
        raise InputError(f"{path}: --loss-type {kind}; recipes are of reinforcement learning (policy_loss)")
    nodes, gpus = _whole(t, "--actor-num-nodes", 1), _whole(t, "--actor-num-gpus-per-node", 8)
    t.put(
        "--actor-num-nodes, --actor-num-gpus-per-node",
        "name",
        run_name(str(t.get("--wandb-group") or path.stem), nodes, gpus),
        "`plan` reads the size of the job from it",
    )
    t.take("--seed", "seed", number)
    updates = _batch(t)
    _steps(t, train_rows)
    is_moe = _model_and_data(t)
    _rollout(t, main)
    _reward(t)
    _objective(t)
    _optimizer(t, updates)
    _layout(t, is_moe)
    _rest_of_the_run(t)
    t.rest(EFFECTS, is_whole=False)
    return t


def _whole(t: Translation, theirs: str, otherwise: int) -> int:
    value = number(t.get(theirs))
    return otherwise if value is None else int(value)


def _batch(t: Translation) -> int:
    """Sizes of a step. --global-batch-size counts responses, --rollout-batch-size prompts."""
    if (prompts := number(t.get("--rollout-batch-size"))) is None:
        prompts = 32
        t.guess("batch.prompts", prompts, "the script gives no --rollout-batch-size")
    else:
        t.put("--rollout-batch-size", "batch.prompts", int(prompts))
    samples = int(t.take("--n-samples-per-prompt", "rollout.num_samples", number))
    responses, updates = int(prompts) * samples, number(t.get("--num-steps-per-rollout"))
    size = number(t.get("--global-batch-size"))
    if updates:
        t.put("--num-steps-per-rollout", "batch.minibatches", int(updates))
    elif size:
        updates = max(1, responses // int(size))
        note = f"{responses} responses of a step / {int(size)} of an update"
        t.put("--rollout-batch-size, --n-samples-per-prompt, --global-batch-size", "batch.minibatches", updates, note)
        if responses % int(size):
            t.note(f"--global-batch-size {int(size)} does not divide the {responses} responses of a step")
    else:
        updates = 1
        t.guess("batch.minibatches", 1, "neither --global-batch-size nor --num-steps-per-rollout is given")
    _filter(t, int(prompts))
    return int(updates)


def _filter(t: Translation, prompts: int) -> None:
    function, asked = t.get("--dynamic-sampling-filter-path"), number(t.get("--over-sampling-batch-size"))
    if function is not None:
        if str(function).rsplit(".", 1)[-1] == "check_reward_nonzero_std":
            t.put("--dynamic-sampling-filter-path", "batch.filter_groups", True)
        else:
            t.lose("--dynamic-sampling-filter-path", "your function is not called")
            t.guess("batch.filter_groups", True, "groups with equal rewards are left out, whatever your function does")
        t.guess("batch.max_generations", 20, "slime samples until the batch is full, without a limit")
        if asked is not None and asked > prompts:
            t.put("--over-sampling-batch-size", "batch.generation_prompts", int(asked))
    elif asked is not None and asked > prompts:
        t.lose("--over-sampling-batch-size", "a step waits for its longest response; see batch.oversample")


def _steps(t: Translation, train_rows: int | None) -> None:
    epochs, prompts = number(t.get("--num-epoch")), t.recipe["batch"]["prompts"]
    if (steps := number(t.get("--num-rollout"))) is not None:
        t.put("--num-rollout", "num_steps", int(steps))
    elif epochs and train_rows is not None:
        steps = max(1, int(epochs) * (train_rows // prompts))
        t.put("--num-epoch, --rollout-batch-size", "num_steps", steps, f"of {train_rows} rows")
    else:
        t.guess("num_steps", 500, f"the script says {epochs or 'no'} epochs; --train-rows N counts their steps")


def _model_and_data(t: Translation) -> bool:
    """Whether the model has experts."""
    model = str(t.known_path("--hf-checkpoint", "MODEL")).rstrip("/")
    rounded = re.fullmatch(r"(.*)-(FP8|fp8|INT4|int4)", model)
    if rounded:
        model, kind = rounded[1], rounded[2].lower()
        t.guess("model.path", model, f"the checkpoint without {kind}: the learner loads it, and the engine rounds it")
        t.put("--hf-checkpoint", "rollout.quantization", {"weights": kind}, "slime's engine loads a rounded checkpoint")
        if kind == "int4":
            t.note("rollout.quantization.weights int4 works on a CPU only; fp8 is there for GPUs")
    else:
        t.put("--hf-checkpoint", "model.path", model)
    source: dict[str, Any] = {"path": str(t.known_path("--prompt-data", "DATA.jsonl"))}
    if sliced := re.fullmatch(r"(.*)@\[(\d*):(\d+)\]", source["path"]):
        source["path"] = sliced[1]
        if int(sliced[2] or 0) == 0:
            source["limit"] = int(sliced[3])
        else:
            t.lose("--prompt-data", "rows are taken from the first on; data.train.0.limit has their number")
    keys = {
        ours: key
        for ours, theirs in (("prompt_key", "--input-key"), ("answer_key", "--label-key"))
        if (key := t.get(theirs)) is not None
    }
    t.put("--prompt-data, --input-key, --label-key", "data.train", [source | keys])
    held_out = t.get("--eval-prompt-data")
    if held_out is not None:
        words = held_out if isinstance(held_out, list) else [held_out]
        named = [(None, words[0])] if len(words) == 1 else list(zip(words[::2], words[1::2], strict=False))
        sources = [{"path": readable(str(path))} | ({"name": str(name)} if name else {}) | keys for name, path in named]
        t.put("--eval-prompt-data", "data.validation", sources)
    t.take("--rollout-shuffle", "data.shuffle", bool)
    t.take("--rollout-seed", "data.seed", number)
    if t.get("--apply-chat-template") is True:
        t.put("--apply-chat-template", "data.prompt.chat_template", "auto")
    else:
        t.put("--apply-chat-template", "data.prompt.chat_template", "none", "prompts are plain text")
    if isinstance(arguments := t.get("--apply-chat-template-kwargs"), dict) and arguments:
        t.put("--apply-chat-template-kwargs", "data.prompt.chat_template_args", arguments)
    t.mark(["--num-experts"])
    return t.is_set("--num-experts") or re.search(r"-A\d", Path(model).name) is not None


def _lengths(t: Translation) -> None:
    response, context = number(t.get("--rollout-max-response-len")), number(t.get("--rollout-max-context-len"))
    prompt = number(t.get("--rollout-max-prompt-len"))
    if prompt is not None:
        t.put("--rollout-max-prompt-len", "data.prompt.max_length", int(prompt))
        t.put("--rollout-max-prompt-len", "data.prompt.overlong", "drop")
    else:
        if context and response:
            prompt = max(1, min(FALLBACK_PROMPT, int(context) - int(response)))
        prompt = int(prompt or FALLBACK_PROMPT)
        t.guess("data.prompt.max_length", prompt, "slime takes prompts of any length here; longer ones are left out")
        t.guess("data.prompt.overlong", "drop", "as above")
    if response is not None:
        t.put("--rollout-max-response-len", "rollout.max_response_length", int(response))
    elif context is not None:
        t.put("--rollout-max-context-len", "rollout.max_response_length", max(1, int(context) - int(prompt)))
    else:
        t.guess("rollout.max_response_length", 8192, "the script does not say it")
    longest = number(t.get("--eval-max-response-len"))
    if longest and longest != t.recipe["rollout"]["max_response_length"]:
        t.lose("--eval-max-response-len", "held-out responses have the length of rollout.max_response_length")
    t.get("--eval-max-prompt-len")


def _rollout(t: Translation, main: str) -> None:
    _lengths(t)
    t.take("--rollout-temperature", "rollout.temperature", lambda value: float(number(value)))
    t.take("--rollout-top-p", "rollout.top_p", lambda value: float(number(value)))
    t.take("--rollout-top-k", "rollout.top_k", lambda k: max(0, int(number(k) or 0)))
    if t.get("--colocate") is True:
        t.guess("rollout.engine", "vllm", "slime generates with SGLang; vLLM's mismatch and speed are others")
        if t.get("--no-offload-train") is not True:
            for ours in ("weights", "optimizer", "gradients"):
                t.put("--colocate, --offload-train", f"learner.offload.{ours}", True, "slime moves the learner aside")
        if t.is_set("--rollout-num-gpus"):
            t.put("--rollout-num-gpus", "rollout.engine", "vllm", "the learner's own GPUs")
    else:
        gpus, size = number(t.get("--rollout-num-gpus")), _whole(t, "--rollout-num-gpus-per-engine", 1)
        t.guess("rollout.engine", "vllm_server", "slime generates with SGLang on GPUs of their own; these are servers")
        if gpus:
            count = max(1, int(gpus) // size)
            t.put("--rollout-num-gpus, --rollout-num-gpus-per-engine", "rollout.servers.count", count)
    t.engine_ranks("--rollout-num-gpus-per-engine")
    if main == "train_async.py":
        t.guess("rollout.max_staleness", 1, "train_async.py samples the next batch while the learner works")
    t.take("--sglang-mem-fraction-static", "rollout.gpu_memory_utilization", number)
    t.take("--sglang-max-running-requests", "rollout.max_num_seqs", number)


def _reward(t: Translation) -> None:
    kind = t.get("--rm-type")
    if function := t.get("--custom-rm-path"):
        t.lose(
            "--custom-rm-path",
            "its function gets a Sample of slime; ours is f(response, answer): write one that"
            " calls yours, and name it as reward.name: file.py:function",
        )
        t.guess("reward.name", "math", f"in place of {readable(str(function))}")
    elif kind in ("math", "deepscaler", "dapo"):
        note = {"deepscaler": "deepscaler scores 0 without </think>", "dapo": "dapo's reward is 1 or -1"}.get(kind, "")
        t.put("--rm-type", "reward.name", "math", note)
    else:
        if kind is not None:
            t.lose("--rm-type", "no reward of this name")
        t.guess("reward.name", "math", f"in place of {kind or 'a reward that the script does not name'}")


def _objective(t: Translation) -> None:
    name = str(t.get("--advantage-estimator"))
    _advantage(t, name)
    low = float(number(t.get("--eps-clip")) or 0.2)
    high = float(number(t.get("--eps-clip-high")) or low)
    term: dict[str, Any] = {"name": "ppo_clip", "clip_low": low, "clip_high": high}
    if name in ("gspo", "cispo"):
        term["name"] = name
    if name == "cispo" and low >= 1:
        term["clip_low"] = None
        t.note(f"--eps-clip {low:g} is a ratio of 0 or less and bounds nothing; here null")
    if name != "cispo" and (bound := number(t.get("--eps-clip-c"))) is not None:
        if name == "gspo":
            t.lose("--eps-clip-c", "gspo has no bound for negative advantages")
        else:
            term["dual_clip"] = float(bound)
    t.put("--advantage-estimator, --eps-clip, --eps-clip-high, --eps-clip-c", "objective.policy_term", term)
    if t.get("--calculate-per-token-loss") is True:
        t.put("--calculate-per-token-loss", "objective.aggregation", "token-mean")
    else:
        note = "slime averages over a response's tokens, then over responses"
        t.put("--calculate-per-token-loss", "objective.aggregation", "seq-mean-token-mean", note)
    t.take("--entropy-coef", "objective.entropy_bonus", lambda value: float(number(value) or 0))
    for theirs in ("--kl-loss-coef", "--kl-coef"):
        coefficient = number(t.get(theirs)) or 0
        if coefficient and (theirs == "--kl-coef" or t.get("--use-kl-loss") is True):
            t.lose(theirs, f"there is no reference policy: the loss lacks {coefficient:g} times the KL to it")
    _correction(t)
    if t.get("--use-rollout-routing-replay") is True:
        t.put("--use-rollout-routing-replay", "routing.replay", "r3")
        t.get("--use-routing-replay")
    elif t.get("--use-routing-replay") is True:
        t.put("--use-routing-replay", "routing.replay", "r2")


def _advantage(t: Translation, name: str) -> None:
    key, samples = "--advantage-estimator", t.recipe["rollout"]["num_samples"]
    by_group = name in ("grpo", "gspo", "cispo")
    if samples < 2 and name != "reinforce_plus_plus_baseline":
        t.guess("objective.advantage", "reinforce", "there is one response a prompt, and so no group")
    elif by_group and t.get("--disable-rewards-normalization") is True:
        t.put("--disable-rewards-normalization", "objective.advantage", "reinforce", "the reward itself")
    elif by_group and t.get("--disable-grpo-std-normalization") is True:
        t.put(f"{key}, --disable-grpo-std-normalization", "objective.advantage", "dr_grpo")
    elif by_group:
        t.put(key, "objective.advantage", "grpo")
    elif name == "reinforce_plus_plus_baseline":
        t.put(f"{key}, --normalize-advantages", "objective.advantage", "reinforce_pp")
    else:
        effects = {
            "ppo": "there is no value function: advantages come from the group",
            "reinforce_plus_plus": "slime whitens over the batch without the mean of the group",
        }
        t.lose(key, effects.get(name, "no such advantage; see docs/add-an-objective.md"))
        instead = "reinforce_pp" if name == "reinforce_plus_plus" else "grpo"
        t.guess("objective.advantage", instead, f"in place of {name}")
    if by_group and t.get("--normalize-advantages") is True:
        t.lose("--normalize-advantages", "advantages of a group are not whitened over the batch again")
    t.get("--normalize-advantages")


def _correction(t: Translation) -> None:
    corrections: list[dict[str, Any]] = []
    keys = []
    if t.get("--use-rollout-logprobs") is True:
        t.put("--use-rollout-logprobs", "objective.anchor", "bypass")
    if t.get("--use-tis") is True:
        function = str(t.get("--custom-tis-function-path") or "")
        low, high = float(number(t.get("--tis-clip-low")) or 0), float(number(t.get("--tis-clip")) or 2)
        keys += ["--use-tis", "--tis-clip", "--tis-clip-low"]
        if function.endswith("icepop_function") and low > 0:
            corrections.append({"mode": "icepop", "lower": low, "upper": high})
        elif function.endswith("icepop_function"):
            corrections.append({"mode": "mis", "level": "token", "cap": high})
        else:
            corrections.append({"mode": "tis", "level": "token", "cap": high} | ({"lower": low} if low > 0 else {}))
            if function:
                t.lose(
                    "--custom-tis-function-path",
                    "your function is not called; tis stands in its place, and"
                    " objective.correction has masks and rejection, too",
                )
    t.get("--custom-tis-function-path")
    if t.get("--use-opsm") is True:
        anchor = "rollout" if t.get("--use-rollout-logprobs") is True else "learner"
        corrections.append({"mode": "opsm", "delta": float(number(t.get("--opsm-delta"))), "pi_old": anchor})
        keys += ["--use-opsm", "--opsm-delta"]
    if corrections:
        t.put(", ".join(keys), "objective.correction", corrections)


def _optimizer(t: Translation, updates: int) -> None:
    ours = "learner.optimizer"
    if (name := t.get("--optimizer")) not in (None, "adam"):
        t.lose("--optimizer", "Adam is the optimizer", name)
    for theirs, key in (
        ("--lr", "lr"),
        ("--adam-beta1", "beta1"),
        ("--adam-beta2", "beta2"),
        ("--adam-eps", "eps"),
        ("--weight-decay", "weight_decay"),
        ("--clip-grad", "clip_grad"),
    ):
        t.take(theirs, f"{ours}.{key}", lambda value: float(number(value)))
    total = t.recipe["num_steps"] * updates
    decay = number(t.get("--lr-decay-iters"))
    warmup, fraction = int(number(t.get("--lr-warmup-iters")) or 0), number(t.get("--lr-warmup-fraction"))
    if fraction:
        warmup = int(fraction * (decay or total))
        t.put("--lr-warmup-fraction", "schedule.warmup_steps", warmup, "of the updates of the decay")
    elif warmup:
        t.put("--lr-warmup-iters", "schedule.warmup_steps", warmup, "both count updates")
    if warmup and (start := float(number(t.get("--lr-warmup-init")) or 0)):
        t.put("--lr-warmup-init", "schedule.warmup_from", start)
    style = t.get("--lr-decay-style")
    if style in ("linear", "cosine"):
        t.put("--lr-decay-style", "schedule.style", style)
        t.put("--min-lr", "schedule.min_lr", float(number(t.get("--min-lr")) or 0))
        if decay:
            t.put("--lr-decay-iters", "schedule.decay_steps", int(decay), "both count updates")
    elif style == "constant":
        t.put("--lr-decay-style", "schedule.style", "constant")
    else:
        t.lose("--lr-decay-style", "no such decay; the rate stays constant after the warm-up")
    start, end = number(t.get("--start-weight-decay")), number(t.get("--end-weight-decay"))
    if end is not None and end != start:
        t.put("--end-weight-decay", "schedule.weight_decay_end", float(end))
        if (kind := t.get("--weight-decay-incr-style")) in ("linear", "cosine"):
            t.put("--weight-decay-incr-style", "schedule.weight_decay_style", kind)
    t.mark(["--min-lr", "--lr-decay-iters", "--lr-warmup-init", "--weight-decay-incr-style"])


def _layout(t: Translation, is_moe: bool) -> None:
    for ours in ("tensor", "pipeline", "context"):
        t.take(
            f"--{ours}-model-parallel-size" if ours != "context" else "--context-parallel-size",
            f"learner.parallel.{ours}",
            number,
        )
    parallel = t.recipe["learner"]["parallel"]
    inner = number(t.get("--expert-tensor-parallel-size"))
    expert = _whole(t, "--expert-model-parallel-size", 1)
    if is_moe:
        t.put("--expert-model-parallel-size", "learner.parallel.expert", expert)
        if inner is not None:
            t.put("--expert-tensor-parallel-size", "learner.parallel.expert_tensor", int(inner))
        elif parallel["tensor"] > 1:
            note = "Megatron cuts experts like the rest where --expert-tensor-parallel-size is not given"
            t.put("--tensor-model-parallel-size", "learner.parallel.expert_tensor", parallel["tensor"], note)
        t.dispatcher("--moe-token-dispatcher-type", "--moe-enable-deepep")
        t.fp32_router("--moe-router-dtype")
    elif t.is_set("--expert-model-parallel-size"):
        t.note("the model has no experts: the sizes of expert parallelism have no effect")
    if t.get("--optimizer-cpu-offload") is True:
        t.put("--optimizer-cpu-offload", "learner.offload.optimizer", True)
        t.put("--optimizer-cpu-offload", "learner.offload.during_passes", True, "the optimizer computes on the host")
    granularity = t.get("--recompute-granularity")
    if granularity in ("full", "selective"):
        t.put("--recompute-granularity", "learner.recompute", granularity)
        if granularity == "selective":
            t.note("recompute selective is of attention and experts here; slime's --recompute-modules may say less")
    else:
        t.guess(
            "learner.recompute",
            "full",
            "slime keeps all activations; no number changes, the learner is slower"
            " by up to a third; use none where memory allows",
        )
    if t.get("--fp16") is True:
        t.put("--fp16", "learner.dtype", "fp16")
    longest = t.recipe["data"]["prompt"]["max_length"] + t.recipe["rollout"]["max_response_length"]
    tokens, key = number(t.get("--max-tokens-per-gpu")), "learner.max_tokens_per_microbatch"
    if t.get("--use-dynamic-batch-size") is True and tokens:
        context = parallel["context"]
        note = f"times {context} ranks of context parallelism" if context > 1 else ""
        t.put("--max-tokens-per-gpu", key, int(tokens) * context, note)
    else:
        size = _whole(t, "--micro-batch-size", 1)
        t.guess(key, size * longest, f"slime counts {size} sequences a microbatch; so many of the longest have these")
        t.get("--max-tokens-per-gpu")


def _rest_of_the_run(t: Translation) -> None:
    if t.is_set("--save-interval"):
        t.take("--save-interval", "checkpoint.every", number)
    if t.get("--async-save") is True:
        t.put("--async-save", "checkpoint.async_save", True)
    if t.get("--save-hf") is not None:
        t.put("--save-hf", "checkpoint.export_hf", True, "beside each checkpoint")
    same = [t.values.get(key) for key in ("--save", "--ref-load", "--hf-checkpoint")]
    if (begins := t.get("--load")) and begins not in same:
        t.lose("--load", "the run begins from other weights; export them, and name their folder in model.path")
    if t.is_set("--save"):
        t.put("--save", "run_root", readable(str(t.known_path("--save", "runs"))), "folder of runs")
    if t.is_set("--eval-interval"):
        t.take("--eval-interval", "validation.every", number)
        if t.get("--skip-eval-before-train") is True:
            t.put("--skip-eval-before-train", "validation.at_start", False)
    elif t.is_set("--eval-prompt-data"):
        t.note("--eval-interval is not given: slime validates never, and so does this recipe")
    t.take("--n-samples-per-eval-prompt", "validation.num_samples", number)
    sampling = t.recipe["rollout"]
    greedy = number(t.get("--eval-top-k")) == 1
    temperature = number(t.get("--eval-temperature"))
    if greedy:
        t.put("--eval-top-k", "validation.temperature", 0.0, "the likeliest token is what temperature 0 takes")
    else:
        note = "" if temperature is not None else "slime samples held-out responses as in training"
        value = sampling["temperature"] if temperature is None else float(temperature)
        t.put("--eval-temperature", "validation.temperature", value, note)
    top_p = number(t.get("--eval-top-p"))
    t.put("--eval-top-p", "validation.top_p", sampling["top_p"] if top_p is None else float(top_p))
    if t.get("--use-wandb") is True:
        for theirs, ours in (("--wandb-project", "project"), ("--wandb-team", "entity"), ("--wandb-group", "group")):
            if (value := t.get(theirs)) is not None:
                t.put(theirs, f"monitor.sinks.wandb.{ours}", readable(str(value)))
        if not t.is_set("--wandb-project"):
            t.guess("monitor.sinks.wandb.project", "slime", "the script does not name a project")
        t.get("--use-wandb")
    t.mark(["--wandb-project", "--wandb-team", "--wandb-group", "--use-tensorboard"])
