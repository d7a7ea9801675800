"""Experts of exact mode on a CPU: those of the largest logits are chosen, and each row gets what its expert gives."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.exact.layers import _experts_in_tiles, route
from tests.support.rounding import assert_rounded


@pytest.mark.parametrize("pre_softmax", [True, False])
@pytest.mark.parametrize("largest", [0, 1, 3])
def test_probabilities_that_round_to_one_number_choose_the_larger_logit(largest, pre_softmax):
    """0.1259765625 follows 0.125 in bf16. Their probabilities differ by less than bf16 does."""
    logits = torch.tensor([[0.125, 0.125, 0.0, 0.125]], dtype=torch.bfloat16)
    logits[0, largest] = 0.1259765625
    rounded = torch.softmax(logits.float(), -1).bfloat16()
    assert rounded[0, largest] == rounded[0, (largest + 1) % 2], "they round to one number"
    probs, chosen = route(logits, 1, pre_softmax)
    assert chosen.tolist() == [[largest]]
    assert probs.tolist() == ([[rounded[0, largest]]] if pre_softmax else [[1.0]])


def test_rows_in_tiles_are_those_of_their_experts():
    """90 tokens of two experts each; number -1 is another rank's, one expert is idle, the others have several tiles."""
    torch.manual_seed(0)
    x, probs = torch.randn(90, 8, dtype=torch.float64), torch.rand(90, 2, dtype=torch.float64)
    local = torch.stack([torch.randperm(3)[:2] for _ in range(90)]) - 1
    fc1 = [torch.randn(12, 8, dtype=torch.float64) for _ in range(3)]
    fc2 = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    rows, places = _experts_in_tiles(x, probs, local, fc1, fc2)
    for token, expert, prob, place in zip(
        x.repeat_interleave(2, 0), local.flatten().tolist(), probs.flatten(), places.flatten(), strict=True
    ):
        if expert >= 0:
            gate, up = (fc1[expert] @ token).chunk(2)
            expected = fc2[expert] @ (F.silu(gate) * up * prob)
            assert_rounded(rows[place], expected, roundings=100, scale=1 + float(expected.abs().max()))
