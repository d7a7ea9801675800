"""The doctor's check of fp32, on a sound process and on one whose products are TF32's."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.doctor import learner
from megatron_rl.doctor.checks import Setting

SETTING = Setting("cpu", 1, "/tmp")


def test_a_sound_process_passes():
    outcome = learner.products(SETTING)
    assert (outcome.status, outcome.reason.split(":")[0]) == ("pass", "PyTorch")


def test_a_library_with_tf32_is_named(monkeypatch):
    multiply = torch.mm

    def as_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return multiply(*((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)))

    monkeypatch.setattr(torch, "mm", as_tf32)
    outcome = learner.products(SETTING)
    assert (outcome.status, "PyTorch (tf32)" in outcome.reason) == ("fail", True)
    assert "NVIDIA_TF32_OVERRIDE=0" in outcome.fix


NORMS = {"TP1·EP1·DP2": 46.2607, "TP2·EP2·DP1": 46.2729}  # as TF32 leaves them


@pytest.mark.parametrize(("products", "status"), [("fp32", "fail"), ("tf32", "pass")])
def test_experts_are_not_blamed_for_tf32(products, status):
    outcome = learner.judge_experts([], NORMS, products)
    assert (outcome.status, "TF32" in outcome.reason) == (status, products == "tf32")


def test_a_norm_without_experts_fails_in_16_bits_too():
    outcome = learner.judge_experts([], {"TP1·EP1·DP2": 46.3, "TP2·EP2·DP1": 45.0}, "tf32")
    assert (outcome.status, "gradient norm 45.0" in outcome.reason) == ("fail", True)
