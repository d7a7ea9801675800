"""The factor of the rate by effective sample size, as the paper's symbols say it, and its edges."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from megatron_rl.config.learner import EffectiveSampleConfig, OptimizerConfig, ScheduleConfig
from megatron_rl.learner.optimizer import build_scheduler
from megatron_rl.schedule import rate_factor
from tests.support.rounding import rounded
from tests.unit.objective.reference import effective_sample_size


def eta_eff(eta: float, w: list[float], rho_base: float = 1.0) -> float:
    """η_eff = η sqrt(min(1, ρ_ess / ρ_base)) [arXiv 2602.17616]; ρ_base is the authors' code's."""
    rho_ess = effective_sample_size(w)
    return eta * min(1.0, rho_ess / rho_base) ** 0.5


@pytest.mark.parametrize("w", [[1.0] * 8, [3.0, 1.0], [1.0, 1e-6, 1e-6, 1e-6], [0.2, 0.5, 4.0, 1.0, 1.1]])
@pytest.mark.parametrize("reference", [1.0, 0.4])
def test_the_factor_is_the_papers(w, reference):
    config = EffectiveSampleConfig(reference=reference)
    assert 1e-6 * rate_factor(effective_sample_size(w), config) == rounded(eta_eff(1e-6, w, reference))


@pytest.mark.parametrize(
    ("share", "config", "want"),
    [
        (1.0, {}, 1.0),
        (0.25, {}, 0.5),
        (0.25, {"rule": "linear"}, 0.25),
        (0.25, {"reference": 0.25}, 1.0),
        (0.3, {"reference": 0.25}, 1.0),
        (0.125, {"reference": 0.5, "rule": "linear"}, 0.25),
    ],
)
def test_worked_numbers_on_both_sides_of_the_reference(share, config, want):
    assert rate_factor(share, EffectiveSampleConfig(**config)) == rounded(want)


def test_a_rule_stands_for_its_defaults_and_bounds_are_held():
    assert ScheduleConfig(effective_sample="linear").effective_sample == EffectiveSampleConfig(rule="linear")
    assert ScheduleConfig().effective_sample is None
    for wrong in ({"reference": 0.0}, {"reference": 1.1}, {"rule": "cube"}):
        with pytest.raises(ValidationError):
            ScheduleConfig(effective_sample=wrong)


def test_every_group_is_scaled_for_one_update_alone():
    groups = [{"lr": 0.0, "weight_decay": 0.0, "lr_mult": mult, "params": []} for mult in (1.0, 0.5)]
    scheduler = build_scheduler(ScheduleConfig(), OptimizerConfig(lr=1e-3), SimpleNamespace(param_groups=groups), 10)
    before = [group["lr"] for group in groups]
    with scheduler.scaled(0.25):
        assert [group["lr"] for group in groups] == [0.25 * rate for rate in before]
    assert [group["lr"] for group in groups] == before
    with pytest.raises(RuntimeError), scheduler.scaled(0.25):
        raise RuntimeError
    assert [group["lr"] for group in groups] == before
