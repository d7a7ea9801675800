"""Batches on disk: what a step was trained on, readable without this package (safetensors + JSON, no pickle).

``step_00000012.safetensors`` holds flat arrays over all tokens of all sequences, ``step_00000012.json`` what is per
sequence. With ``S`` tokens of all sequences together and ``R`` response tokens of them:

- ``tokens`` [S] int64, ``cu_seqlens`` [B+1]: sequence i is tokens[cu_seqlens[i]:cu_seqlens[i+1]]
- ``inference_logprobs``, ``old_logprobs`` (where computed) [R] float32, ``loss_mask`` [R], ``policy_versions`` [R] int32
- ``cu_response`` [B+1]: response i is [cu_response[i]:cu_response[i+1]]
- ``routed_experts`` [S − B, L, K] where recorded: the last token of every sequence has no route
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from megatron_rl.errors import InputError
from megatron_rl.learner.distributed import world_rank
from megatron_rl.types import Batch, Sequence

FORMAT_VERSION = 1
_PER_TOKEN = ("inference_logprobs", "old_logprobs", "loss_mask", "policy_versions")


def record_batch(folder: Path, batch: Batch) -> Path:
    """Write ``batch`` (rank 0 does; the others return at once). Returns the path of its JSON file."""
    path = folder / f"step_{batch.step:08d}.json"
    if world_rank() != 0:
        return path
    sequences = batch.sequences
    arrays = {
        "tokens": np.concatenate([s.tokens for s in sequences]),
        "cu_seqlens": np.cumsum([0, *(len(s.tokens) for s in sequences)]),
        "cu_response": np.cumsum([0, *(s.response_length for s in sequences)]),
    }
    for name in (*_PER_TOKEN, "routed_experts"):
        values = [getattr(s, name) for s in sequences]
        if all(value is not None for value in values):
            arrays[name] = np.ascontiguousarray(np.concatenate(values))
    described = {
        "format_version": FORMAT_VERSION,
        "step": batch.step,
        "minibatches": batch.minibatches,
        "sequences": [
            {"id": s.id, "prompt_length": s.prompt_length, "advantage": s.advantage, "reward": s.reward}
            for s in sequences
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path.with_suffix(".safetensors"))
    path.write_text(json.dumps(described, indent=1))  # last: its presence says that the batch is complete
    return path


def load_batch(path: Path) -> Batch:
    """The inverse of `record_batch`. InputError where the file is missing or of another format version."""
    if not path.is_file():
        raise InputError(f"recorded batch {path}: no such file")
    described = json.loads(path.read_text())
    if described.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"recorded batch {path}: format_version {described.get('format_version')!r}, this version reads "
            f"{FORMAT_VERSION}"
        )
    arrays = load_file(path.with_suffix(".safetensors"))
    sequences = []
    for i, about in enumerate(described["sequences"]):
        whole = slice(arrays["cu_seqlens"][i], arrays["cu_seqlens"][i + 1])
        response = slice(arrays["cu_response"][i], arrays["cu_response"][i + 1])
        routes = slice(whole.start - i, whole.stop - i - 1)
        per_token = {name: arrays[name][response] for name in _PER_TOKEN if name in arrays}
        if "routed_experts" in arrays:
            per_token["routed_experts"] = arrays["routed_experts"][routes]
        sequences.append(Sequence(tokens=arrays["tokens"][whole], **about, **per_token))
    return Batch(described["step"], sequences, described["minibatches"])
