"""The tokens of stored batches as a scatter plot."""

from __future__ import annotations

import json
import math

import numpy as np
import torch

from megatron_rl.__main__ import main
from megatron_rl.instruments.paper.figures import draw_scatter, probabilities
from megatron_rl.run.recorded_batches import record_batch
from tests.support.rounding import gamma
from tests.support.tiny import stored_rollouts


def test_tokens_of_stored_batches_are_scattered(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "mismatch/pcc": 1.0}) + "\n")
    for step in (2, 5):
        batch = stored_rollouts(step)
        for sequence in batch.sequences:
            sequence.current_logprobs = sequence.inference_logprobs - 0.1
        record_batch(run / "batches", batch, 0, {}, keep=True)
    po, mu = probabilities(batch)
    assert len(po) == sum(int(s.loss_mask.sum()) for s in batch.sequences)
    # In float32: 0.1, the difference, and the exponentials of log-probs of that size.
    error = math.expm1(gamma(3, torch.float32) * float(-np.log(po.min()))) + gamma(16, torch.float32)
    np.testing.assert_allclose(po, mu * np.exp(-0.1), rtol=error)
    figure = draw_scatter([("mine", run)], "t")
    assert [axes.get_title() for axes in figure.axes] == ["mine, step 2: PCC 1.0000", "mine, step 5: PCC 1.0000"]
    assert main(["plot", "--paper", "hacking", str(run), "--figure", "fig03", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "hacking-fig03.png").read_bytes().startswith(b"\x89PNG")
