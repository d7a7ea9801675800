"""The fused output layer against whole logits: values, entropy, gradients; and that the logits are never whole."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.learner import logprobs
from megatron_rl.learner.logprobs import head_logprobs, token_logprobs
from tests.support.rounding import assert_as_double

N, ROWS, H, V, TRUE_V = 90, 70, 16, 112, 101
LONGEST_SUM = TRUE_V  # of the softmax; those over rows and over the width are shorter


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
        x = (h @ w.t())[p, :TRUE_V] / temperature
        entropy = x.logsumexp(-1) - (x.softmax(-1) * x).sum(-1)  # two large numbers may leave a small one
        return torch.log_softmax(x, -1).gather(1, y[:, None]).squeeze(1), entropy.detach()

    return function


def leaves(values: dict) -> list[torch.Tensor]:
    return [values[name].clone().requires_grad_() for name in ("hidden", "weight")]


def plain(temperature: float, values: dict):
    """The reference as a function of the hidden states and the weight alone, in their type."""
    return lambda h, w: list(run(reference(temperature), {**values, "hidden": h, "weight": w}).values())


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(logprobs, "LOGIT_CHUNK_ROWS", 16)  # several pieces, the last one shorter


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_whole_logits(temperature):
    values = inputs(torch.float32)
    got, wanted = run(fused(temperature), values), run(whole(temperature), values)
    for tensors in (got, wanted):
        assert_as_double(list(tensors.values()), plain(temperature, values), leaves(values), LONGEST_SUM)
    assert not got["entropy"].requires_grad
    assert (got["weight"][TRUE_V:] == 0).all()
    untouched = sorted(set(range(N)) - set(values["positions"].tolist()))
    assert (got["hidden"][untouched] == 0).all()


def test_sixteen_bit_pieces_add_up_in_fp32():
    """One token a piece: a gradient summed in bf16 would be several times as far from the truth as the whole one."""
    values = inputs(torch.bfloat16)
    exact = run(reference(1.0), values, torch.float64)["weight"]

    def error(function) -> float:
        return float((run(function, values)["weight"].double() - exact).norm() / exact.norm())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "LOGIT_CHUNK_ROWS", 1)
        assert error(fused(1.0)) < 1.5 * error(whole(1.0))  # no rounding: between one time and several


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
