"""Rollout dumps of slime, miles and NeMo-RL as stored batches, for the commands `batch …`.

- slime, miles: `--save-debug-rollout-data`, a file of `torch.save` with ``samples``. It is read without running code of
  the file: torch's own restricted reader, which builds containers, numbers, texts, tensors and NumPy arrays alone.
- NeMo-RL: `train_data_step<N>.jsonl`, one response a line, read line by line.

The batch is step 0 of a run directory whose starting model is the checkpoint that the responses were sampled from, so
that its weights are exact.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from megatron_rl.config import Recipe
from megatron_rl.errors import InputError, shown
from megatron_rl.model.architecture import Architecture, read_architecture
from megatron_rl.monitor import RunDirectory
from megatron_rl.objective import compute_advantages
from megatron_rl.objective.metrics import mismatch_metrics
from megatron_rl.routing import RouteShape, route_checksums
from megatron_rl.run.recorded_batches import IMPORTED, MAX_LOGPROB, record_batch
from megatron_rl.types import Batch, Sequence

READ_FROM = {
    "slime": ("0.3.1", "624b824a898a", "2026-08-21"),
    "miles": ("0.1.0", "31f1ca961a94", "2026-08-21"),
    "NeMo-RL": ("0.6.0", "7ea279abfbeb", "2026-08-22"),
}
"""Version, commit and date of the writers whose files are read."""
VERL_KEYS = {"input", "output", "score"}
VERL = (
    "it is a rollout dump of verl, which has texts, but neither tokens nor log-probs; a text does not say which tokens"
    " were sampled, and so nothing can be computed from it"
)


@dataclass
class Response:
    """One response of a dump. ``group``: responses to the same prompt have the same; None where it is not said."""

    tokens: np.ndarray  # [S]
    num_response: int
    rollout_logprobs: np.ndarray  # [R]
    loss_mask: np.ndarray  # [R]
    reward: float
    group: Any = None
    advantage: float | None = None
    learner_logprobs: np.ndarray | None = None  # [R]
    routes: np.ndarray | None = None  # [S - 1, layers of the model, K]


@dataclass
class Imported:
    """What was imported, and what the dump lacks."""

    project: str
    batch: Batch
    lacks: list[str] = field(default_factory=list)


def read_dump(path: Path, recipe: Recipe, reward_key: str | None = None) -> Imported:
    """The responses of the dump at ``path`` as step 0 of a run with ``recipe``, and what the dump lacks.

    ``reward_key``: which reward, where a response of slime has several. Raises InputError where the file is no dump
    that is known, or belongs to another model.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected a rollout dump of {', '.join(READ_FROM)}")
    if path.suffix in (".jsonl", ".json"):
        project, responses = "NeMo-RL", list(_nemo_rl(path))
    else:
        project, samples = _samples(path)
        responses = [_slime(path, i, sample, reward_key) for i, sample in enumerate(samples)]
    if not responses:
        raise InputError(f"{path}: no response in it")
    architecture = read_architecture(recipe.model.path)
    lacks: list[str] = []
    advantages = _advantages(path, responses, recipe, lacks)
    sequences = []
    for i, (response, advantage) in enumerate(zip(responses, advantages, strict=True)):
        _check(path, i, response, architecture)
        sequences.append(_sequence(f"{path.stem}:{i}/0", response, advantage))
    _add_routes(path, sequences, responses, architecture, lacks)
    if all(s.current_logprobs is None for s in sequences):
        lacks.append("log-probs of the learner: `batch attribute` has no part of staleness")
    elif any(s.current_logprobs is None for s in sequences):
        raise InputError(f"{path}: some responses have log-probs of the learner (prev_logprobs), others have none")
    lacks.append("versions of the weights: all tokens count as sampled with the checkpoint's")
    parts = np.array_split(np.arange(len(sequences)), min(recipe.batch.minibatches, len(sequences)))
    return Imported(project, Batch(0, sequences, [part.tolist() for part in parts]), lacks)


def mismatch_of(batch: Batch) -> dict[str, float]:
    """Return the mismatch of the log-probs in ``batch`` as every step logs it; {} where there are none of a learner."""
    if any(s.current_logprobs is None for s in batch.sequences):
        return {}
    learner, engine, mask = (
        torch.from_numpy(np.concatenate([getattr(s, name) for s in batch.sequences]))
        for name in ("current_logprobs", "inference_logprobs", "loss_mask")
    )
    ends = np.cumsum([0, *(s.response_length for s in batch.sequences)])
    return mismatch_metrics(learner, engine, mask, torch.from_numpy(ends))


def write_run(imported: Imported, recipe: Recipe, folder: Path) -> Path:
    """Write a run directory with the batch as step 0, and return the batch's file. The folder must be new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: it is there already; name a folder that is new or empty")
    directory = RunDirectory(folder).create()
    path = recipe.model.path.absolute()
    values = recipe.model_dump(mode="json")
    values["model"]["path"] = str(path)
    directory.recipe.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return record_batch(
        directory.batches, imported.batch, 0, {IMPORTED: float(len(imported.batch.sequences))}, keep=True
    )


# slime and miles


def _samples(path: Path) -> tuple[str, list[Any]]:
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path}: cannot be read as a file of torch.save: it is not an archive")
    try:
        with torch.serialization.safe_globals(_arrays_of_numpy()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        text = str(error)
        named = text.partition("GLOBAL ")[2].split(" ")[0] or shown(text.splitlines()[0], 200)
        raise InputError(
            f"{path}: holds more than numbers, texts and arrays ({named}), and is not read: that would run code of the"
            " file. Save it again without such objects"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: cannot be read as a file of torch.save: {shown(str(error).splitlines()[0], 200)}"
        ) from error
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list):
        contents = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{path}: no list `samples` in it, as --save-debug-rollout-data writes it; found: {contents}")
    return ("miles" if "metadata" in content else "slime"), samples


def _arrays_of_numpy() -> list[Any]:
    """What a pickled array or number of NumPy is made with, under its names in NumPy 1 and 2."""
    core = np._core.multiarray
    made = [(getattr(core, name), f"numpy.{place}.multiarray.{name}")
            for name in ("_reconstruct", "scalar") for place in ("core", "_core")]  # fmt: skip
    types = {type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}
    return [*made, np.ndarray, np.dtype, *types]


def _slime(path: Path, i: int, sample: Any, reward_key: str | None) -> Response:
    where = f"{path}: sample {i}"
    if not isinstance(sample, Mapping) or "tokens" not in sample:
        raise InputError(f"{where}: no tokens in it")
    tokens, count = _array(where, "tokens", sample["tokens"], np.int64), int(sample.get("response_length") or 0)
    if not 0 < count < len(tokens):
        raise InputError(f"{where}: response_length {count} of {len(tokens)} tokens; expected 1 to {len(tokens) - 1}")
    if sample.get("rollout_log_probs") is None:
        raise InputError(
            f"{where}: no rollout_log_probs, and so no mismatch to measure; slime saves them with --use-tis,"
            " --use-rollout-logprobs or --get-mismatch-metrics"
        )
    reward = sample.get("reward")
    if isinstance(reward, Mapping):
        if reward_key not in reward:
            raise InputError(f"{where}: its reward has several: {', '.join(map(str, reward))}; name one: --reward-key")
        reward = reward[reward_key]
    mask = sample.get("loss_mask")
    mask = np.ones(count, bool) if mask is None else _array(where, "loss_mask", mask, np.int64).astype(bool)
    routes = sample.get("rollout_routed_experts")
    return Response(
        tokens=tokens,
        num_response=count,
        rollout_logprobs=_array(where, "rollout_log_probs", sample["rollout_log_probs"], np.float32),
        loss_mask=mask & (not sample.get("remove_sample")),
        reward=_number(where, "reward", 0.0 if reward is None else reward),
        group=sample.get("group_index"),
        routes=None if routes is None else np.asarray(routes),
    )


# NeMo-RL


def _nemo_rl(path: Path) -> Iterator[Response]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _line(f"{path}, line {number}", line)


def _line(where: str, line: str) -> Response:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: a {type(row).__name__}; expected an object with token_ids")
    if set(row) >= VERL_KEYS and "token_ids" not in row:
        raise InputError(f"{where}: {VERL}")
    if missing := [key for key in ("token_ids", "generation_logprobs", "token_loss_mask") if key not in row]:
        raise InputError(
            f"{where}: no {', '.join(missing)}; expected a line of NeMo-RL's train_data_step<N>.jsonl; found: "
            f"{', '.join(row)}"
        )
    row = {key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in row.items()}
    tokens = _array(where, "token_ids", row["token_ids"], np.int64)
    length = int(_number(where, "input_lengths", row.get("input_lengths", len(tokens))))
    sampled = np.flatnonzero(_array(where, "token_loss_mask", row["token_loss_mask"], np.float64)[:length])
    if not len(sampled) or sampled[0] == 0 or length > len(tokens):
        raise InputError(f"{where}: token_loss_mask has no response behind a prompt in its {length} tokens")
    response = slice(int(sampled[0]), length)

    def of_response(name: str) -> np.ndarray | None:
        return None if row.get(name) is None else _array(where, name, row[name], np.float64)[response]

    mask = of_response("token_loss_mask") > 0
    keeps = _number(where, "sample_loss_mask", row.get("sample_loss_mask", 1.0)) > 0
    advantages, learner = of_response("advantages"), of_response("prev_logprobs")
    return Response(
        tokens=tokens[:length],
        num_response=length - response.start,
        rollout_logprobs=of_response("generation_logprobs").astype(np.float32),
        loss_mask=mask & keeps,
        reward=_number(where, "rewards", row.get("filtered_rewards", row.get("rewards", 0.0))),
        advantage=None if advantages is None else float(advantages[mask].mean()),
        learner_logprobs=None if learner is None else learner.astype(np.float32),
    )


# Checks, and what a batch has beside a response


def _array(where: str, name: str, value: Any, dtype: type) -> np.ndarray:
    try:
        array = np.asarray(value.numpy() if isinstance(value, torch.Tensor) else value)
        if array.ndim != 1 or array.dtype.kind not in "biuf":
            raise ValueError(f"shape {array.shape} of {array.dtype}")
        return array.astype(dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{where}: {name}: expected a list of numbers, found {shown(str(error), 100)}") from error


def _number(where: str, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {name}: {shown(value, 60)}; expected a number") from error


def _check(path: Path, i: int, response: Response, architecture: Architecture) -> None:
    where = f"{path}: response {i}"
    for name in ("rollout_logprobs", "loss_mask", "learner_logprobs"):
        value = getattr(response, name)
        if value is not None and len(value) != response.num_response:
            raise InputError(f"{where}: {name} has {len(value)} numbers, the response {response.num_response} tokens")
    if (response.tokens < 0).any() or (response.tokens >= architecture.vocab_size).any():
        raise InputError(
            f"{where}: token {int(response.tokens.max())}; the recipe's model has {architecture.vocab_size} tokens: it"
            " is not the model of this dump"
        )
    for name in ("rollout_logprobs", "learner_logprobs"):
        value = getattr(response, name)
        if value is not None and not (value[response.loss_mask] <= MAX_LOGPROB).all():
            raise InputError(f"{where}: {name} holds a value that is not a log-prob, such as {float(value.max()):g}")


def _advantages(path: Path, responses: list[Response], recipe: Recipe, lacks: list[str]) -> list[float]:
    if all(response.advantage is not None for response in responses):
        return [response.advantage for response in responses]
    groups = [response.group for response in responses]
    if any(group is None for group in groups):
        size = recipe.rollout.num_samples
        if len(responses) % size:
            raise InputError(
                f"{path}: {len(responses)} responses without group_index do not divide into groups of"
                f" rollout.num_samples {size}; set it to the dump's (--set rollout.num_samples=…)"
            )
        groups = [i // size for i in range(len(responses))]
        lacks.append(f"groups: each {size} responses in their order count as one (rollout.num_samples)")
    numbers = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    lacks.append("advantages: computed from the rewards by objective.advantage")
    advantages = compute_advantages(
        torch.tensor([response.reward for response in responses]),
        torch.tensor([numbers[group] for group in groups]),
        recipe.objective.advantage,
        lengths=torch.tensor([int(response.loss_mask.sum()) for response in responses]),
    )
    return [float(value) for value in advantages]


def _sequence(name: str, response: Response, advantage: float) -> Sequence:
    return Sequence(
        id=name,
        tokens=response.tokens,
        prompt_length=len(response.tokens) - response.num_response,
        inference_logprobs=np.minimum(response.rollout_logprobs, np.float32(MAX_LOGPROB)),
        loss_mask=response.loss_mask,
        advantage=advantage,
        reward=response.reward,
        policy_versions=np.zeros(response.num_response, dtype=np.int32),
        current_logprobs=response.learner_logprobs,
    )


def _add_routes(
    path: Path, sequences: list[Sequence], responses: list[Response], architecture: Architecture, lacks: list[str]
) -> None:
    with_routes = [response.routes is not None for response in responses]
    if not architecture.is_moe:
        return
    if not all(with_routes):
        several = f"routes: {with_routes.count(False)} of {len(responses)} responses have none, and so none is used"
        missing = several if any(with_routes) else "routes"
        effect = "`batch attribute` has no part of routing; `batch experts` and routing.replay: r3 are refused"
        lacks.append(f"{missing}: {effect}")
        return
    shape = RouteShape.of(architecture)
    for i, (sequence, response) in enumerate(zip(sequences, responses, strict=True)):
        routes = response.routes
        due = (len(sequence.tokens) - 1, len(architecture.moe_layers), shape.topk)
        if routes.shape != due or routes.min() < 0 or routes.max() >= shape.num_experts:
            raise InputError(
                f"{path}: response {i}: routes {list(routes.shape)}; the recipe's model has {list(due)} (tokens but"
                f" the last, layers, experts of a token), numbered 0 to {shape.num_experts - 1}"
            )
        its = np.ascontiguousarray(routes[:, list(shape.layers)]).astype(shape.dtype)
        sequence.routed_experts = its
        sequence.route_checksums = route_checksums(sequence.id, sequence.tokens, its)
