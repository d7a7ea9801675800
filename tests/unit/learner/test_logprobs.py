"""Token log-probabilities against log_softmax in float64: values, entropy, gradients, padding of the vocabulary."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.learner import logprobs
from megatron_rl.learner.logprobs import head_logprobs, keep_sets, most_probable, token_logprobs
from tests.support.rounding import assert_as_double, rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_log_softmax(dtype, temperature):
    """Computed in float32 whatever the type of the logits; the gradient is rounded to it once."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(700, 96)).to(dtype).requires_grad_()
    positions = torch.randperm(700)[:600]  # more rows than one chunk
    labels = torch.randint(0, 90, (600,))
    logprobs, entropy = token_logprobs(logits, positions, labels, vocab_size=90, temperature=temperature)
    weight = torch.randn(600)
    (grad,) = torch.autograd.grad((logprobs * weight).sum(), logits)

    def plain(logits: torch.Tensor) -> list[torch.Tensor]:
        x = logits[:, :90] / temperature
        chosen = torch.log_softmax(x, -1)[positions, labels]
        entropy = x.logsumexp(-1) - (x.softmax(-1) * x).sum(-1)  # two large numbers may leave a small one
        (grad,) = torch.autograd.grad((chosen * weight.to(chosen.dtype)).sum(), logits, retain_graph=True)
        return [chosen, entropy[positions], grad]

    computed = [logprobs, entropy, grad]
    assert_as_double(computed, plain, [logits.detach().float().requires_grad_()], longest_sum=90)
    assert logprobs.dtype == torch.float32
    assert not entropy.requires_grad


def test_padding_columns_take_no_probability_and_no_gradient():
    logits = torch.zeros(1, 8)
    logits[:, 5:] = 50.0
    logits.requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.tensor([0]), torch.tensor([2]), vocab_size=5)
    logprobs.sum().backward()
    assert logprobs.item() == rounded(-math.log(5), dtype=torch.float32)
    assert entropy.item() == rounded(math.log(5), dtype=torch.float32)
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
    assert entropy.item() == 0.0
    assert torch.isfinite(logits.grad).all()


def random_sets(labels: torch.Tensor, vocab_size: int, width: int) -> torch.Tensor:
    """[n, width]: the label and up to width - 1 other tokens, then -1."""
    others = torch.stack([torch.randperm(vocab_size)[:width] for _ in labels])
    others[torch.arange(width)[None] > torch.randint(0, width, (len(labels), 1))] = -1
    return torch.cat([labels[:, None], others.masked_fill(others == labels[:, None], -1)[:, 1:]], dim=1)


@pytest.mark.parametrize("has_sets", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_log_probs_of_a_head_with_their_gradient(entropy_gradient, has_sets, monkeypatch):
    """log pi of k further tokens of each row, whole logits and fused; where there is no token there is no gradient."""
    monkeypatch.setattr(logprobs, "LOGIT_CHUNK_ROWS", 64)
    torch.manual_seed(4)
    hidden, weight = torch.randn(300, 16).requires_grad_(), torch.randn(40, 16).requires_grad_()
    positions, labels = torch.randperm(300)[:270], torch.randint(0, 37, (270,))
    head = random_sets(labels, 37, 9)
    inside = torch.ones(270, 40, dtype=torch.bool)
    if has_sets:
        inside = torch.zeros(270, 41, dtype=torch.bool).scatter_(1, head.masked_fill(head < 0, 40), True)[:, :40]
    inside[:, 37:] = False
    upstream, of_head = torch.randn(2, 270), torch.randn(270, 9)
    options = {"vocab_size": 37, "temperature": 0.7, "entropy_gradient": entropy_gradient}

    def with_gradients(function):
        chosen, entropy, further = function(positions, labels, kept=head if has_sets else None, head=head, **options)
        loss = (chosen * upstream[0] + entropy * upstream[1] * entropy_gradient).sum() + (further * of_head).sum()
        return [chosen, further.masked_fill(head < 0, 0.0), *torch.autograd.grad(loss, (hidden, weight))]

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        z = ((hidden[positions] @ weight.t()) / 0.7).masked_fill(~inside, -torch.inf)
        log_pi = z.log_softmax(-1)
        finite = log_pi.masked_fill(~inside, 0.0)
        entropy = -(finite.exp() * inside * finite).sum(-1)
        chosen = log_pi.gather(1, labels[:, None]).squeeze(1)
        further = finite.gather(1, head.clamp(min=0)).masked_fill(head < 0, 0.0)
        given = [x.to(z.dtype) for x in (*upstream, of_head)]
        loss = (chosen * given[0] + entropy * given[1] * entropy_gradient).sum() + (further * given[2]).sum()
        return [chosen, further, *torch.autograd.grad(loss, (hidden, weight), retain_graph=True)]

    inputs = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    for way in (
        lambda *a, **k: token_logprobs(hidden @ weight.t(), *a, **k),
        lambda *a, **k: head_logprobs(hidden, weight, *a, **k),
    ):
        assert_as_double(with_gradients(way), plain, inputs, longest_sum=270)


@pytest.mark.parametrize("has_sets", [False, True])
def test_the_most_probable_tokens_of_each_row(has_sets, monkeypatch):
    """Of whole logits and fused, without padding columns; -1 after those that are kept."""
    monkeypatch.setattr(logprobs, "LOGIT_CHUNK_ROWS", 64)
    torch.manual_seed(5)
    hidden, weight = torch.randn(100, 16), torch.randn(40, 16)
    positions = torch.randperm(100)[:90]
    kept = random_sets(torch.randint(0, 37, (90,)), 37, 9) if has_sets else None
    logits = (hidden @ weight.t())[positions]
    wanted = []
    for row, values in enumerate(logits.tolist()):
        inside = [v for v in range(37) if kept is None or v in kept[row].tolist()]
        best = sorted(inside, key=lambda v: -values[v])[:6]
        wanted.append(best + [-1] * (6 - len(best)))
    options = {"vocab_size": 37, "group": None, "kept": kept}
    assert most_probable(hidden @ weight.t(), positions, 6, **options).tolist() == wanted
    assert most_probable(hidden, positions, 6, weight=weight, **options).tolist() == wanted


def test_tensor_parallel_ranks_find_the_same_tokens(monkeypatch):
    """Each of three ranks has 8 columns, the last one padding from 21 on; what the others send is made here."""
    torch.manual_seed(6)
    logits = torch.randn(50, 24)
    parts = logits[:, :21].split(8, dim=1)

    def all_gather(gathered, own, group):
        for rank, part in enumerate(parts):
            values, ids = torch.nn.functional.pad(part, (0, 8 - part.size(1)), value=-math.inf).topk(6, dim=1)
            gathered[rank].copy_(values if own.is_floating_point() else ids + 8 * rank)

    monkeypatch.setattr(logprobs.dist, "all_gather", all_gather)
    wanted = logits[:, :21].topk(6, dim=1).indices
    for rank in range(3):
        group = SimpleNamespace(size=lambda: 3, rank=lambda rank=rank: rank)
        found = most_probable(
            logits[:, 8 * rank : 8 * rank + 8], torch.arange(50), 6, vocab_size=21, group=group, kept=None
        )
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("has_sets", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_softmax_with_its_entropy_by_whole_logits_and_fused(temperature, has_sets, monkeypatch):
    """log pi(y) = z_y - log Σ_{v in S} exp z_v, S all tokens or the kept ones; no gradient outside S or to padding."""
    monkeypatch.setattr(logprobs, "LOGIT_CHUNK_ROWS", 64)  # several pieces, the last one shorter
    torch.manual_seed(2)
    hidden, weight = torch.randn(300, 16).requires_grad_(), torch.randn(40, 16).requires_grad_()
    positions, labels = torch.randperm(300)[:270], torch.randint(0, 37, (270,))
    sets = random_sets(labels, 37, 9) if has_sets else torch.arange(37).expand(270, 37)
    kept = sets if has_sets else None
    inside = torch.zeros(270, 41, dtype=torch.bool).scatter_(1, sets.masked_fill(sets < 0, 40), True)[:, :40]
    of_logprobs, of_entropy = torch.randn(270), torch.randn(270)

    def with_gradients(function):
        logprobs, entropy = function(
            positions, labels, vocab_size=37, temperature=temperature, entropy_gradient=True, kept=kept
        )
        loss = (logprobs * of_logprobs + entropy * of_entropy).sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))]

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        z = (hidden[positions] @ weight.t()) / temperature
        weights = z.exp() * inside
        total = weights.sum(-1).log()
        logprobs = z.gather(1, labels[:, None]).squeeze(1) - total
        entropy = total - (weights * z).sum(-1) / weights.sum(-1)
        loss = (logprobs * of_logprobs.to(z.dtype) + entropy * of_entropy.to(z.dtype)).sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight), retain_graph=True)]

    inputs = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    for way in (
        lambda *a, **k: token_logprobs(hidden @ weight.t(), *a, **k),
        lambda *a, **k: head_logprobs(hidden, weight, *a, **k),
    ):
        computed = with_gradients(way)
        assert_as_double(computed, plain, inputs, longest_sum=270)
        assert computed[1].requires_grad
    logits = (hidden @ weight.t()).detach().requires_grad_()
    token_logprobs(logits, positions, labels, vocab_size=37, kept=kept)[0].sum().backward()
    assert (logits.grad[positions][~inside] == 0).all()
    assert (logits.grad[positions][inside] != 0).any()


def test_two_equal_tokens_that_are_kept_have_half_each():
    logits = torch.tensor([[1.0, 3.0, 1.0, 9.0]], requires_grad=True)
    kept = torch.tensor([[2, 0, -1]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([0]), torch.tensor([2]), vocab_size=4, kept=kept)
    logprobs.sum().backward()
    assert logprobs.item() == rounded(-math.log(2), dtype=torch.float32)
    assert entropy.item() == rounded(math.log(2), dtype=torch.float32)
    assert logits.grad.tolist() == [[-0.5, 0.0, 0.5, 0.0]]


def test_each_tensor_parallel_rank_cuts_its_own_columns():
    torch.manual_seed(3)
    labels = torch.randint(0, 24, (50,))
    kept, rows = random_sets(labels, 24, 6), torch.arange(50)
    whole = torch.randn(50, 24)
    parts = list(whole.clone().split(8, dim=1))
    for rank, part in enumerate(parts):
        keep_sets(part, kept, rows, 8 * rank)
    keep_sets(whole, kept, rows, 0)
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert ((whole > -math.inf).sum(1) == (kept >= 0).sum(1)).all()
