"""What a constant advantage adds to the gradient of a stored batch, with and without score centering.

    python -m tools.dev.centering_bias RUN STEP MODEL

RUN has stored the batch of STEP with a head of the whole vocabulary (`rollout.sampled_head`), which is mu; MODEL is the
Hugging Face folder of the step's weights (`megatron-rl convert to-hf`), whose softmax is pi.

A constant advantage says nothing of any token. What it adds on average over the sampler is bias: the closed form
E_mu[f s] = Σ_v mu_v f(pi_v/mu_v) s_v over the whole vocabulary, s_v = ∂ log pi_v, less what centering subtracts with a
head of k tokens. `token` is its root mean square over tokens, in the gradient of the logits, in units of the same of
f s itself. `batch` is the norm of the parameters' gradient of Σ_t a_t E_mu[f s_t] over that of Σ_t a_t f s_t, a_t the
stored advantage over tokens of the response.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective.centering import center
from megatron_rl.objective.inputs import Head
from megatron_rl.run.recorded_batches import batch_path, load_batch
from tests.support import plain_training

HEADS = (0, 4, 32, 128)
Weight = Callable[[Tensor], Tensor]
WEIGHTS: dict[str, Weight] = {
    "none": torch.ones_like,
    "tis": lambda r: r.clamp(max=2.0),
    "mis": lambda r: r * (r <= 3.0),
    "icepop": lambda r: r * ((r >= 0.5) & (r <= 5.0)),
}
"""f of each correction with its defaults, as its paper writes it."""


def mean_score(name: str, logits: Tensor, ids: Tensor, log_mu: Tensor, k: int) -> Tensor:
    """[R, V]: gradient in the ``logits`` [R, V] of E_mu[f log pi], less what centering subtracts; with ``k`` 0 nothing.

    ``ids`` [R, V]: all tokens, most probable first. ``log_mu`` [R, V]: theirs.
    """
    logits = logits.detach().double().requires_grad_()
    log_pi = logits.log_softmax(-1).gather(1, ids)
    mu = log_mu.double().exp()
    total = (mu * WEIGHTS[name](log_pi.detach().exp() / mu) * log_pi).sum()
    if k:
        corrections = [] if name == "none" else [name]
        config = ObjectiveConfig(policy_term="reinforce", score_centering=True, correction=corrections)
        everywhere = torch.ones(len(logits), dtype=torch.bool)
        tokens = SimpleNamespace(current=log_pi, mask=everywhere)
        total = total - center(tokens, Head(log_pi[:, :k], log_mu[:, :k], everywhere), config).mean.sum()
    return torch.autograd.grad(total, logits)[0]


def score(name: str, logits: Tensor, sampled: Tensor, log_mu: Tensor) -> Tensor:
    """[R, V]: f s of the ``sampled`` tokens [R], whose log mu is [R]."""
    log_pi = logits.detach().double().log_softmax(-1)
    own = torch.zeros_like(log_pi).scatter_(1, sampled[:, None], 1.0)
    weight = WEIGHTS[name]((log_pi.gather(1, sampled[:, None])[:, 0] - log_mu.double()).exp())
    return weight[:, None] * (own - log_pi.exp())


def shares(run: Path, step: int, model: Path) -> dict[tuple[str, int], tuple[float, float]]:
    """(weight, k) → `token` and `batch` of the module's text."""
    batch = load_batch(batch_path(run / "batches", step)).batch
    joined = {
        name: torch.from_numpy(np.concatenate([getattr(s, name) for s in batch.sequences]))
        for name in ("head_tokens", "head_logprobs", "tokens", "inference_logprobs")
    }
    ids, log_mu, sampled = joined["head_tokens"].long(), joined["head_logprobs"], joined["tokens"].long()
    loaded = plain_training.load(model, torch.float32)
    logits = plain_training.logits(loaded, batch)
    assert ids.shape == logits.shape, "the head is not the whole vocabulary"
    a = torch.cat([torch.full((s.length,), s.advantage / s.length) for s in batch.sequences])[:, None]

    def norm(rows: Tensor) -> float:
        wanted = torch.autograd.grad(logits, list(loaded.parameters()), (a * rows).float(), True, allow_unused=True)
        return float(sum(g.double().square().sum() for g in wanted if g is not None).sqrt())

    found = {}
    for name in WEIGHTS:
        whole = score(name, logits, sampled, joined["inference_logprobs"])
        for k in HEADS:
            left = mean_score(name, logits, ids, log_mu, k)
            found[name, k] = (float(left.norm() / whole.norm()), norm(left) / norm(whole))
    return found


if __name__ == "__main__":
    for (weight, k), (token, of_batch) in shares(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])).items():
        print(f"{weight:7} head {k:4} token {token:.2e} batch {of_batch:.2e}")
