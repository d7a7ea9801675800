"""Tokens of a recorded response as text, with the probabilities of both engines."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.errors import InputError
from megatron_rl.instruments.watch.columns import numbers
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.monitor.samples import printable

WINDOW = 1000  # largest number of tokens in one answer
STRIP = 240  # points of a whole response
ORDERS = ("mismatch", "reward", "length", "batch")


@lru_cache(maxsize=4)
def _tokenizer(file: Path, _changed: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def tokenizer_of(run: WatchedRun) -> Any | None:
    """Return the tokenizer of the recipe's model.path; None if the folder or its tokenizer.json is absent."""
    folder = run.setting("model.path")
    if isinstance(folder, str):
        file = Path(folder) / "tokenizer.json"
        with contextlib.suppress(Exception):  # the library raises a plain Exception for an unreadable file
            return _tokenizer(file, file.stat().st_mtime_ns)
    return None


def texts(tokenizer: Any | None, tokens: np.ndarray) -> list[str]:
    """Return the text of each token, or its number without a tokenizer. A split character goes to its last token."""
    ids = tokens.tolist()
    if tokenizer is None:
        return [f" {token}" for token in ids]
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [printable(stream.step(tokenizer, token) or "") for token in ids]


def responses(run: WatchedRun, step: int, order: str, start: int, number: int) -> dict[str, Any]:
    """Return figures of ``number`` responses of a batch, from place ``start`` of the order."""
    if order not in ORDERS:
        raise InputError(f"order {order!r}: one of {', '.join(ORDERS)}")
    batch = run.batch(step)
    abouts = batch.described["sequences"]
    largest = batch.largest_log_rho
    if order == "mismatch" and largest is None:
        order = "batch"
    keys = {
        "mismatch": largest,
        "reward": np.array([about["reward"] for about in abouts]),
        "length": batch.lengths,
        "batch": -np.arange(len(abouts)),
    }
    chosen = np.argsort(-keys[order], kind="stable")[max(start, 0) :][:number].tolist()
    return {
        "step": step,
        "order": order,
        "total": len(abouts),
        "responses": [
            {
                "sequence": i,
                "id": printable(str(abouts[i]["id"])),
                "reward": _plain(abouts[i]["reward"]),
                "advantage": _plain(abouts[i]["advantage"]),
                "length": int(batch.lengths[i]),
                "largest_log_rho": None if largest is None else _plain(largest[i]),
            }
            for i in chosen
        ],
    }


def response(run: WatchedRun, step: int, sequence: int, start: int, number: int = WINDOW) -> dict[str, Any]:
    """Return tokens [start, start + number) of a response: text, rho = po/mu, both probabilities; and rho over all."""
    stored = run.batch(step).response(sequence)
    about = run.batch(step).described["sequences"][sequence]
    tokenizer = tokenizer_of(run)
    start = min(max(start, 0), max(len(stored.tokens) - 1, 0))
    window = slice(start, start + min(max(number, 1), WINDOW))
    log_rho = stored.log_rho
    with np.errstate(over="ignore", invalid="ignore"):
        answer = {
            "mu": numbers(np.exp(stored.rollout_logprobs[window].astype(np.float64))),
            "log_rho": None if log_rho is None else numbers(log_rho[window]),
            "po": None if log_rho is None else numbers(np.exp(stored.learner_logprobs[window].astype(np.float64))),
        }
    return {
        "step": step,
        "sequence": sequence,
        "id": printable(str(about["id"])),
        "reward": _plain(about["reward"]),
        "advantage": _plain(about["advantage"]),
        "prompt": "".join(texts(tokenizer, stored.prompt[-WINDOW:])),
        "prompt_left_out": max(len(stored.prompt) - WINDOW, 0),
        "length": len(stored.tokens),
        "start": start,
        "has_tokenizer": tokenizer is not None,
        "ids": stored.tokens[window].tolist(),
        "texts": texts(tokenizer, stored.tokens[window]),
        "trained": stored.loss_mask[window].astype(int).tolist(),
        "version": stored.policy_versions[window].tolist(),
        "strip": None if log_rho is None else _strip(log_rho),
        **answer,
    }


def _strip(log_rho: np.ndarray) -> list[float | None]:
    """Return the log rho farthest from 0 in each of up to `STRIP` equal parts."""
    if not len(log_rho):
        return []
    starts = np.linspace(0, len(log_rho), min(STRIP, len(log_rho)), endpoint=False).astype(np.int64)
    low, high = np.minimum.reduceat(log_rho, starts), np.maximum.reduceat(log_rho, starts)
    return numbers(np.where(-low > high, low, high))


def _plain(value: Any) -> float | None:
    return numbers(np.array([value], dtype=np.float64))[0]
