"""What a launch script gives slime, slime's defaults of what the rules read, and the arguments without a rule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError
from megatron_rl.instruments.translate.shell import read_script, readable, unresolved_names

MAINS = ("train.py", "train_async.py")

DEFAULTS: dict[str, Any] = {
    "--actor-num-nodes": 1,
    "--actor-num-gpus-per-node": 8,
    "--rollout-num-gpus-per-engine": 1,
    "--input-key": "input",
    "--apply-chat-template": False,
    "--rollout-shuffle": False,
    "--rollout-seed": 42,
    "--seed": 1234,
    "--rollout-temperature": 1.0,
    "--rollout-top-p": 1.0,
    "--rollout-top-k": -1,
    "--n-samples-per-prompt": 1,
    "--n-samples-per-eval-prompt": 1,
    "--advantage-estimator": "grpo",
    "--eps-clip": 0.2,
    "--entropy-coef": 0.0,
    "--kl-coef": 0.0,
    "--kl-loss-coef": 0.0,
    "--tis-clip": 2.0,
    "--tis-clip-low": 0.0,
    "--opsm-delta": 1e-4,
    "--lr": 1e-6,
    "--min-lr": 0.0,
    "--lr-decay-style": "linear",
    "--lr-warmup-iters": 0,
    "--lr-warmup-init": 0.0,
    "--weight-decay": 0.01,
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.999,
    "--adam-eps": 1e-8,
    "--clip-grad": 1.0,
    "--micro-batch-size": 1,
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1,
    "--expert-model-parallel-size": 1,
}
"""slime's values, or Megatron's, of the arguments that the rules read, where a script does not give them."""

_MODEL = (
    "num-layers|hidden-size|ffn-hidden-size|num-attention-heads|group-query-attention|num-query-groups|kv-channels"
    "|normalization|position-embedding-type|norm-epsilon|rotary-percent|rotary-base|rotary-scaling-factor|swiglu"
    "|use-rotary-position-embeddings|use-rope-scaling|untie-embeddings-and-output-weights|vocab-size|qk-layernorm"
    "|disable-bias-linear|add-qkv-bias|max-position-embeddings|seq-length|make-vocab-size-divisible-by|num-experts"
    "|moe-ffn-hidden-size|moe-router-(topk|score-function|pre-softmax)|moe-layer-freq|model-name|spec"
)
_SPEED = (
    "moe-grouped-gemm|moe-permute-fusion|moe-token-dispatcher-type|moe-enable-deepep|moe-token-drop-policy"
    "|attention-backend|transformer-impl|overlap-.*|tp-comm-.*|sequence-parallel|balance-data|balance-by-flops"
    "|use-distributed-optimizer|update-weight-.*|log-probs-.*|no-gradient-accumulation-fusion"
    "|use-precision-aware-optimizer|distributed-.*|num-gpus-per-node|train-env-vars|train-backend|no-check-for-nan-.*"
    "|recompute-loss-function|train-memory-margin-bytes|data-pad-size-multiplier"
)
EFFECTS = [
    (rf"--({_MODEL})", ""),  # the checkpoint's config.json says it
    (rf"--({_SPEED})", ""),
    (r"--(kl-loss-type|kl-coef|kl-loss-coef|use-kl-loss|use-unbiased-kl|ref-load|ref-ckpt-step)", ""),  # with the KL
    (r"--(load|ckpt-.*|no-(save|load)-(optim|rng)|finetune|dist-ckpt-.*|megatron-to-hf-mode)", ""),
    (r"--(attention|hidden)-dropout|--accumulate-allreduce-grads-in-fp32|--attention-softmax-in-fp32|--bf16", ""),
    (r"--moe-aux-loss-coeff|--moe-router-load-balancing-type|--moe-router-bias-update-rate", ""),
    (r"--(wandb-(key|host|mode|dir|run-id|always-.*|random-.*)|disable-wandb-random-suffix|tb-.*|log-.*)", ""),
    (r"--(ci-.*|debug-.*|profile-.*|record-memory-.*|memory-.*|dump-details|save-debug-.*|use-fault-tolerance)", ""),
    (r"--rollout-health-check-.*|--rollout-skip-special-tokens|--rm-url|--metadata-key|--reward-key", ""),
    (r"--moe-router-dtype", ""),  # of a dense model
    (r"--recompute-(method|num-layers|modules)", "layers are recomputed one by one"),
    (
        r"--decoder-(first|last)-pipeline-num-layers|--num-layers-per-virtual-pipeline-stage",
        "stages of the pipeline have the same number of layers",
    ),
    (r"--sglang-.*", "vLLM generates, and has its own settings"),
    (r"--(enable-)?mtp-.*", "there is no multi-token prediction"),
    (r"--fp8-.*", "the learner does not compute in fp8"),
    (r"--deterministic-mode", "no such mode of the learner; docs/exact.md has what is bit for bit here"),
    (r"--custom-(generate|megatron|rollout|convert|model|update|pg|advantage)-.*", "your function is not called"),
    (
        r"--(rollout-function-path|data-source-path|buffer-filter-path|.*-hook-path|.*-process-path)",
        "your function is not called",
    ),
    (r"--custom-reward-post-process-path", "rewards are not changed before advantages are made of them"),
    (r"--custom-config-path", "its values replace arguments in slime; they were not read: translate them by hand"),
    (r"--(no-)?offload(-rollout)?|--no-offload-train", ""),
    (r"--(use-opd|opd-.*)", "there is no teacher: the advantage lacks its term"),
    (r"--rollout-stop(-token-ids)?", "rollout.stop_token_ids has token ids; texts do not stop a response"),
    (r"--mask-offpolicy-in-partial-rollout|--partial-rollout", "responses are not carried over in parts"),
    (r"--(only-train|freeze)-.*", "all parameters learn; learner.lora has adapters"),
    (r"--optimizer-offload-fraction", "the optimizer's state is on the host whole, or not at all"),
    (r"--(multimodal|tool)-keys?|--loss-mask-type", "prompts are texts or chat messages, without images and tools"),
    (
        r"--eval-(config|function-path|input-key|label-key|tool-key|reward-key|min-new-tokens|max-context-len)",
        "held-out data is data.validation, with columns and lengths as in training",
    ),
    (r"--group-rm", "a reward is computed for each response"),
]
"""Arguments that no rule reads: a pattern, and what changes without them; "" where nothing does."""


def read_arguments(path: Path, variables: dict[str, str]) -> tuple[dict[str, Any], list[str], str]:
    """Arguments that the script at ``path`` gives slime, what could not be followed, and the program's name.

    An argument without a value is True, one with several is a list. InputError where the script starts no slime.
    """
    script = read_script(path, variables)
    starts = [
        (command, i)
        for command in script.commands
        for i, word in enumerate(command)
        if word.rsplit("/", 1)[-1] in MAINS
    ]
    if not starts:
        raise InputError(f"{path}: no command that starts slime in it; expected one with {' or '.join(MAINS)}")
    command, at = max(starts, key=lambda start: len(start[0]))
    notes = list(script.notes)
    values = _arguments(command[at + 1 :], notes)
    if not any(key in values for key in ("--hf-checkpoint", "--rollout-batch-size", "--prompt-data")):
        raise InputError(
            f"{path}: {command[at]} has no arguments of slime, such as --rollout-batch-size; found: "
            f"{', '.join(values) or 'none'}"
        )
    return values, notes, command[at].rsplit("/", 1)[-1]


def _arguments(words: Sequence[str], notes: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    key = ""
    given: list[Any] = []

    def close() -> None:
        if key:
            values[key] = True if not given else given[0] if len(given) == 1 else list(given)

    for word in words:
        unknown = unresolved_names(word)
        if re.match(r"--[A-Za-z]", word):
            close()
            key, separator, value = word.partition("=")
            key, given = key.replace("_", "-"), [_value(value)] if separator else []
        elif unknown and readable(word) == unknown[0] and re.fullmatch(r"\$\{\w+\[[@*]\]\}", unknown[0]):
            notes.append(f"{unknown[0]}: the script does not set this array, and so its arguments are not known")
        elif key and word not in ("&", "2>&1"):
            given.append(_value(word))
        elif word.strip():
            notes.append(f"{readable(word)}: stands before any argument, and was not understood")
    close()
    return values


def _value(text: str) -> Any:
    if unresolved_names(text):
        return text
    try:
        value = parse(f"value: {text}")[0]["value"]
    except (yaml.YAMLError, InputError, ValueError):
        return text
    return text if value is None else value
