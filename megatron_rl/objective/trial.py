"""A user's functions of the objective on a small made-up batch: what would go wrong in a run goes wrong here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.base import is_function_path
from megatron_rl.config.objective import ObjectiveConfig, user_functions
from megatron_rl.errors import InputError, shown
from megatron_rl.objective.advantages import compute_advantages
from megatron_rl.objective.aggregation import compute_denominators
from megatron_rl.objective.compute import compute_objective
from megatron_rl.objective.corrections import Effect, Ratios
from megatron_rl.objective.inputs import ObjectiveInputs, read_tokens
from megatron_rl.objective.policy_terms import policy_term
from megatron_rl.process.user_functions import check_function, load_function

LENGTHS = (5, 1, 0, 7, 3, 6)  # trained tokens; one sequence has none
TOLERANCE = 1e-9
"""Relative, in float64: the sums have under 100 terms, and each rounds by 1.1e-16."""


def check_user_functions(config: ObjectiveConfig) -> None:
    """Raise `InputError` where a function that the objective names by file would not do in a run.

    Each is loaded and called on a batch of 6 sequences in float64: it has to take its parameters, to return tensors of
    the right shape and dtype without a NaN, and a term has to have a gradient. The loss and the gradient have to be the
    same whether the batch is whole or split into micro-batches, padded further or packed. Without such functions this
    does nothing.
    """
    names = user_functions(config)
    for name in names:
        check_function(name, "objective")
    if not names:
        return
    # The batch has no routers, no heads and no reference, and r may be any number.
    config = config.model_copy(update={"router_shift": None, "score_centering": False, "kl_loss": None})
    _check_advantage(config.advantage)
    batch = _batch()
    _check_term(config, batch)
    _check_corrections(config, batch)
    if is_function_path(config.aggregation):
        counts = compute_denominators(_inputs(batch, range(len(LENGTHS))))
        lengths = torch.tensor(LENGTHS, dtype=torch.float64)
        name, what = config.aggregation, "objective.aggregation"
        _check_signature(name, what, {}, 3)
        factor = _tried(name, what, partial(load_function(name), lengths, counts, config))
        if isinstance(factor, Tensor) and factor.dim():
            _check_tensor(name, what, factor, lengths.shape, (torch.float64,))
    whole = _loss_and_gradient(config, batch, [range(len(LENGTHS))])
    forms = {
        "split into micro-batches": _loss_and_gradient(config, batch, [range(2), range(2, 5), range(5, 6)]),
        "padded to a greater width": _loss_and_gradient(config, batch, [range(len(LENGTHS))], padding=4),
        "packed": _loss_and_gradient(config, batch, [range(len(LENGTHS))], packed=True),
    }
    for form, (loss, gradient) in forms.items():
        for what, (value, expected) in {"loss": (loss, whole[0]), "gradient": (gradient, whole[1])}.items():
            if not torch.allclose(value, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max())):
                raise InputError(
                    f"objective {', '.join(names)}: the {what} is another where the batch is {form}; a function may "
                    "work token by token, or over a sequence by tokens.layout.sum, tokens.sequence_mean and "
                    "tokens.layout.expand, never over the tensor as a whole"
                )


def _tried(name: str, what: str, call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns; `InputError` where the function of ``name`` cannot be loaded, or raises."""
    try:
        return call()
    except Exception as error:
        raise InputError(f"{what} {name}: raised {type(error).__name__} on a small batch: {shown(error)}") from error


def _check_signature(name: str, what: str, parameters: dict[str, Any], count: int) -> None:
    """Raise `InputError` where the function does not take ``count`` arguments and ``parameters``."""
    function = _tried(name, what, partial(load_function, name))
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: it says nothing of its parameters
        return
    try:
        signature.bind(*[None] * count, **parameters)
    except TypeError as error:
        given = f" and the parameters {', '.join(parameters)}" if parameters else ""
        raise InputError(
            f"{what} {name}: takes {signature}, and is called with {count} argument(s){given}: {error}"
        ) from error


def _check_tensor(name: str, what: str, value: Any, shape: torch.Size, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"{what} {name}: returned {type(value).__name__}, expected a tensor of shape {list(shape)}")
    if value.shape != shape or value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise InputError(
            f"{what} {name}: returned {value.dtype} {list(value.shape)}, expected {expected} {list(shape)}"
        )
    if value.dtype.is_floating_point and not bool(value.isfinite().all()):
        raise InputError(f"{what} {name}: returned NaN or an infinite number for finite log-probs and advantages")


def _check_advantage(name: str) -> None:
    if not is_function_path(name):
        return
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 0.0]).double(), torch.tensor([0, 0, 0, 1, 1, 1])
    what = "objective.advantage"
    advantages = _tried(name, what, partial(compute_advantages, rewards, groups, name))
    _check_tensor(name, what, advantages, rewards.shape, (torch.float64,))


def _check_term(config: ObjectiveConfig, batch: dict[str, Tensor]) -> None:
    name = getattr(config.policy_term, "function", None)
    if name is None:
        return
    what, inputs = "objective.policy_term", _inputs(batch, range(len(LENGTHS)))
    tokens = read_tokens(inputs, config.anchor)
    _check_signature(name, what, config.policy_term.parameters, 1)
    loss = _tried(name, what, partial(policy_term, tokens, config.policy_term)).loss
    _check_tensor(name, what, loss, tokens.current.shape, (torch.float64,))
    if not loss.requires_grad:
        raise InputError(f"{what} {name}: its loss has no gradient; it has to depend on tokens.current or log_ratio")


def _check_corrections(config: ObjectiveConfig, batch: dict[str, Tensor]) -> None:
    for number, entry in enumerate(config.correction):
        name = getattr(entry, "function", None)
        if name is None:
            continue
        what, inputs = f"objective.correction.{number}", _inputs(batch, range(len(LENGTHS)))
        ratios = Ratios(read_tokens(inputs, config.anchor), config.anchored_on_rollout)
        _check_signature(name, what, entry.parameters, 1)
        result = _tried(name, what, partial(load_function(name), ratios, **entry.parameters))
        shape = inputs.current_logprobs.shape
        if not isinstance(result, Effect):
            _check_tensor(name, what, result, shape, (torch.float64, torch.bool))
            continue
        if result.weight is not None:
            _check_tensor(name, what, result.weight, shape, (torch.float64,))
        if result.keep is not None:
            _check_tensor(name, what, result.keep, shape, (torch.bool,))


def _batch() -> dict[str, Tensor]:
    """Log-probs and advantages of each sequence, [6, 7] float64 on the CPU; the same in every call."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    old = -torch.empty(shape, dtype=torch.float64).exponential_(generator=generator) - 1e-3
    normal = torch.randn((2, *shape), dtype=torch.float64, generator=generator)
    return {
        "current": (old + 0.1 * normal[0]).clamp(max=-1e-4),
        "old": old,
        "inference": (old + 0.1 * normal[1]).clamp(max=-1e-4),
        "entropy": torch.rand(shape, dtype=torch.float64, generator=generator),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.3, 0.0, 2.0], dtype=torch.float64),
    }


def _inputs(batch: dict[str, Tensor], rows: range, padding: int = 0, packed: bool = False) -> ObjectiveInputs:
    lengths = [LENGTHS[i] for i in rows]
    columns = torch.arange(max(LENGTHS) + padding)
    mask = columns[None] < torch.tensor(lengths)[:, None]

    def laid_out(name: str) -> Tensor:
        padded = torch.nn.functional.pad(batch[name][rows.start : rows.stop], (0, padding), value=-1.0)
        return padded[mask] if packed else padded

    return ObjectiveInputs(
        current_logprobs=laid_out("current").requires_grad_(),
        old_logprobs=laid_out("old"),
        inference_logprobs=laid_out("inference"),
        advantages=batch["advantages"][rows.start : rows.stop],
        loss_mask=mask[mask] if packed else mask,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0) if packed else None,
        sequence_ids=torch.arange(rows.start, rows.stop),
        entropy=laid_out("entropy"),
        distances=(4 * laid_out("entropy")).long(),
    )


def _loss_and_gradient(
    config: ObjectiveConfig, batch: dict[str, Tensor], parts: list[range], padding: int = 0, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of each trained token in the order of the sequences."""
    pieces = [_inputs(batch, rows, padding, packed) for rows in parts]
    counted = [compute_denominators(piece, config) for piece in pieces]
    denominators = counted[0]
    for more in counted[1:]:
        denominators = denominators + more
    total, gradients = torch.zeros((), dtype=torch.float64), []
    for piece in pieces:
        loss = compute_objective(piece, config, denominators).loss
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
        gradient = piece.current_logprobs.grad
        zeros = torch.zeros_like(piece.current_logprobs)
        gradients.append((zeros if gradient is None else gradient)[piece.loss_mask])
    return total, torch.cat(gradients)
