"""verl's launch scripts and resolved configurations as recipes.

The rules were read from verl's sources (`config.foreign_keys.READ_FROM`): `core_algos.py` for losses and advantages,
`rollout_corr_helper.py` for corrections, `engine_workers.py` and the configurations for sizes and defaults.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from megatron_rl.instruments.translate.shell import readable, unresolved_names
from megatron_rl.instruments.translate.translation import Translation, number, run_name
from megatron_rl.instruments.translate.verl_keys import (
    ACTOR,
    CORRECTION,
    DEFAULTS,
    EFFECTS,
    MEGATRON,
    MODEL,
    OPTIM,
    ROLLOUT,
    read_overrides,
)


def translate(path: Path, variables: dict[str, str], train_rows: int | None = None) -> Translation:
    """The recipe of verl's script or configuration at ``path``. ``train_rows``: rows of its training data."""
    values, notes, is_whole = read_overrides(path, variables)
    t = Translation("verl", str(path), values, DEFAULTS, notes)
    nodes, gpus = int(number(t.get("trainer.nnodes")) or 1), int(number(t.get("trainer.n_gpus_per_node")) or 8)
    name, keys = "trainer.experiment_name", "trainer.nnodes, trainer.n_gpus_per_node"
    size = "`plan` reads the size of the job from it"
    given = values.get(name)
    if isinstance(given, str) and not unresolved_names(given):
        t.put(f"{name}, {keys}", "name", run_name(given, nodes, gpus), size)
    else:
        t.mark([name])
        t.put(keys, "name", run_name(path.stem, nodes, gpus), f"of the file's name; {size}")
    updates = _batch(t)
    num_steps = _steps(t, train_rows)
    model = _model_and_data(t)
    _rollout(t)
    _objective(t)
    _optimizer(t, updates, num_steps)
    _layout(t, gpus, model)
    _rest_of_the_run(t)
    t.rest(EFFECTS, is_whole)
    return t


def _batch(t: Translation) -> int:
    """Sizes of a step. Both of verl count prompts; each has rollout.n responses."""
    prompts = int(t.take("data.train_batch_size", "batch.prompts", number))
    mini = int(number(t.get(f"{ACTOR}.ppo_mini_batch_size")) or prompts)
    updates = max(1, math.ceil(prompts / mini))
    keys = f"data.train_batch_size, {ACTOR}.ppo_mini_batch_size"
    if prompts % mini:
        updates = max(1, prompts // mini)
        t.guess("batch.minibatches", updates, f"{mini} does not divide {prompts}; verl's last update is smaller")
    else:
        t.put(keys, "batch.minibatches", updates, "their quotient; both count prompts")
    if (epochs := number(t.get(f"{ACTOR}.ppo_epochs")) or 1) > 1:
        t.lose(f"{ACTOR}.ppo_epochs", f"a batch is learned from once; verl makes {int(epochs)} passes over it")
    samples = int(t.take(f"{ROLLOUT}.n", "rollout.num_samples", number))
    if prompts * samples % updates:
        t.note(f"{prompts} · {samples} responses do not divide into {updates} mini-batches")
    if t.get("algorithm.filter_groups.enable") is True:
        t.put("algorithm.filter_groups.enable", "batch.filter_groups", True)
        metric = t.get("algorithm.filter_groups.metric")
        if metric == "acc":
            t.put("algorithm.filter_groups.metric", "batch.filter_metric", "raw_reward", "acc is the reward unshaped")
        elif metric is not None:
            t.put("algorithm.filter_groups.metric", "batch.filter_metric", "reward")
        rounds = int(number(t.get("algorithm.filter_groups.max_num_gen_batches")) or 0)
        if rounds > 0:
            t.put("algorithm.filter_groups.max_num_gen_batches", "batch.max_generations", rounds)
        else:
            t.guess("batch.max_generations", 20, "verl samples until the batch is full, without a limit")
        if (asked := number(t.get("data.gen_batch_size"))) is not None:
            t.put("data.gen_batch_size", "batch.generation_prompts", int(asked))
    return updates


def _steps(t: Translation, train_rows: int | None) -> int:
    total = number(t.get("trainer.total_training_steps"))
    prompts, epochs = t.recipe["batch"]["prompts"], int(number(t.get("trainer.total_epochs")) or 1)
    if total:
        t.put("trainer.total_training_steps", "num_steps", int(total))
    elif train_rows is not None:
        t.put(
            "trainer.total_epochs, data.train_batch_size",
            "num_steps",
            max(1, epochs * (train_rows // prompts)),
            f"of {train_rows} rows; verl leaves out the last, smaller batch of an epoch",
        )
    else:
        t.guess(
            "num_steps",
            500,
            f"verl runs {epochs} epochs, and the file does not say how many rows they have; "
            f"--train-rows N makes it {epochs} · (N // {prompts}), or put `num_epochs: {epochs}` in its place",
        )
    return int(t.recipe["num_steps"])


def _paths(value: Any) -> list[str]:
    return [readable(str(path)) for path in (value if isinstance(value, list) else [value])]


def _model_and_data(t: Translation) -> str:
    model = str(t.known_path(f"{MODEL}.path", "MODEL"))
    t.put(f"{MODEL}.path", "model.path", model)
    for theirs, ours in (("data.train_files", "data.train"), ("data.val_files", "data.validation")):
        if (value := t.known_path(theirs, "DATA.parquet")) is not None:
            key = t.get("data.prompt_key")
            sources = [{"path": path} | ({} if key == "prompt" else {"prompt_key": key}) for path in _paths(value)]
            t.put(theirs, ours, sources)
    for theirs, key in (("data.train_max_samples", "train"), ("data.val_max_samples", "validation")):
        if (number(t.get(theirs)) or -1) > 0:
            t.lose(theirs, f"data.{key}.0.limit takes the first rows of a file; verl draws them at random")
    t.take("data.max_prompt_length", "data.prompt.max_length", number)
    truncation = t.get("data.truncation")
    if t.get("data.filter_overlong_prompts") is True:
        t.put("data.filter_overlong_prompts", "data.prompt.overlong", "drop")
    elif truncation == "error":
        t.put("data.truncation", "data.prompt.overlong", "error")
    elif truncation in ("left", "right", "middle"):
        t.put("data.truncation", "data.prompt.truncation", truncation)
    t.take("data.shuffle", "data.shuffle")
    t.take("data.seed", "data.seed", number)
    if arguments := {
        key.rpartition(".")[2]: value for key, value in t.values.items() if ".apply_chat_template_kwargs." in f".{key}"
    }:
        t.put("data.apply_chat_template_kwargs", "data.prompt.chat_template_args", arguments)
        t.mark(key for key in t.values if ".apply_chat_template_kwargs." in f".{key}")
    _reward(t)
    return model


def _reward(t: Translation) -> None:
    for section in ("reward.custom_reward_function", "custom_reward_function"):
        if path := t.get(f"{section}.path"):
            name = t.get(f"{section}.name") or "compute_score"
            t.put(f"{section}.path, {section}.name", "reward.name", f"{readable(str(path))}:{name}")
            break
    else:
        t.guess("reward.name", "math", "verl chooses by data_source (default_compute_score); see reward.by_source")
    manager = t.get("reward_model.reward_manager") or t.get("reward.reward_manager.name")
    for kwargs in ("reward_model.reward_kwargs", "reward.reward_kwargs"):
        base = f"{kwargs}.overlong_buffer_cfg"
        if t.get(f"{base}.enable") is True and (length := number(t.get(f"{base}.len"))):
            t.put(f"{base}.enable, {base}.len", "reward.overlong.buffer", int(length))
            penalty = number(t.get(f"{base}.penalty_factor"))
            t.put(f"{base}.penalty_factor", "reward.overlong.penalty", 1.0 if penalty is None else float(penalty))
    if manager not in (None, "naive", "dapo"):
        t.lose("reward_model.reward_manager", "rewards are those of reward.name", manager)


def _rollout(t: Translation) -> None:
    engine = t.get(f"{ROLLOUT}.name")
    if engine in (None, "vllm"):
        t.put(f"{ROLLOUT}.name", "rollout.engine", "vllm")
    else:
        t.lose(f"{ROLLOUT}.name", "vLLM generates; its mismatch and speed are others")
        t.guess("rollout.engine", "vllm", f"in place of {readable(str(engine))}")
    t.take("data.max_response_length", "rollout.max_response_length", number)
    t.take(f"{ROLLOUT}.temperature", "rollout.temperature", number)
    t.take(f"{ROLLOUT}.top_p", "rollout.top_p", number)
    t.take(f"{ROLLOUT}.top_k", "rollout.top_k", lambda k: max(0, int(number(k) or 0)))
    t.engine_ranks(f"{ROLLOUT}.tensor_model_parallel_size")
    t.take(f"{ROLLOUT}.gpu_memory_utilization", "rollout.gpu_memory_utilization", number)
    t.take(f"{ROLLOUT}.max_num_seqs", "rollout.max_num_seqs", number)
    t.take(f"{ROLLOUT}.enforce_eager", "rollout.enforce_eager")
    t.take(f"{ROLLOUT}.enable_prefix_caching", "rollout.enable_prefix_caching")
    t.take(f"{ROLLOUT}.seed", "rollout.seed", number)
    if t.is_set(f"{ROLLOUT}.max_num_batched_tokens"):
        t.take(f"{ROLLOUT}.max_num_batched_tokens", "rollout.max_num_batched_tokens", number)
    quantization = t.get(f"{ROLLOUT}.quantization")
    if quantization == "fp8":
        t.put(f"{ROLLOUT}.quantization", "rollout.quantization", {"weights": "fp8"})
    elif quantization is not None:
        t.lose(f"{ROLLOUT}.quantization", "the engine computes in rollout.dtype")
    if (number(t.get(f"{ROLLOUT}.over_sample_rate")) or 0) > 0:
        t.lose(f"{ROLLOUT}.over_sample_rate", "a step waits for its longest response; see batch.oversample")
    t.take(f"{ROLLOUT}.val_kwargs.n", "validation.num_samples", number)
    t.take(f"{ROLLOUT}.val_kwargs.temperature", "validation.temperature", number)
    t.take(f"{ROLLOUT}.val_kwargs.top_p", "validation.top_p", number)
    t.get(f"{ROLLOUT}.val_kwargs.do_sample")


def _objective(t: Translation) -> None:
    _advantage(t)
    mode = t.get(f"{ACTOR}.policy_loss.loss_mode")
    is_bypass = t.get(f"{CORRECTION}.bypass_mode") is True
    is_reinforce = is_bypass and t.get(f"{CORRECTION}.loss_type") == "reinforce"
    low, high = (float(number(t.get(f"{ACTOR}.clip_ratio_{side}")) or 0.2) for side in ("low", "high"))
    bound = float(number(t.get(f"{ACTOR}.clip_ratio_c")) or 3.0)
    if t.is_set(f"{ACTOR}.clip_ratio"):
        t.lose(f"{ACTOR}.clip_ratio", "none in verl either: clip_ratio_low and clip_ratio_high are set by default")
    terms = {
        "vanilla": {"name": "ppo_clip", "clip_low": low, "clip_high": high, "dual_clip": bound},
        "gspo": {"name": "gspo", "clip_low": low, "clip_high": high},
        "geo_mean": {"name": "gmpo", "log_clip_low": low, "log_clip_high": high},
        "cispo": {"name": "cispo", "clip_low": low if low < 1 else None, "clip_high": high},
        "dppo_tv": {"name": "dppo", "divergence": "tv", "delta": high, "delta_low": low, "cap": bound},
        "dppo_kl": {"name": "dppo", "divergence": "kl", "delta": high, "delta_low": low, "cap": bound},
        "sapo": {"name": "sapo"},
    }
    if mode == "sapo":
        for ours, theirs in (("tau_positive", "tau_pos"), ("tau_negative", "tau_neg")):
            written = (
                f"{ACTOR}.policy_loss.{theirs}" if t.is_set(f"{ACTOR}.policy_loss.{theirs}") else f"{ACTOR}.{theirs}"
            )
            terms["sapo"][ours] = float(number(t.get(written)) or DEFAULTS[f"{ACTOR}.{theirs}"])
    keys = f"{ACTOR}.policy_loss.loss_mode, {ACTOR}.clip_ratio_low, {ACTOR}.clip_ratio_high, {ACTOR}.clip_ratio_c"
    if is_reinforce:
        t.put(f"{CORRECTION}.loss_type", "objective.policy_term", {"name": "reinforce"}, "without a clip range")
    elif mode in terms:
        t.put(keys, "objective.policy_term", terms[mode])
        if mode == "cispo" and low >= 1:
            t.note(f"{ACTOR}.clip_ratio_low: {low:g} is below a ratio of 0 and bounds nothing; here null")
        if mode.startswith("dppo") and not is_bypass:
            t.note(
                "dppo is measured from the engine's probability here, as in its paper; verl measures from the"
                " learner's at rollout weights unless bypass_mode is true"
            )
    else:
        t.lose(f"{ACTOR}.policy_loss.loss_mode", "no such policy term; docs/add-an-objective.md says how to add one")
        t.guess("objective.policy_term", terms["vanilla"], f"in place of {mode}")
    if is_bypass and not is_reinforce and not str(mode).startswith("dppo"):
        t.put(f"{CORRECTION}.bypass_mode", "objective.anchor", "bypass")
    _aggregation(t, mode)
    t.take(f"{ACTOR}.entropy_coeff", "objective.entropy_bonus", lambda value: float(number(value) or 0))
    carries_weight = str(mode).startswith("dppo") and not is_reinforce
    _correction(t, takes_weight=is_reinforce or not (is_bypass or carries_weight), is_bypass=is_bypass)
    if t.get(f"{ACTOR}.use_kl_loss") is True and number(t.get(f"{ACTOR}.kl_loss_coef")):
        t.lose(
            f"{ACTOR}.use_kl_loss",
            f"there is no reference policy: the loss lacks {t.get(f'{ACTOR}.kl_loss_coef')} times the KL to it",
        )
    if t.get("algorithm.use_kl_in_reward") is True:
        t.lose("algorithm.use_kl_in_reward", "there is no reference policy: rewards lack the KL to it")
    for theirs in (f"{ACTOR}.router_replay.mode", f"{MEGATRON}.router_replay.mode"):
        if t.get(theirs) in ("R2", "R3"):
            t.put(theirs, "routing.replay", str(t.get(theirs)).lower())
    if t.get(f"{ROLLOUT}.enable_rollout_routing_replay") is True:
        t.put(f"{ROLLOUT}.enable_rollout_routing_replay", "routing.replay", "r3")


def _advantage(t: Translation) -> None:
    key, name = "algorithm.adv_estimator", str(t.get("algorithm.adv_estimator"))
    by_std = t.get("algorithm.norm_adv_by_std_in_grpo") is not False
    same = {
        "grpo": "grpo" if by_std else "dr_grpo",
        "rloo": "rloo",
        "rloo_vectorized": "rloo",
        "grpo_vectorized": "grpo" if by_std else "dr_grpo",
        "reinforce_plus_plus_baseline": "reinforce_pp",
    }
    if name in same:
        both = f"{key}, algorithm.norm_adv_by_std_in_grpo" if name.startswith("grpo") else key
        t.put(both, "objective.advantage", same[name])
    else:
        effects = {
            "gae": "there is no value function: advantages come from the group",
            "reinforce_plus_plus": "verl whitens rewards over the batch without the mean of the group",
        }
        t.lose(key, effects.get(name, "no such advantage; see docs/add-an-objective.md"))
        t.guess(
            "objective.advantage", "reinforce_pp" if name == "reinforce_plus_plus" else "grpo", f"in place of {name}"
        )
    if t.recipe["rollout"]["num_samples"] < 2 and t.recipe["objective"]["advantage"] != "reinforce":
        t.guess("objective.advantage", "reinforce", "rollout.num_samples is 1: there is no group")


def _aggregation(t: Translation, mode: Any) -> None:
    key, name = f"{ACTOR}.loss_agg_mode", t.get(f"{ACTOR}.loss_agg_mode")
    if mode in ("gspo", "geo_mean"):
        note = f"verl's {mode} averages over sequences whatever {key} says"
        t.put(f"{ACTOR}.policy_loss.loss_mode, {key}", "objective.aggregation", "seq-mean-token-mean", note)
    elif name == "token-sum":
        t.lose(key, "the gradient lacks the factor of the number of tokens, which Adam divides out but for eps")
        t.guess("objective.aggregation", "token-mean", "in place of token-sum")
    else:
        t.put(key, "objective.aggregation", name)
        if name == "seq-mean-token-sum-norm" and (scale := number(t.get(f"{ACTOR}.loss_scale_factor"))) is not None:
            t.put(f"{ACTOR}.loss_scale_factor", "objective.max_response_length", int(scale))


def _correction(t: Translation, takes_weight: bool, is_bypass: bool) -> None:
    """Weights and masks. verl's bounds for k1 = -log ratio bound 1/ratio; a masked token leaves its count of tokens."""
    corrections: list[dict[str, Any]] = []
    renormalizes = not is_bypass and t.recipe["objective"]["aggregation"] == "token-mean"
    level, threshold = t.get(f"{CORRECTION}.rollout_is"), t.get(f"{CORRECTION}.rollout_is_threshold")
    cap = number(t.get(f"{ACTOR}.tis_imp_ratio_cap")) or 0
    if cap > 0:
        level, threshold = "token", cap
    if level is not None and not takes_weight:
        t.lose(f"{CORRECTION}.rollout_is", "the ratio of this policy term is against the engine already, as verl's is")
    elif level is not None:
        lower, _, upper = str(threshold).rpartition("_")
        item: dict[str, Any] = {"mode": "mis" if lower else "tis", "level": level, "cap": float(upper)}
        if lower:
            item["lower"] = float(lower)
        elif t.get(f"{CORRECTION}.rollout_is_batch_normalize") is True:
            if not is_bypass:
                item["normalize"] = True
            else:
                t.lose(
                    f"{CORRECTION}.rollout_is_batch_normalize",
                    "the weight is not divided by its mean, because it depends on the policy under way",
                )
        corrections.append(item)
    options = [part.strip() for part in str(t.get(f"{CORRECTION}.rollout_rs") or "").split(",") if part.strip()]
    bounds = [part.strip() for part in str(t.get(f"{CORRECTION}.rollout_rs_threshold")).split(",")]
    for option, bound in zip(options, bounds * len(options) if len(bounds) == 1 else bounds, strict=False):
        corrections += _rejection(t, option, bound, renormalizes)
    if options and is_bypass:
        t.note("a dropped token keeps its place in the denominators here; in verl it leaves the count of tokens")
    if corrections:
        keys = [
            f"{CORRECTION}.{key}"
            for key in ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
        ]
        keys = [key for key in keys if t.is_set(key)] or [f"{ACTOR}.tis_imp_ratio_cap"]
        t.put(", ".join(keys), "objective.correction", corrections)


def _rejection(t: Translation, option: str, bound: str, renormalizes: bool) -> list[dict[str, Any]]:
    out = {"renormalize": True} if renormalizes else {}
    if option.endswith("_k1"):
        lower, _, upper = bound.rpartition("_")
        low, high = (float(lower) if lower else 1 / float(upper)), float(upper)
        ratios = {"lower": round(1 / high, 12), "upper": round(1 / low, 12)}
        modes = {
            "token_k1": {"mode": "mask", "level": "token"},
            "seq_sum_k1": {"mode": "mask", "level": "sequence"},
            "seq_mean_k1": {"mode": "reject", "statistic": "seq_mean_k1"},
        }
        return [{**modes[option], **ratios, **out}]
    if option in ("seq_mean_k3", "seq_max_k3"):
        statistic = "max_k3" if option == "seq_max_k3" else option
        return [{"mode": "reject", "statistic": statistic, "upper": float(bound), **out}]
    if option == "token_k2":  # (log ratio)² / 2 <= c bounds the ratio on both sides
        edge = math.exp(math.sqrt(2 * float(bound)))
        return [{"mode": "mask", "level": "token", "lower": 1 / edge, "upper": edge, **out}]
    t.lose(f"{CORRECTION}.rollout_rs", f"nothing is dropped by {option}: no such statistic", f"{option} {bound}")
    return []


def _optimizer(t: Translation, updates: int, num_steps: int) -> None:
    ours = "learner.optimizer"
    lr = t.take(f"{OPTIM}.lr", f"{ours}.lr", lambda value: float(number(value)))
    betas = t.get(f"{OPTIM}.betas")
    for i in (0, 1):
        t.put(f"{OPTIM}.betas", f"{ours}.beta{i + 1}", float(betas[i]))
    t.take(f"{OPTIM}.weight_decay", f"{ours}.weight_decay", lambda value: float(number(value) or 0))
    t.take(f"{OPTIM}.clip_grad", f"{ours}.clip_grad", lambda value: float(number(value) or 0))
    warmup, key = int(number(t.get(f"{OPTIM}.lr_warmup_steps")) or 0), f"{OPTIM}.lr_warmup_steps"
    if warmup <= 0 and (ratio := number(t.get(f"{OPTIM}.lr_warmup_steps_ratio")) or 0) > 0:
        warmup, key = int(ratio * num_steps), f"{OPTIM}.lr_warmup_steps_ratio"
    if warmup > 0:
        t.put(
            key,
            "schedule.warmup_steps",
            warmup * updates,
            f"verl's scheduler moves once a step, ours once an update: times {updates}",
        )
        if start := float(number(t.get(f"{OPTIM}.lr_warmup_init")) or 0):
            t.put(f"{OPTIM}.lr_warmup_init", "schedule.warmup_from", start)
    key = f"{OPTIM}.lr_scheduler_type" if t.is_set(f"{OPTIM}.lr_scheduler_type") else f"{OPTIM}.lr_decay_style"
    style = t.get(f"{OPTIM}.warmup_style") or t.get(key)
    if style in ("linear", "cosine"):
        t.put(key, "schedule.style", style)
        floor = number(t.get(f"{OPTIM}.min_lr_ratio"))
        t.put(
            f"{OPTIM}.min_lr, {OPTIM}.min_lr_ratio",
            "schedule.min_lr",
            float(floor) * lr if floor is not None else float(number(t.get(f"{OPTIM}.min_lr")) or 0),
        )
        if steps := number(t.get(f"{OPTIM}.lr_decay_steps")):
            t.put(f"{OPTIM}.lr_decay_steps", "schedule.decay_steps", int(steps) * updates, "in updates")
    elif style != "constant":
        t.lose(key, "no such decay; the rate stays constant after the warm-up")
    for theirs in (f"{OPTIM}.total_training_steps",):
        t.get(theirs)


def _layout(t: Translation, gpus: int, model: str) -> None:
    is_megatron = any(key.startswith(f"{MEGATRON}.") for key in t.values) or t.get(f"{ACTOR}.strategy") == "megatron"
    context, moe = 1, re.search(r"-A\d", Path(model).name) is not None
    if is_megatron:
        sizes = {
            "tensor": "tensor_model_parallel_size",
            "pipeline": "pipeline_model_parallel_size",
            "context": "context_parallel_size",
            "expert": "expert_model_parallel_size",
        }
        for ours, theirs in sizes.items():
            t.take(f"{MEGATRON}.{theirs}", f"learner.parallel.{ours}", lambda value: int(number(value) or 1))
        parallel = t.recipe["learner"]["parallel"]
        context = parallel["context"]
        if (inner := number(t.get(f"{MEGATRON}.expert_tensor_parallel_size"))) is not None:
            t.put(f"{MEGATRON}.expert_tensor_parallel_size", "learner.parallel.expert_tensor", int(inner))
        elif moe and parallel["tensor"] > 1:
            t.put(
                f"{MEGATRON}.tensor_model_parallel_size",
                "learner.parallel.expert_tensor",
                parallel["tensor"],
                "Megatron cuts experts like the rest where expert_tensor_parallel_size is null",
            )
        for ours, theirs in (("weights", "param"), ("optimizer", "optimizer"), ("gradients", "grad")):
            if t.get(f"{MEGATRON}.{theirs}_offload") is True:
                t.put(f"{MEGATRON}.{theirs}_offload", f"learner.offload.{ours}", True)
        offloads = f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload"
        if t.get(offloads) is True:
            t.put(offloads, "learner.offload.optimizer", True)
            t.put(offloads, "learner.offload.during_passes", True, "verl's optimizer computes on the host, too")
        if moe:
            own = f"{MEGATRON}.override_transformer_config"
            t.dispatcher(f"{own}.moe_token_dispatcher_type", f"{own}.moe_enable_deepep")
            t.fp32_router(f"{own}.moe_router_dtype")
        granularity = t.get(f"{MEGATRON}.override_transformer_config.recompute_granularity")
        if granularity is None:
            t.guess(
                "learner.recompute",
                "full",
                "verl keeps all activations; no number changes, the learner is slower"
                " by up to a third; use none where memory allows",
            )
        if granularity in ("full", "selective"):
            t.put(f"{MEGATRON}.override_transformer_config.recompute_granularity", "learner.recompute", granularity)
            if granularity == "selective":
                t.note("recompute selective is of attention and experts here; verl's recompute_modules may say less")
    else:
        t.cut_of_fsdp(min(4, gpus))
        if moe:
            t.guess("learner.parallel.expert", min(8, gpus), "as for learner.parallel.tensor")
        if t.get(f"{MODEL}.enable_gradient_checkpointing") is not False:
            t.put(f"{MODEL}.enable_gradient_checkpointing", "learner.recompute", "full")
        for ours, theirs in (("weights", "param"), ("optimizer", "optimizer")):
            if t.get(f"{ACTOR}.fsdp_config.{theirs}_offload") is True:
                t.put(f"{ACTOR}.fsdp_config.{theirs}_offload", f"learner.offload.{ours}", True)
        t.guess("learner.offload.gradients", True, "FSDP frees gradients after an update")
        if (cut := int(number(t.get(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")) or 1)) > 1:
            t.lose(
                f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
                f"sequences are not cut over {cut} GPUs; learner.parallel.context does it",
            )
    t.get(f"{MODEL}.enable_gradient_checkpointing")
    _microbatch(t, context)
    if t.get(f"{MODEL}.use_fused_kernels") is True:
        t.put(f"{MODEL}.use_fused_kernels", "learner.fused_head", True)
    for rank, alpha in (("lora_rank", "lora_alpha"), ("lora.rank", "lora.alpha")):
        if (size := number(t.get(f"{MODEL}.{rank}")) or 0) > 0:
            t.put(f"{MODEL}.{rank}", "learner.lora.rank", int(size))
            scale = number(t.get(f"{MODEL}.{alpha}"))
            t.put(
                f"{MODEL}.{alpha}",
                "learner.lora.alpha",
                float({"lora_alpha": 16, "lora.alpha": 32}[alpha] if scale is None else scale),
            )


def _microbatch(t: Translation, context: int) -> None:
    ours, longest = "learner.max_tokens_per_microbatch", t.recipe["data"]["prompt"]["max_length"]
    longest += t.recipe["rollout"]["max_response_length"]
    sequences = number(t.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu"))
    if t.get(f"{ACTOR}.use_dynamic_bsz") is True or not sequences:
        tokens = int(number(t.get(f"{ACTOR}.ppo_max_token_len_per_gpu")) or 16384)
        note = f"times {context} ranks of context parallelism" if context > 1 else ""
        t.put(f"{ACTOR}.ppo_max_token_len_per_gpu", ours, tokens * context, note)
    else:
        t.guess(
            ours,
            int(sequences) * longest,
            f"verl counts {int(sequences)} sequences a microbatch; as many of the longest have so many tokens",
        )
    t.get(f"{ACTOR}.use_dynamic_bsz")


def _rest_of_the_run(t: Translation) -> None:
    if t.get("trainer.resume_mode") == "resume_path":
        t.lose("trainer.resume_mode", "the run begins anew; `megatron-rl train --resume DIR` takes checkpoints of ours")
    t.take("trainer.save_freq", "checkpoint.every", lambda value: max(0, int(number(value) or 0)))
    if (kept := number(t.get("trainer.max_actor_ckpt_to_keep"))) is not None:
        t.put("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", int(kept))
    if t.get(f"{ACTOR}.checkpoint.async_save") is True:
        t.put(f"{ACTOR}.checkpoint.async_save", "checkpoint.async_save", True)
    every = t.take("trainer.test_freq", "validation.every", lambda value: max(0, int(number(value) or 0)))
    if every and t.get("trainer.val_before_train") is False:
        t.put("trainer.val_before_train", "validation.at_start", False)
    elif not every and t.is_set("trainer.val_before_train") and t.get("trainer.val_before_train") is True:
        t.put("trainer.val_before_train", "validation.at_start", True)
    t.get("trainer.val_before_train")
    if (folder := t.get("trainer.default_local_dir")) is not None:
        t.put("trainer.default_local_dir", "run_root", readable(str(folder)))
    logger = t.get("trainer.logger")
    loggers = logger if isinstance(logger, list) else [logger]
    project = readable(str(t.get("trainer.project_name")))
    for name, key in (("wandb", "project"), ("mlflow", "experiment"), ("swanlab", "project")):
        if name in loggers:
            t.put("trainer.logger, trainer.project_name", f"monitor.sinks.{name}.{key}", project)
    t.get("trainer.project_name")
