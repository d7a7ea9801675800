"""NeMo-RL's configurations as recipes.

The rules were read from NeMo-RL's sources (`config.foreign_keys.READ_FROM`): `loss_functions.py` for losses and
corrections, `advantage_estimator.py` for advantages, `grpo.py` and the policy workers for sizes and the schedule.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from megatron_rl.config.rollout import MOST_KEPT
from megatron_rl.instruments.translate.nemo_rl_keys import (
    CORE,
    DEFAULTS,
    EFFECTS,
    ENGINE,
    FSDP,
    GENERATION,
    read_configuration,
)
from megatron_rl.instruments.translate.shell import readable
from megatron_rl.instruments.translate.translation import Translation, number, run_name

ENDLESS = 100_000
"""A number of steps from which on the end of the data is meant."""


def translate(path: Path, variables: dict[str, str], train_rows: int | None = None) -> Translation:
    """The recipe of NeMo-RL's configuration at ``path``. ``train_rows``: rows of its training data."""
    values, notes, own = read_configuration(path, variables)
    t = Translation("NeMo-RL", str(path), values, DEFAULTS, notes, own=own)
    generating = _generating_gpus(t)
    nodes, gpus = _whole(t, "cluster.num_nodes", 1), _whole(t, "cluster.gpus_per_node", 8)
    nodes, gpus = _learning(nodes, gpus, generating)
    keys = "cluster.num_nodes, cluster.gpus_per_node"
    note = (
        f"`plan` reads the size of the learner from it; {generating} GPUs generate"
        if generating
        else ("`plan` reads the size of the job from it")
    )
    t.put(keys, "name", run_name(path.stem, nodes, gpus), note)
    t.take("grpo.seed", "seed", number)
    updates = _batch(t)
    _steps(t, train_rows)
    model = str(t.known_path("policy.model_name", "MODEL"))
    t.put("policy.model_name", "model.path", model)
    _data(t)
    _lengths(t)
    _rollout(t, generating)
    _reward(t)
    _objective(t)
    is_megatron = t.get(f"{CORE}.enabled") is True
    _optimizer(t, updates, is_megatron)
    is_moe = re.search(r"-A\d", Path(model).name) is not None
    if is_megatron:
        _megatron(t, is_moe)
    else:
        _fsdp(t, gpus, is_moe)
    if not generating:
        for ours in ("weights", "optimizer", "gradients"):
            t.put(f"{GENERATION}.colocated.enabled", f"learner.offload.{ours}", True, "NeMo-RL moves the learner aside")
    _microbatch(t)
    _rest_of_the_run(t)
    other = r"policy\.dtensor_cfg\..*" if is_megatron else r"policy\.megatron_cfg\..*"
    t.rest([(other, ""), *EFFECTS], is_whole=False)
    return t


def _whole(t: Translation, theirs: str, otherwise: int) -> int:
    value = number(t.get(theirs))
    return otherwise if value is None else int(value)


def _generating_gpus(t: Translation) -> int:
    """GPUs that generate alone; 0 where the learner's own do."""
    if t.get(f"{GENERATION}.colocated.enabled") is not False:
        return 0
    base = f"{GENERATION}.colocated.resources"
    nodes = max(1, _whole(t, f"{base}.num_nodes", 1))
    return nodes * _whole(t, f"{base}.gpus_per_node", _whole(t, "cluster.gpus_per_node", 8))


def _learning(nodes: int, gpus: int, generating: int) -> tuple[int, int]:
    if generating and nodes > 1:
        return max(1, nodes - math.ceil(generating / gpus)), gpus
    return nodes, max(1, gpus - generating)


def _batch(t: Translation) -> int:
    """Sizes of a step. policy.train_global_batch_size counts responses."""
    prompts = int(t.take("grpo.num_prompts_per_step", "batch.prompts", number))
    samples = int(t.take("grpo.num_generations_per_prompt", "rollout.num_samples", number))
    key, responses = "policy.train_global_batch_size", prompts * samples
    size = _whole(t, key, responses)
    updates = max(1, responses // size)
    if responses % size:
        t.guess("batch.minibatches", updates, f"{key} {size} does not divide the {responses} responses of a step")
    else:
        t.put(
            f"grpo.num_prompts_per_step, grpo.num_generations_per_prompt, {key}",
            "batch.minibatches",
            updates,
            f"{responses} responses of a step / {size} of an update",
        )
    if t.get("grpo.use_dynamic_sampling") is True:
        t.put("grpo.use_dynamic_sampling", "batch.filter_groups", True)
        t.take("grpo.dynamic_sampling_max_gen_batches", "batch.max_generations", number)
        if (factor := number(t.get("grpo.batch_multiplier")) or 1) > 1:
            t.put("grpo.batch_multiplier", "batch.generation_prompts", math.ceil(prompts * factor), "times the prompts")
    return updates


def _steps(t: Translation, train_rows: int | None) -> None:
    most, epochs = number(t.get("grpo.max_num_steps")), _whole(t, "grpo.max_num_epochs", 1)
    prompts = t.recipe["batch"]["prompts"]
    if train_rows is not None:
        steps = max(1, epochs * (train_rows // prompts))
        steps = min(steps, int(most)) if most else steps
        keys = "grpo.max_num_steps, grpo.max_num_epochs, grpo.num_prompts_per_step"
        t.put(keys, "num_steps", steps, f"of {train_rows} rows")
    elif most and most < ENDLESS:
        t.put("grpo.max_num_steps", "num_steps", int(most), f"NeMo-RL ends before, after {epochs} epochs")
    else:
        rows = f"--train-rows N makes it {epochs} · (N // {prompts}), or put `num_epochs: {epochs}` in its place"
        t.guess("num_steps", 500, f"NeMo-RL runs {epochs} epochs; {rows}")


def _data(t: Translation) -> None:
    for part in ("train", "validation"):
        listed = t.get(f"data.{part}")
        start = f"data.{part}."
        own = {key.removeprefix(start): value for key, value in t.values.items() if key.startswith(start)}
        sections = listed if isinstance(listed, list) else [own]
        sources = [_source(t, part, section) for section in sections if isinstance(section, dict) and section]
        sources = [source for source in sources if source is not None]
        t.mark(f"data.{part}.{key}" for key in ("dataset_name", "data_path", "input_key", "output_key"))
        if sources:
            t.put(f"data.{part}.dataset_name, data.{part}.data_path", f"data.{part}", sources)
        elif part == "train":
            t.guess("data.train", [{"path": "DATA.jsonl"}], "the configuration names no training data")
    if (share := number(t.get("data.train.split_validation_size"))) and "validation" not in t.recipe["data"]:
        effect = f"{share:g} of the data is not held out; name a file of its own under data.validation"
        t.lose("data.train.split_validation_size", effect)
    t.take("data.shuffle", "data.shuffle")
    t.put("grpo.seed", "data.seed", int(number(t.get("grpo.seed")) or 0))
    for theirs, ours in (("prompt_file", "template"), ("system_prompt_file", "system")):
        for section in ("data.default", "data.train", "data.validation"):
            if (name := t.get(f"{section}.{theirs}")) is not None:
                t.lose(f"{section}.{theirs}", f"the text of {name} was not read; data.prompt.{ours} has it")
    if isinstance(arguments := t.get("policy.tokenizer.chat_template_kwargs"), dict) and arguments:
        t.put("policy.tokenizer.chat_template_kwargs", "data.prompt.chat_template_args", arguments)
    kwargs = {
        key.rpartition(".")[2]: value
        for key, value in t.values.items()
        if key.startswith("policy.tokenizer.chat_template_kwargs.")
    }
    if kwargs:
        theirs = ", ".join(f"policy.tokenizer.chat_template_kwargs.{key}" for key in kwargs)
        t.put(theirs, "data.prompt.chat_template_args", kwargs)


def _source(t: Translation, part: str, section: dict[str, Any]) -> dict[str, Any] | None:
    path, name = section.get("data_path"), section.get("dataset_name")
    if path is None and name is None:
        return None
    if path is None:
        t.note(f"data.{part}.dataset_name: {name} is a loader of NeMo-RL; put the file with its rows in its place")
        return {"path": f"{name}.jsonl"}
    source = {"path": readable(str(path))}
    if (prompt := section.get("input_key")) is not None:
        source["prompt_key"] = str(prompt)
    if (answer := section.get("output_key")) is not None:
        source["answer_key"] = str(answer)
    return source


def _lengths(t: Translation) -> None:
    total = number(t.get("policy.max_total_sequence_length"))
    response = int(number(t.get(f"{GENERATION}.max_new_tokens")) or total or 512)
    prompt = int(number(t.get("data.max_input_seq_length")) or total or 512)
    total = int(total or prompt + response)
    t.get(f"{ENGINE}.max_model_len")
    if prompt + response <= total:
        t.put("data.max_input_seq_length", "data.prompt.max_length", prompt)
        t.put(f"{GENERATION}.max_new_tokens", "rollout.max_response_length", response)
    else:
        given = min(prompt, 1024, total // 2) if prompt >= total else prompt
        why = f"NeMo-RL bounds prompt and response together, by {total}"
        t.guess("data.prompt.max_length", given, why)
        t.guess("rollout.max_response_length", min(response, total - given), why)
        t.mark(["data.max_input_seq_length"])
    t.guess("data.prompt.overlong", "drop", "NeMo-RL cuts longer prompts and does not learn from them")


def _rollout(t: Translation, generating: int) -> None:
    backend = t.get(f"{GENERATION}.backend")
    engine = "vllm_server" if generating else "vllm"
    if backend == "vllm":
        t.put(f"{GENERATION}.backend, {GENERATION}.colocated.enabled", "rollout.engine", engine)
    else:
        t.lose(f"{GENERATION}.backend", "vLLM generates; its mismatch and speed are others")
        t.guess("rollout.engine", engine, f"in place of {backend}")
    t.take(f"{GENERATION}.temperature", "rollout.temperature", lambda value: float(number(value)))
    t.take(f"{GENERATION}.top_p", "rollout.top_p", lambda value: float(number(value)))
    t.put(f"{GENERATION}.top_k", "rollout.top_k", max(0, _whole(t, f"{GENERATION}.top_k", 0)))
    t.engine_ranks(f"{ENGINE}.tensor_parallel_size")
    t.take(f"{ENGINE}.gpu_memory_utilization", "rollout.gpu_memory_utilization", number)
    t.take(f"{ENGINE}.enforce_eager", "rollout.enforce_eager", bool)
    for theirs in (f"{ENGINE}.enable_prefix_caching", "policy.generation.vllm_kwargs.enable_prefix_caching"):
        t.take(theirs, "rollout.enable_prefix_caching", bool)
    for theirs in (f"{ENGINE}.max_num_seqs", "policy.generation.vllm_kwargs.max_num_seqs"):
        t.take(theirs, "rollout.max_num_seqs", number)
    for theirs in (f"{ENGINE}.max_num_batched_tokens", "policy.generation.vllm_kwargs.max_num_batched_tokens"):
        t.take(theirs, "rollout.max_num_batched_tokens", number)
    for theirs, ours in (("precision", "weights"), ("kv_cache_dtype", "kv_cache")):
        if str(t.get(f"{ENGINE}.{theirs}")).startswith("fp8"):
            t.put(f"{ENGINE}.{theirs}", f"rollout.quantization.{ours}", "fp8")
    if (quantization := t.get("policy.generation.vllm_kwargs.quantization")) is not None:
        t.lose("policy.generation.vllm_kwargs.quantization", "the engine computes in rollout.dtype", quantization)
    if generating:
        size = t.recipe["rollout"]["tensor_parallel"]
        base = f"{GENERATION}.colocated.resources"
        count = max(1, generating // size)
        note = f"{generating} GPUs / {size} of a server"
        t.put(f"{base}.num_nodes, {base}.gpus_per_node", "rollout.servers.count", count, note)
    if t.get("grpo.async_grpo.enabled") is True:
        if not generating:
            t.guess("rollout.engine", "vllm_server", "generation ahead of the learner needs servers")
        age = max(1, _whole(t, "grpo.async_grpo.max_trajectory_age_steps", 1))
        t.put("grpo.async_grpo.enabled, grpo.async_grpo.max_trajectory_age_steps", "rollout.max_staleness", age)
        if t.get("grpo.async_grpo.in_flight_weight_updates") is True:
            anew = t.get("grpo.async_grpo.recompute_kv_cache_after_weight_updates") is True
            mode = "abort_and_resume" if anew else "keep"
            note = "keys and values are computed anew" if anew else "old keys and values are kept"
            t.put("grpo.async_grpo.in_flight_weight_updates", "rollout.in_flight.mode", mode, note)
    if 0 < t.recipe["rollout"]["top_k"] <= MOST_KEPT and t.recipe["rollout"]["engine"] == "vllm":
        note = "NeMo-RL's learner takes its softmax over the tokens that are left, too"
        t.put(f"{GENERATION}.top_k", "rollout.kept_sets", True, note)


def _reward(t: Translation) -> None:
    names = {str(value) for key, value in t.values.items() if re.fullmatch(r"data\.(default|train)\.env_name", key)}
    if names <= {"math", "dapo"}:
        t.put("data.default.env_name", "reward.name", "math")
    else:
        t.lose("data.default.env_name", "an environment is a reward function here, f(response, answer)")
        t.guess("reward.name", "math", f"in place of {', '.join(sorted(names))}")
    if t.get("grpo.overlong_filtering") is True:
        t.put("grpo.overlong_filtering", "reward.mask_truncated", True)
    if t.get("grpo.reward_shaping.enabled") is True:
        base = "grpo.reward_shaping"
        if t.get(f"{base}.stop_properly_penalty_coef") is not None:
            t.lose(
                f"{base}.stop_properly_penalty_coef",
                "rewards of truncated responses are not scaled; see reward.mask_truncated and reward.overlong",
            )
        else:
            penalty = number(t.get(f"{base}.overlong_buffer_penalty"))
            t.put(
                f"{base}.overlong_buffer_penalty", "reward.overlong.penalty", 1.0 if penalty is None else float(penalty)
            )
            longest = t.recipe["rollout"]["max_response_length"]
            buffer = min(_whole(t, f"{base}.overlong_buffer_length", 128), longest - 1)
            t.put(f"{base}.overlong_buffer_length", "reward.overlong.buffer", buffer)
            if (end := number(t.get(f"{base}.max_response_length"))) and end != longest:
                t.lose(f"{base}.max_response_length", f"the buffer ends at rollout.max_response_length, {longest}")
    if t.get("grpo.reward_scaling.enabled") is True:
        t.lose("grpo.reward_scaling.enabled", "rewards keep their scale, which normalized advantages do not have")


def _objective(t: Translation) -> None:
    _advantage(t)
    low, high = (float(number(t.get(f"loss_fn.ratio_clip_{side}"))) for side in ("min", "max"))
    bound = number(t.get("loss_fn.ratio_clip_c"))
    by_sequence = t.get("loss_fn.sequence_level_importance_ratios") is True
    keys = "loss_fn.ratio_clip_min, loss_fn.ratio_clip_max"
    if t.get("loss_fn.use_cispo") is True:
        term: dict[str, Any] = {"name": "cispo", "clip_low": low if low < 1 else None, "clip_high": high}
        keys = f"loss_fn.use_cispo, {keys}"
        if low >= 1:
            t.note(f"loss_fn.ratio_clip_min {low:g} is a ratio of 0 or less and bounds nothing; here null")
    elif by_sequence:
        term = {"name": "gspo", "clip_low": low, "clip_high": high}
        keys = f"loss_fn.sequence_level_importance_ratios, {keys}"
    elif t.get("loss_fn.disable_ppo_ratio") is True:
        term, keys = {"name": "reinforce"}, "loss_fn.disable_ppo_ratio"
    else:
        term = {
            "name": "ppo_clip",
            "clip_low": low,
            "clip_high": high,
            "dual_clip": None if bound is None else float(bound),
        }
        keys = f"{keys}, loss_fn.ratio_clip_c"
    if bound is not None and "dual_clip" not in term:
        t.lose("loss_fn.ratio_clip_c", f"{term['name']} has no bound for negative advantages")
    t.put(keys, "objective.policy_term", term)
    t.mark(["loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max", "loss_fn.ratio_clip_c"])
    if t.get("loss_fn.force_on_policy_ratio") is True and t.recipe["batch"]["minibatches"] > 1:
        t.lose("loss_fn.force_on_policy_ratio", "from the second update of a step on the ratio is not 1 and is clipped")
    by_token = t.get("loss_fn.token_level_loss") is not False
    t.put("loss_fn.token_level_loss", "objective.aggregation", "token-mean" if by_token else "seq-mean-token-mean")
    penalty = number(t.get("loss_fn.reference_policy_kl_penalty")) or 0
    if penalty:
        t.lose(
            "loss_fn.reference_policy_kl_penalty",
            f"there is no reference policy: the loss lacks {penalty:g} times the KL to it",
        )
    if weight := number(t.get("loss_fn.positive_example_nll_weight")) or 0:
        t.lose("loss_fn.positive_example_nll_weight", f"the loss lacks {weight:g} times that of correct responses")
    for side in ("low", "high"):
        if number(t.get(f"grpo.advantage_clip_{side}")) is not None:
            t.lose(f"grpo.advantage_clip_{side}", "advantages are not clipped")
    _correction(t, by_sequence, term["name"])
    if t.get("policy.router_replay.enabled") is True:
        t.put("policy.router_replay.enabled", "routing.replay", "r3")


def _advantage(t: Translation) -> None:
    key = "grpo.adv_estimator.name"
    name = str(t.get(key))
    flags = {}
    for flag in ("normalize_rewards", "use_leave_one_out_baseline"):
        own = f"grpo.adv_estimator.{flag}"
        flags[flag] = t.get(own if t.is_set(own) else f"grpo.{flag}") is not False
        t.mark([own, f"grpo.{flag}"])
    normalized, leaves_out = flags["normalize_rewards"], flags["use_leave_one_out_baseline"]
    both = f"{key}, grpo.normalize_rewards, grpo.use_leave_one_out_baseline"
    if t.recipe["rollout"]["num_samples"] < 2:
        t.guess("objective.advantage", "reinforce", "there is one response a prompt, and so no group")
    elif name == "grpo" and normalized:
        t.put(both, "objective.advantage", "grpo")
        if leaves_out:
            t.lose(
                "grpo.use_leave_one_out_baseline",
                "mean and deviation are of the whole group, the response itself"
                " included; advantages have about the same ratio to each other",
            )
    elif name == "grpo":
        t.put(both, "objective.advantage", "rloo" if leaves_out else "dr_grpo")
    elif name == "reinforce_plus_plus" and t.get("grpo.adv_estimator.minus_baseline") is not False:
        t.put(f"{key}, grpo.adv_estimator.minus_baseline", "objective.advantage", "reinforce_pp")
    else:
        instead = "reinforce_pp" if name == "reinforce_plus_plus" else "grpo"
        t.lose(key, "no such advantage; see docs/add-an-objective.md")
        t.guess("objective.advantage", instead, f"in place of {name}")
    t.get("grpo.adv_estimator.minus_baseline")


def _correction(t: Translation, by_sequence: bool, term: str) -> None:
    key, kind = "loss_fn.use_importance_sampling_correction", t.get("loss_fn.truncated_importance_sampling_type")
    low = number(t.get("loss_fn.truncated_importance_sampling_ratio_min"))
    high = number(t.get("loss_fn.truncated_importance_sampling_ratio"))
    if t.get(key) is not True:
        return
    level = "sequence" if by_sequence else "token"
    bounds = {"lower": float(low)} if low else {}
    if kind is None or high is None:
        corrections: list[dict[str, Any]] = [{"mode": "is", "level": level}]
    elif kind == "tis":
        corrections = [{"mode": "tis", "level": level, "cap": float(high), **bounds}]
    elif kind == "icepop" and not by_sequence and low:
        corrections = [{"mode": "icepop", "lower": float(low), "upper": float(high)}]
    elif kind == "icepop":
        corrections = [{"mode": "mis", "level": level, "cap": float(high), **bounds}]
    else:  # seq-mask-tis
        corrections = [
            {"mode": "is", "level": "token"},
            {"mode": "reject", "statistic": "geometric", "upper": float(high), **bounds},
        ]
    parts = ("type", "ratio", "ratio_min")
    keys = [key, *(f"loss_fn.truncated_importance_sampling_{part}" for part in parts)]
    t.put(", ".join(name for name in keys if t.get(name) is not None), "objective.correction", corrections)
    if term == "reinforce":
        t.note("objective.policy_term reinforce is measured from the engine, as NeMo-RL's is with this correction")


def _optimizer(t: Translation, updates: int, is_megatron: bool) -> None:
    ours = "learner.optimizer"
    base = f"{CORE}.optimizer" if is_megatron else "policy.optimizer.kwargs"
    lr = t.take(f"{base}.lr", f"{ours}.lr", lambda value: float(number(value)))
    t.take(f"{base}.weight_decay", f"{ours}.weight_decay", lambda value: float(number(value)))
    if is_megatron:
        for theirs, key in (
            ("adam_beta1", "beta1"),
            ("adam_beta2", "beta2"),
            ("adam_eps", "eps"),
            ("clip_grad", "clip_grad"),
        ):
            t.take(f"{base}.{theirs}", f"{ours}.{key}", lambda value: float(number(value)))
        if (name := t.get(f"{base}.optimizer")) not in (None, "adam"):
            t.lose(f"{base}.optimizer", "Adam is the optimizer", name)
        t.get("policy.max_grad_norm")
    else:
        if isinstance(betas := t.get(f"{base}.betas"), list) and len(betas) == 2:
            for i in (0, 1):
                t.put(f"{base}.betas", f"{ours}.beta{i + 1}", float(betas[i]))
        t.take(f"{base}.eps", f"{ours}.eps", lambda value: float(number(value)))
        t.take("policy.max_grad_norm", f"{ours}.clip_grad", lambda value: float(number(value)))
        if "Adam" not in str(name := t.get("policy.optimizer.name") or "AdamW"):
            t.lose("policy.optimizer.name", "Adam is the optimizer", name)
    times = f"NeMo-RL's scheduler moves once a step, ours once an update: times {updates}"
    if is_megatron:
        _megatron_schedule(t, updates, times)
    else:
        _torch_schedule(t, float(lr or 1e-6), updates, times)


def _megatron_schedule(t: Translation, updates: int, times: str) -> None:
    base = f"{CORE}.scheduler"
    if (warmup := _whole(t, f"{base}.lr_warmup_iters", 0)) > 0:
        t.put(f"{base}.lr_warmup_iters", "schedule.warmup_steps", warmup * updates, times)
        if start := float(number(t.get(f"{base}.lr_warmup_init")) or 0):
            t.put(f"{base}.lr_warmup_init", "schedule.warmup_from", start)
    style = t.get(f"{base}.lr_decay_style")
    if style in ("linear", "cosine"):
        t.put(f"{base}.lr_decay_style", "schedule.style", style)
        t.put(f"{CORE}.optimizer.min_lr", "schedule.min_lr", float(number(t.get(f"{CORE}.optimizer.min_lr")) or 0))
        if decay := number(t.get(f"{base}.lr_decay_iters")):
            t.put(f"{base}.lr_decay_iters", "schedule.decay_steps", int(decay) * updates, times)
    elif style not in (None, "constant"):
        t.lose(f"{base}.lr_decay_style", "no such decay; the rate stays constant after the warm-up")


def _torch_schedule(t: Translation, lr: float, updates: int, times: str) -> None:
    items = t.get("policy.scheduler")
    for item in items if isinstance(items, list) else []:
        name, kwargs = str(item.get("name", "")).rsplit(".", 1)[-1], item.get("kwargs") or {}
        factor, iters = number(kwargs.get("start_factor")), number(kwargs.get("total_iters"))
        if name == "LinearLR" and iters and factor is not None and kwargs.get("end_factor", 1) == 1:
            t.put("policy.scheduler", "schedule.warmup_steps", int(iters) * updates, times)
            if start := factor * lr:
                t.put("policy.scheduler", "schedule.warmup_from", start, "start_factor times the rate")
        elif name not in ("", "ConstantLR"):
            t.lose("policy.scheduler", f"no {name}; the rate stays constant after the warm-up", name)


def _megatron(t: Translation, is_moe: bool) -> None:
    for ours, theirs in (("tensor", "tensor_model"), ("pipeline", "pipeline_model"), ("context", "context")):
        t.take(f"{CORE}.{theirs}_parallel_size", f"learner.parallel.{ours}", number)
    if is_moe:
        t.take(f"{CORE}.expert_model_parallel_size", "learner.parallel.expert", number)
        inner = number(t.get(f"{CORE}.expert_tensor_parallel_size"))
        if inner is not None:
            t.put(f"{CORE}.expert_tensor_parallel_size", "learner.parallel.expert_tensor", int(inner))
        t.dispatcher(f"{CORE}.moe_token_dispatcher_type", f"{CORE}.moe_enable_deepep")
        t.fp32_router(f"{CORE}.moe_router_dtype")
    if t.get(f"{CORE}.activation_checkpointing") is True:
        granularity = t.get(f"{CORE}.recompute_granularity")
        t.put(f"{CORE}.activation_checkpointing, {CORE}.recompute_granularity", "learner.recompute", str(granularity))
        if granularity == "selective":
            t.note("recompute selective is of attention and experts here; NeMo-RL's recompute_modules may say less")
    else:
        _guess_recompute(t)
    if t.get(f"{CORE}.optimizer.optimizer_cpu_offload") is True:
        key = f"{CORE}.optimizer.optimizer_cpu_offload"
        t.put(key, "learner.offload.optimizer", True)
        t.put(key, "learner.offload.during_passes", True, "the optimizer computes on the host")
    if t.get(f"{CORE}.use_fused_linear_logprobs") is True:
        t.put(f"{CORE}.use_fused_linear_logprobs", "learner.fused_head", True)
    if t.get(f"{CORE}.fp8_cfg.enabled") is True:
        t.lose(f"{CORE}.fp8_cfg.enabled", "the learner does not compute in fp8")
    _lora(t, f"{CORE}.peft")


def _guess_recompute(t: Translation) -> None:
    t.guess(
        "learner.recompute",
        "full",
        "NeMo-RL keeps all activations; no number changes, the learner is slower by up"
        " to a third; use none where memory allows",
    )


def _lora(t: Translation, base: str) -> None:
    if t.get(f"{base}.enabled") is True:
        t.take(f"{base}.dim", "learner.lora.rank", number)
        t.take(f"{base}.alpha", "learner.lora.alpha", lambda value: float(number(value)))
        if names := t.get(f"{base}.target_modules"):
            t.lose(f"{base}.target_modules", "all linear layers get adapters", names)
        if (number(t.get(f"{base}.dropout")) or 0) > 0:
            t.lose(f"{base}.dropout", "adapters have no dropout")


def _fsdp(t: Translation, gpus: int, is_moe: bool) -> None:
    t.cut_of_fsdp(math.gcd(gpus, max(_whole(t, f"{FSDP}.tensor_parallel_size", 1), min(4, gpus))))
    if is_moe:
        t.guess("learner.parallel.expert", min(8, gpus), "as for learner.parallel.tensor")
    if (context := _whole(t, f"{FSDP}.context_parallel_size", 1)) > 1:
        t.put(f"{FSDP}.context_parallel_size", "learner.parallel.context", context)
    if t.get(f"{FSDP}.activation_checkpointing") is True:
        t.put(f"{FSDP}.activation_checkpointing", "learner.recompute", "full")
    else:
        _guess_recompute(t)
    if t.get(f"{FSDP}.cpu_offload") is True:
        for ours in ("weights", "optimizer"):
            t.put(f"{FSDP}.cpu_offload", f"learner.offload.{ours}", True)
    _lora(t, f"{FSDP}.lora_cfg")
    t.mark([f"{FSDP}.enabled", f"{FSDP}.tensor_parallel_size"])


def _microbatch(t: Translation) -> None:
    ours, context = "learner.max_tokens_per_microbatch", t.recipe["learner"]["parallel"].get("context", 1)
    longest = t.recipe["data"]["prompt"]["max_length"] + t.recipe["rollout"]["max_response_length"]
    t.mark(["policy.train_micro_batch_size"])
    for section in ("sequence_packing", "dynamic_batching"):
        tokens = number(t.get(f"policy.{section}.train_mb_tokens"))
        if t.get(f"policy.{section}.enabled") is True and tokens:
            t.put(f"policy.{section}.train_mb_tokens", ours, max(int(tokens), longest))
            return
    size = _whole(t, "policy.train_micro_batch_size", 1)
    t.put("policy.train_micro_batch_size", ours, size * longest, f"{size} of the longest sequences")
    if context > 1:
        t.note(f"{ours} counts the tokens of all {context} ranks of context parallelism together")


def _rest_of_the_run(t: Translation) -> None:
    is_validated = "validation" in t.recipe["data"] and _whole(t, "grpo.val_period", 0) > 0
    t.mark(["checkpointing.keep_top_k"])
    if t.get("checkpointing.enabled") is not False:
        t.take("checkpointing.save_period", "checkpoint.every", number)
        kept = number(t.get("checkpointing.keep_top_k"))
        if kept and is_validated:
            best = {"metric": "val/reward/mean", "n": int(kept)}
            t.put("checkpointing.keep_top_k", "checkpoint.keep_best", best, f"by {t.get('checkpointing.metric_name')}")
        elif kept:
            t.lose("checkpointing.keep_top_k", "without held-out data the newest checkpoints are kept, not the best")
    else:
        t.put("checkpointing.enabled", "checkpoint.every", 0, "one at the end of the run is written all the same")
    t.put(
        "checkpointing.checkpoint_dir", "run_root", readable(str(t.known_path("checkpointing.checkpoint_dir", "runs")))
    )
    if "validation" in t.recipe["data"]:
        every = _whole(t, "grpo.val_period", 0)
        t.put("grpo.val_period", "validation.every", max(0, every))
        samples = "grpo.val_num_generations_per_prompt"
        if (repeat := number(t.get("data.validation.repeat"))) is not None:
            each = int(repeat) * int(number(t.get(samples)) or 1)
            t.put(f"data.validation.repeat, {samples}", "validation.num_samples", each)
        else:
            t.take(samples, "validation.num_samples", number)
        for theirs in ("temperature", "top_p"):
            value = number(t.get(f"{GENERATION}.val_{theirs}"))
            value = t.recipe["rollout"][theirs] if value is None else float(value)
            t.put(f"{GENERATION}.val_{theirs}", f"validation.{theirs}", value)
        if (rows := number(t.get("grpo.max_val_samples"))) is not None:
            t.put("grpo.max_val_samples", "validation.limit", int(rows), "both count prompts")
        if every and t.get("grpo.val_at_start") is False:
            t.put("grpo.val_at_start", "validation.at_start", False)
        elif not every and t.get("grpo.val_at_start") is True:
            t.put("grpo.val_at_start", "validation.at_start", True)
    t.take("logger.tensorboard_enabled", "monitor.tensorboard", bool)
    for name, key in (("wandb", "project"), ("mlflow", "experiment"), ("swanlab", "project")):
        if t.get(f"logger.{name}_enabled") is True:
            theirs = f"logger.{name}.{'experiment_name' if name == 'mlflow' else 'project'}"
            t.put(theirs, f"monitor.sinks.{name}.{key}", readable(str(t.get(theirs) or "nemo-rl")))
    t.mark(key for key in t.values if re.match(r"grpo\.(val_|max_val)|policy\.generation\.val_", key))
