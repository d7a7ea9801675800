"""What the rank of test_model_folders.py runs: single changes of a model's folder, by transformers and the learner."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.checkpoint.hf_folder import HFFolder, check_weights
from megatron_rl.checkpoint.shards import WeightMap
from megatron_rl.config.learner import LearnerConfig
from megatron_rl.errors import InputError
from megatron_rl.learner import compare_logits
from megatron_rl.learner.model import build_model
from megatron_rl.learner.process_groups import initialize
from megatron_rl.model.architecture import (
    Architecture,
    architecture_from,
    architectures_problem,
    listed,
    neutral,
    unknown_keys,
)
from tools.dev.make_tiny_checkpoint import build_model as build_theirs
from tools.dev.make_tiny_checkpoint import build_tiny_config, save_checkpoint

LENGTH = 24
VALUES = (None, True, False, 0, 1, -1, 2, 3, 7, 0.01, 0.5, 100.0, 10**9, "x", "gelu", "float16", [], [0], ["x"], {})
ACCEPTED_VALUES = 3  # of a key that are computed; what is refused costs nothing
YARN = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
YARN_CHANGES: list[dict[str, Any]] = [
    {},
    {"beta_fast": None},
    {"beta_slow": None},
    {"mscale": None},
    {"mscale_all_dim": None},
    {"mscale": 0.0},
    {"attention_factor": 1.5},
    {"truncate": False},
    {"factor": 1.0},
    {"factor": 64.0},
]
UNKNOWN = {"a_note": "x", "temperature": 0.5, "rotary_dim": 8}
# Two fp32 models that are equal differ by some 1e-6 of logits of about 1; the smallest change that is tried, of the
# norms' epsilon from 1e-6 to 0.01, moves them by more than ten times this.
BOUND = 1e-4
# transformers has 1e-6 in the norms of latent vectors, whatever the key says; vLLM and the learner obey the key.
OBEYED_BY_VLLM = {("deepseek_v3", "rms_norm_eps"), ("deepseek_v3", "without rms_norm_eps")}


class Theirs:
    """transformers' logits of the same weights under any config.json."""

    def __init__(self, model: Any) -> None:
        self._weights = model.state_dict()

    def __call__(self, config: dict[str, Any]) -> torch.Tensor:
        values = dict(config)
        made = AutoConfig.for_model(values.pop("model_type"), **values)
        made._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
        model.load_state_dict(self._weights)
        return model(tokens(), return_dict=True).logits[0]


def tokens() -> torch.Tensor:
    return torch.randint(3, 98, (1, LENGTH), generator=torch.Generator().manual_seed(0))


def ours(a: Architecture, folder: Path) -> torch.Tensor:
    config = LearnerConfig(dtype="fp32")
    model = build_model(a, config, initialize(config.parallel, "cpu", 0)).eval()
    WeightMap(model, a).fill(HFFolder(folder))
    return model(tokens(), torch.arange(LENGTH)[None], attention_mask=None)[0, :, : a.vocab_size]


def changes(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every single change: a key taken out, or given one of `VALUES`, of the values at rest, or of unknown keys."""
    changed = [
        (f"without {key}", {k: v for k, v in config.items() if k != key}) for key in config if key != "model_type"
    ]
    resting = {key: rule.values for key, rule in neutral(config["model_type"]).items()}
    for key in sorted(listed(config["model_type"]) - {"model_type"}):
        changed += [(key, config | {key: value}) for value in (*resting.get(key, ()), *VALUES)]
    for key, value in {"rope_theta": 100.0, "partial_rotary_factor": 0.5, "rope_type": "linear", "factor": 2.0}.items():
        changed.append((f"rope {key}", config | {"rope_parameters": config["rope_parameters"] | {key: value}}))
    for number, change in enumerate(YARN_CHANGES):  # None: without the key
        yarn = {key: value for key, value in {"rope_theta": 1e4, **YARN, **change}.items() if value is not None}
        changed.append((f"yarn {number}", config | {"rope_parameters": yarn}))
    return changed + [(key, config | {key: value}) for key, value in UNKNOWN.items()]


@torch.no_grad()
def judge(family: str, folder: str) -> tuple[dict[str, int], list[str]]:
    """How many changes were refused, reported, and computed; and those that went in unnoticed."""
    path = Path(folder)
    model = build_theirs(build_tiny_config(family, "nano", hidden_size=64, intermediate_size=96))
    save_checkpoint(model, path)
    config = json.loads((path / "config.json").read_text())
    theirs, files = Theirs(model), HFFolder(path)
    base, plain = architecture_from(config), theirs(config)
    counts, wrong, computed = {"refused": 0, "reported": 0, "same": 0, "followed": 0}, [], {}
    if (ours(base, path) - plain).abs().max() > BOUND:
        wrong.append("no change at all")
    for what, changed in changes(config):
        try:
            a = architecture_from(changed)
            if problem := architectures_problem(changed):
                raise InputError(problem)
            check_weights(files, a)
            if a.problems():
                raise InputError("; ".join(a.problems()))
        except InputError:
            counts["refused"] += 1
            continue
        if unknown_keys(changed):
            counts["reported"] += 1
            continue
        if (family, what) in OBEYED_BY_VLLM:
            continue
        computed[what] = computed.get(what, 0) + 1
        if computed[what] > ACCEPTED_VALUES:
            continue
        kind = "same" if a == base else "followed"
        counts[kind] += 1
        try:
            logits = theirs(changed)
        except Exception as error:  # noqa: BLE001 - whatever transformers raises, the change was let through
            wrong.append(f"{what}: transformers refuses it ({type(error).__name__})")
            continue
        if ((plain if a == base else ours(a, path)) - logits).abs().max() > BOUND:
            wrong.append(f"{what}: transformers computes something else")
    return counts, wrong


def differences(folder: str) -> dict[str, compare_logits.Difference]:
    """Of a model whose middle layer is another kind of layer: whole, cut to its ends, and under two faults."""
    path, prompt = Path(folder), tokens()[0].tolist()
    save_checkpoint(
        build_theirs(build_tiny_config("qwen3_moe", "nano", num_hidden_layers=3, mlp_only_layers=[1])), path
    )
    results = {
        "whole": compare_logits.logprob_difference(path, prompt, [0, 1, 2]),
        "ends": compare_logits.logprob_difference(path, prompt, [0, 2]),
    }
    read = compare_logits.read_architecture
    compare_logits.read_architecture = lambda path: replace(read(path), rope_theta=10.0)
    results["another rope"] = compare_logits.logprob_difference(path, prompt, [0, 2])
    compare_logits.read_architecture = read
    fill = WeightMap.fill
    WeightMap.fill = lambda self, given: fill(self, lambda name: given(name) * (1.5 if "q_norm" in name else 1))
    results["another norm"] = compare_logits.logprob_difference(path, prompt, [0, 1, 2])
    return results


def latent_queries(folder: str) -> compare_logits.Difference:
    """Of the first and last layer of a model whose queries come from a latent vector too, and whose experts are in
    groups; two layers in front have none."""
    path = Path(folder)
    sizes = {"q_lora_rank": 24, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    sizes |= {"num_hidden_layers": 4, "first_k_dense_replace": 2}
    save_checkpoint(build_theirs(build_tiny_config("deepseek_v3", "nano", initializer_range=0.12, **sizes)), path)
    return compare_logits.logprob_difference(path, tokens()[0].tolist(), [0, 3])
