"""Which experts exact mode chooses on a CPU: those of the largest logits, for a softmax keeps their order."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.exact.layers import route


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
