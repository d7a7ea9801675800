"""The fused output layer against whole logits: values, entropy, gradients; and that the logits are never whole."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.learner.layers import fused_head
from megatron_rl.learner.layers.fused_head import head_logprobs
from megatron_rl.learner.layers.logprobs import token_logprobs

N, ROWS, H, V, TRUE_V = 90, 70, 16, 112, 101


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(N, H, generator=draw).to(dtype),
        "weight": torch.randn(V, H, generator=draw).to(dtype),
        "positions": torch.randperm(N, generator=draw)[:ROWS],
        "labels": torch.randint(0, TRUE_V, (ROWS,), generator=draw),
        "upstream": torch.randn(ROWS, generator=draw),
    }


def run(function, values: dict, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    hidden, weight = (
        values[n].detach().to(dtype or values[n].dtype).clone().requires_grad_() for n in ("hidden", "weight")
    )
    logprobs, entropy = function(hidden, weight, values["positions"], values["labels"])
    grads = torch.autograd.grad((logprobs * values["upstream"].to(logprobs.dtype)).sum(), (hidden, weight))
    return {"logprobs": logprobs.detach(), "entropy": entropy, "hidden": grads[0], "weight": grads[1]}


def fused(temperature: float):
    return lambda h, w, p, y: head_logprobs(h, w, p, y, vocab_size=TRUE_V, temperature=temperature)


def whole(temperature: float):
    return lambda h, w, p, y: token_logprobs(h @ w.t(), p, y, vocab_size=TRUE_V, temperature=temperature)


def reference(temperature: float):
    def function(h, w, p, y):
        logs = torch.log_softmax((h @ w.t())[p, :TRUE_V] / temperature, -1)
        return logs.gather(1, y[:, None]).squeeze(1), -(logs.exp() * logs).sum(-1).detach()

    return function


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(fused_head, "LOGIT_CHUNK_ROWS", 16)  # several pieces, the last one shorter


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_whole_logits(temperature):
    values = inputs(torch.float32)
    got, wanted = run(fused(temperature), values), run(whole(temperature), values)
    exact = run(reference(temperature), values, torch.float64)
    for name in got:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[name].double(), exact[name], rtol=1e-5, atol=1e-5)
    assert not got["entropy"].requires_grad
    assert (got["weight"][TRUE_V:] == 0).all()
    untouched = sorted(set(range(N)) - set(values["positions"].tolist()))
    assert (got["hidden"][untouched] == 0).all()


def test_gradient_is_the_derivative():
    """Central differences of the function itself, along random directions."""
    values = inputs(torch.float32)
    got, draw = run(fused(1.0), values), torch.Generator().manual_seed(1)
    for name in ("hidden", "weight"):
        direction = torch.randn(values[name].shape, generator=draw)
        step = 1e-2

        @torch.no_grad()
        def total(sign: float, name=name, direction=direction, step=step) -> float:
            moved = {**values, name: values[name] + sign * step * direction}
            found, _ = fused(1.0)(moved["hidden"], moved["weight"], moved["positions"], moved["labels"])
            return float((found.double() * values["upstream"].double()).sum())

        slope = (total(1.0) - total(-1.0)) / (2 * step)
        assert slope == pytest.approx(float((got[name] * direction).sum()), rel=2e-3)


def test_sixteen_bit_pieces_add_up_in_fp32():
    """One token a piece: a gradient summed in bf16 would be several times as far from the truth as the whole one."""
    values = inputs(torch.bfloat16)
    exact = run(reference(1.0), values, torch.float64)["weight"]

    def error(function) -> float:
        return float((run(function, values)["weight"].double() - exact).norm() / exact.norm())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_head, "LOGIT_CHUNK_ROWS", 1)
        assert error(fused(1.0)) < 1.5 * error(whole(1.0))


class Largest(TorchDispatchMode):
    """The most elements that any tensor computed inside has."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_logits_are_never_whole():
    values = inputs(torch.float32)
    with Largest() as largest:
        run(fused(1.0), values)
    assert largest.numel == max(16 * V, V * H)
    with Largest() as largest:
        run(whole(1.0), values)
    assert largest.numel == N * V
