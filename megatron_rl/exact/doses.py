"""Doses of mismatch: what the sampler is made to do otherwise than the learner (`exact.noise`).

Noise on logits is added to what was computed. The other kinds change the model while responses are sampled
(`Dose.on`); log po of their tokens then takes one more pass over the whole responses, without the dose.

Noise of a token is a function of its response's seed and of its place, so that it depends neither on the batch nor on
the layout. Shapes: N rows of a pass, n sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.checkpoint.state import model_tensors
from megatron_rl.config.rollout import ExactConfig, NoiseConfig
from megatron_rl.process.ranks import gather_objects
from megatron_rl.rollout.weights import by_halves, matrices, replaced, rounded
from megatron_rl.types import Rollout

PROMPT_SAMPLE = 0
"""Tokens of a prompt take the noise of this sample, in all samples of the prompt: they may share a cache."""


class Dose:
    """No dose, or one on the logits; what the other kinds are told and asked."""

    changes_model = False
    is_inside_layers = False  # what a layer computes, and not its weights

    def __init__(self, config: NoiseConfig | None, seed: int):
        self.config, self.seed = config, seed
        self.size = 0.0 if config is None else config.strength if config.kind == "weights" else config.std

    def adjust(self, measured: float) -> None:
        """Move ``size`` towards what gives `exact.noise.hold`, where a rollout with the present one had ``measured``.

        The exponent damps: where the response is a power k of size, 1 - k/4 of the error in logarithms is left.
        """
        if self.config is not None and self.config.hold is not None:
            ratio = self.config.hold / measured if measured > 0 else math.inf
            self.size *= min(max(ratio**0.25, 0.5), 2.0)

    @property
    def is_on_logits(self) -> bool:
        return self.config is not None and self.config.kind in ("logits", "frozen")

    def logit_noise(
        self, random: np.random.Generator, last: Callable[[int], list[int]], size: int
    ) -> np.ndarray | None:
        """[V] float64 for one token, or None: none. ``random``: the response's own stream. ``last``: number → so many
        tokens before it."""
        if not self.is_on_logits:
            return None
        if self.config.kind == "frozen":
            random = _frozen_stream(self.seed, last(self.config.context or 1))
        return self.size * random.standard_normal(size)

    def on(self, module: torch.nn.Module) -> AbstractContextManager:
        """Make passes of ``module`` the sampler's, with the dose, while the context is open."""
        return nullcontext()

    def before_pass(self, seeds: torch.Tensor, positions: torch.Tensor) -> None:
        """What the next pass computes: [N] int64 seed of each row's response, and its place in the sequence."""

    def new_weights(self, module: torch.nn.Module, version: int) -> None:
        """The module has got the weights of policy ``version``."""

    def sampler_version(self, newest: int) -> int:
        """Version of the weights that sample while those of the model have version ``newest``."""
        return newest


_PUT_OUT_BY = {
    "input_norm": "input_layernorm",
    "o_proj": "self_attention.linear_proj",
    "second_norm": "pre_mlp_layernorm",
    "mlp": "mlp",
    "output": "",
    None: "",
}
"""What of a layer puts the result of `exact.noise.operator` out; "": the layer itself."""


class RowNoise(Dose):
    """Noise inside the model: on the routers' logits or on what layers put out."""

    changes_model = is_inside_layers = True

    def before_pass(self, seeds: torch.Tensor, positions: torch.Tensor) -> None:
        self._keys = _mixed(seeds + positions * _STEP)

    @contextmanager
    def on(self, module: torch.nn.Module) -> Iterator[None]:
        undo = []
        for number, layer in enumerate(module.decoder.layers):
            salt = getattr(layer, "layer_number", number + 1)
            if self.config.layers is not None and salt - 1 not in self.config.layers:
                continue
            if self.config.kind == "hidden":
                part = layer.get_submodule(_PUT_OUT_BY[self.config.operator])
                undo.append(part.register_forward_hook(partial(self._on_hidden, salt)).remove)
                continue
            for router in (part for part in layer.modules() if isinstance(part, TopKRouter)):
                undo.append(partial(setattr, router, "gating", router.gating))
                router.gating = partial(self._on_router, salt, router.gating)
        try:
            yield
        finally:
            for restore in undo:
                restore()

    def _on_router(self, salt: int, gating: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        logits = gating(x)
        noise = self._noise(salt, logits.numel() // logits.size(-1), logits.size(-1))
        return logits + self.size * noise.view_as(logits).to(logits.dtype)

    def _on_hidden(self, salt: int, _layer: torch.nn.Module, _args: tuple, output: torch.Tensor | tuple):
        hidden = output[0] if isinstance(output, tuple) else output
        noise = self._noise(salt, hidden.numel() // hidden.size(-1), hidden.size(-1)).view_as(hidden)
        size = hidden.float().square().mean(-1, keepdim=True).sqrt()
        changed = (hidden.float() + self.size * size * noise).to(hidden.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def _noise(self, salt: int, num_rows: int, width: int) -> torch.Tensor:
        """[num_rows, width] float32 of the rows that are here: all, or this rank's share of sequence parallelism."""
        keys = self._keys
        if len(keys) != num_rows:
            group = parallel_state.get_tensor_model_parallel_group()
            keys = keys.chunk(group.size())[group.rank()]
        return row_gaussian(_mixed(keys + (salt * _SALT + 2**63) % 2**64 - 2**63), width)


class RoundedWeights(Dose):
    changes_model = True

    @contextmanager
    def on(self, module: torch.nn.Module) -> Iterator[None]:
        config = self.config.quantization
        through = partial(rounded, kind=config.weights, block=config.of_weights)
        with replaced(
            (p, self._moved(p.detach(), by_halves(through, name, p.detach()))) for name, p in matrices(module)
        ):
            yield

    def _moved(self, weight: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return goal if self.size == 1.0 else torch.lerp(weight.float(), goal.float(), self.size).to(weight.dtype)


class StaleWeights(Dose):
    """Keeps in host memory what the policy's weights were, as far back as they are wanted. A resumed run begins anew
    with the weights of its checkpoint. A new run hands no weights over before its first step, whose weights are
    version 0."""

    changes_model = True

    def __init__(self, config: NoiseConfig, seed: int):
        super().__init__(config, seed)
        self._kept: deque[tuple[int, list[torch.Tensor]]] = deque()

    def new_weights(self, module: torch.nn.Module, version: int) -> None:
        while self._kept and self._kept[-1][0] >= version:  # a run that was taken back
            self._kept.pop()
        self._kept.append(
            (version, [tensor.detach().to("cpu", copy=True) for tensor in model_tensors(module).values()])
        )
        while len(self._kept) > 1 and self._kept[1][0] <= version - self.config.updates:
            self._kept.popleft()

    def sampler_version(self, newest: int) -> int:
        return self._kept[0][0] if self._kept else newest

    @contextmanager
    def on(self, module: torch.nn.Module) -> Iterator[None]:
        if not self._kept:
            self.new_weights(module, version=0)
        with replaced(zip(model_tensors(module).values(), self._kept[0][1], strict=True)):
            yield


_KINDS: dict[str, type[Dose]] = {
    "router": RowNoise,
    "hidden": RowNoise,
    "weights": RoundedWeights,
    "stale": StaleWeights,
}


def make_dose(config: ExactConfig, seed: int) -> Dose:
    """Make the dose of `exact.noise`. ``seed``: `rollout.seed`, on which `frozen` noise depends."""
    dose = config.dose
    return Dose(None, seed) if dose is None else _KINDS.get(dose.kind, Dose)(dose, seed)


def size_of(rollouts: list[Rollout]) -> dict[str, float]:
    """Standard deviation (n - 1) of log rho = log po - log mu over all sampled tokens, and the mean over responses of
    Σ |log rho|; nothing of no tokens. ``rollouts``: those that this rank owns. Collective."""
    differences = [(r.exact_logprobs.astype(np.float64) - r.inference_logprobs) for r in rollouts]
    joined = np.concatenate(differences) if differences else np.zeros(0)
    local_sums = (len(rollouts), joined.size, joined.sum(), np.square(joined).sum(), np.abs(joined).sum())
    count, tokens, total, square, absolute = np.sum(gather_objects(local_sums), axis=0).tolist()
    if not tokens:
        return {}
    variance = max(square - total**2 / tokens, 0.0) / max(tokens - 1, 1)
    return {"exact/log_rho_std": math.sqrt(variance), "exact/abs_log_rho_sum": absolute / count}


# -- random numbers


def _frozen_stream(seed: int, context: list[int]) -> np.random.Generator:
    text = f"{seed}/frozen/{','.join(map(str, context))}".encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return np.random.Generator(np.random.Philox(key=key))


_STEP, _SALT = -7046029254386353131, -4417276706812531889
"""Odd constants of SplitMix64 and its kin, as signed numbers: keys of neighbouring places are far apart."""
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer of int64 numbers, elementwise; products wrap around."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = (x ^ _shifted(x, shift)) * multiplier
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def row_gaussian(keys: torch.Tensor, width: int) -> torch.Tensor:
    """Standard normal numbers [N, width] float32; row i is a function of ``keys`` [N] int64 [i] alone (Box-Muller)."""
    columns = torch.arange(1, width + 1, device=keys.device) * _STEP
    bits = _mixed(keys[:, None] + columns)
    first = (_shifted(bits, 32) + 1).double() * 2.0**-32  # (0, 1]
    second = (bits & 0xFFFFFFFF).double() * (2.0 * math.pi * 2.0**-32)
    return (torch.sqrt(-2.0 * torch.log(first)) * torch.cos(second)).float()
