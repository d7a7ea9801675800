"""Guards of the objective's numbers."""

from __future__ import annotations

import math
import warnings

import pytest

from megatron_rl.config import ObjectiveConfig, objective
from megatron_rl.objective.inputs import MAX_LOG_RATIO

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")


def quiet(**config) -> ObjectiveConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ObjectiveConfig.model_validate(config)


def test_ratios_end_where_the_configuration_says():
    assert math.exp(MAX_LOG_RATIO) == objective.LARGEST_RATIO
    quiet(correction=[{"mode": "tis", "cap": 4.8e8}])
