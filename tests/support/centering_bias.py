"""What a constant advantage adds to a stored batch's gradient: python -m tests.support.centering_bias RUN STEP MODEL.

It says nothing of any token: its mean over the sampler is bias. That is E_mu[f s] = Σ_v mu_v f(pi_v/mu_v) s_v over the
whole vocabulary, s_v = ∂ log pi_v, less what centering subtracts with a head of k. The stored head has to be the whole
vocabulary, and is mu; MODEL is the Hugging Face folder of the step's weights, whose softmax is pi.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective.centering import center
from megatron_rl.objective.inputs import Head
from megatron_rl.run.recorded_batches import batch_path, load_batch
from tests.support import plain_training

HEADS = (0, 4, 32, 128)  # 0: nothing is subtracted
WEIGHTS = {
    "none": torch.ones_like,
    "tis": lambda r: r.clamp(max=2.0),
    "mis": lambda r: r * (r <= 3.0),
    "icepop": lambda r: r * ((r >= 0.5) & (r <= 5.0)),
}
"""f of each correction with its defaults, as its paper writes it."""


def shares(run: Path, step: int, model: Path) -> dict[tuple[str, int], tuple[float, float]]:
    """(weight, k) → what is left of E_mu[f s] in units of f s: root mean square over tokens, in the gradient of the
    logits; norm of the parameters' gradient, where each token counts with the response's advantage over its length."""
    batch = load_batch(batch_path(run / "batches", step)).batch
    names = ("head_tokens", "head_logprobs", "tokens", "inference_logprobs")
    ids, log_mu, sampled, own = (
        torch.from_numpy(np.concatenate([getattr(s, name) for s in batch.sequences])) for name in names
    )
    loaded, ids, sampled = plain_training.load(model, torch.float32), ids.long(), sampled.long()[:, None]
    logits = plain_training.logits(loaded, batch)
    a = torch.cat([torch.full((s.length, 1), s.advantage / s.length) for s in batch.sequences])
    z = logits.detach().double().requires_grad_()
    log_pi, mu = z.log_softmax(-1).gather(1, ids), log_mu.double().exp()
    everywhere = torch.ones(len(z))
    tokens = SimpleNamespace(current=log_pi, mask=everywhere.bool(), weight=everywhere, advantages=everywhere)

    def norms(total: torch.Tensor) -> np.ndarray:
        (rows,) = torch.autograd.grad(total, z, retain_graph=True)
        parameters = torch.autograd.grad(logits, list(loaded.parameters()), (a * rows).float(), True, allow_unused=True)
        squares = sum(gradient.double().square().sum() for gradient in parameters if gradient is not None)
        return np.array([rows.norm().item(), squares**0.5])

    found = {}
    for name, f in WEIGHTS.items():
        of_sampled = z.log_softmax(-1).gather(1, sampled)[:, 0]
        whole = norms((f((of_sampled.detach() - own).exp()) * of_sampled).sum())
        mean = (mu * f(log_pi.detach().exp() / mu) * log_pi).sum()
        correction = [] if name == "none" else [name]
        config = ObjectiveConfig(policy_term="reinforce", score_centering=True, correction=correction)
        for k in HEADS:
            head = Head(log_pi[:, :k], log_mu[:, :k], tokens.mask)
            left = mean - center(tokens, head, config).mean.sum() if k else mean
            found[name, k] = tuple((norms(left) / whole).tolist())
    return found


if __name__ == "__main__":
    for (name, k), (of_tokens, of_batch) in shares(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])).items():
        print(f"{name:7} head {k:4}  tokens {of_tokens:.2e}  batch {of_batch:.2e}")
