"""Token log-probabilities against log_softmax in float64: values, entropy, gradients, padding of the vocabulary."""

import pytest
import torch

from megatron_rl.learner.layers.logprobs import token_logprobs


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_log_softmax(dtype, tolerance, temperature):
    torch.manual_seed(0)
    logits = (3 * torch.randn(700, 96)).to(dtype).requires_grad_()
    positions = torch.randperm(700)[:600]  # more rows than one chunk
    labels = torch.randint(0, 90, (600,))
    logprobs, entropy = token_logprobs(logits, positions, labels, vocab_size=90, temperature=temperature)
    weight = torch.randn(600)
    (grad,) = torch.autograd.grad((logprobs * weight).sum(), logits)

    exact = logits.detach().double().requires_grad_()
    reference = torch.log_softmax(exact[:, :90] / temperature, -1)
    chosen = reference[positions, labels]
    (expected,) = torch.autograd.grad((chosen * weight.double()).sum(), exact)
    torch.testing.assert_close(logprobs.double(), chosen, rtol=1e-5, atol=1e-5)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(
        entropy.double(), -(reference.exp() * reference).sum(-1)[positions], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=tolerance)
    assert not entropy.requires_grad


def test_padding_columns_take_no_probability_and_no_gradient():
    logits = torch.zeros(1, 8)
    logits[:, 5:] = 50.0
    logits.requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.tensor([0]), torch.tensor([2]), vocab_size=5)
    logprobs.sum().backward()
    assert logprobs.item() == pytest.approx(-torch.log(torch.tensor(5.0)).item(), rel=1e-6)
    assert entropy.item() == pytest.approx(torch.log(torch.tensor(5.0)).item(), rel=1e-6)
    assert torch.equal(logits.grad[0, 5:], torch.zeros(3))


def test_rows_that_predict_nothing_get_no_gradient():
    logits = torch.randn(5, 8, requires_grad=True)
    logprobs, _ = token_logprobs(logits, torch.tensor([3, 1]), torch.tensor([0, 7]), vocab_size=8)
    logprobs.sum().backward()
    assert torch.equal(logits.grad[[0, 2, 4]], torch.zeros(3, 8))
    assert logits.grad[[1, 3]].abs().sum() > 0


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0]), torch.tensor([1]), vocab_size=3)
    logprobs.sum().backward()
    assert logprobs.item() == -2e4
    assert entropy.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(logits.grad).all()
