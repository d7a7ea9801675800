"""Aggregations by hand, and the promise that no layout, padding or split changes loss, gradient or metrics."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective import (
    Denominators,
    compute_denominators,
    compute_objective,
    finalize_metrics,
)
from megatron_rl.objective.aggregation import Collector, MetricStats
from tests.support.rounding import assert_rounded, rounded
from tests.unit.objective.batches import BATCH, loss_and_gradient, packed, padded, random_batch, worked

pytestmark = pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")

# Each holds something that a split could break: sequence statistics, noise, explicit denominators, every metric.
CONFIGS = [
    {"policy_term": {"name": "ppo_clip", "dual_clip": 1.2}, "correction": [{"mode": "tis", "cap": 1.2}]},
    {"policy_term": "gspo", "aggregation": "seq-mean-token-mean", "variance": {"sigma": 0.2}},
    {"policy_term": "gmpo", "aggregation": "seq-mean-token-sum", "distortion": {"delta": 1.2, "low_prob": 0.4}},
    {
        "policy_term": "reinforce",
        "aggregation": "seq-mean-token-sum-norm",
        "max_response_length": 12,
        "correction": [{"mode": "mis", "level": "sequence"}, {"mode": "veto", "threshold": 0.6}],
    },
    {
        "policy_term": "cispo",
        "correction": [{"mode": "reject", "statistic": "max_k3", "upper": 0.05, "renormalize": True}, {"mode": "opsm"}],
        "aggregation": "seq-mean-token-mean",
        "prob_bands": [0.2, 0.6],
    },
    {
        "policy_term": "ppo_clip",
        "correction": [{"mode": "tis", "level": "sequence", "normalize": True}, {"mode": "mask", "lower": 0.8}],
    },
    {"policy_term": "sapo", "correction": [{"mode": "m2po", "threshold": 0.02}, {"mode": "tis", "cap": 1.5}]},
    {"policy_term": "dppo", "correction": [{"mode": "reject", "statistic": "seq_mean_k3", "upper": 0.01}]},
]


def test_denominators_come_from_outside_when_given():
    current = torch.zeros(1, 4, dtype=torch.float64)
    inputs = worked(current, current, None, advantage=-1.0)
    for aggregation, want in (("token-mean", 4 / 40), ("seq-mean-token-mean", 1 / 5), ("seq-mean-token-sum", 4 / 5)):
        config = ObjectiveConfig.model_validate({"aggregation": aggregation})
        for counts in (Denominators(40, 5), Denominators(torch.tensor(40.0).double(), torch.tensor(5.0).double())):
            assert compute_objective(inputs, config, counts).loss.item() == rounded(want)


def whole(config, batch):
    inputs, mask = padded(batch, extra=0)
    result = compute_objective(inputs, config, noise_key=(3, 1))
    return (*loss_and_gradient(result, inputs, mask), result.metrics)


def in_parts(config, parts, forms):
    """Loss, gradients by part, and metrics of microbatches in the given forms, as a learner puts them together."""
    made = [form(part) for part, form in zip(parts, forms)]
    counts = None
    for inputs, _ in made:
        local = compute_denominators(inputs, config)
        counts = local if counts is None else counts + local
    results = [compute_objective(inputs, config, counts, noise_key=(3, 1)) for inputs, _ in made]
    gradients = [loss_and_gradient(r, inputs, mask)[1] for r, (inputs, mask) in zip(results, made)]
    stats = MetricStats.merge([result.stats for result in results])
    return sum(result.loss.item() for result in results), gradients, finalize_metrics(stats)


@settings(max_examples=40)
@given(
    which=st.integers(0, len(CONFIGS) - 1),
    seed=st.integers(0, 10_000),
    owners=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    is_packed=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_any_split_into_padded_and_packed_parts_gives_the_same(which, seed, owners, is_packed):
    config = ObjectiveConfig.model_validate(CONFIGS[which])
    batch = random_batch(seed, num_sequences=7)
    loss, gradient, metrics = whole(config, batch)
    members = [[i for i, owner in enumerate(owners) if owner == part] for part in range(4)]
    members = [indices for indices in members if indices]
    forms = [packed if flag else padded for flag in is_packed]
    got_loss, gradients, got_metrics = in_parts(config, [[batch[i] for i in m] for m in members], forms)
    assert got_loss == rounded(loss, BATCH)
    by_sequence = gradient.split([len(s) for s in batch])
    for indices, part in zip(members, gradients):
        assert_rounded(part, torch.cat([by_sequence[i] for i in indices]), BATCH)
    assert got_metrics == rounded(metrics, BATCH)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: str(c["policy_term"]))
def test_float32_metrics_survive_a_split(config):
    config = ObjectiveConfig.model_validate(config)
    batch = random_batch(8, num_sequences=40)
    metrics = []
    for size in (40, 7, 1):
        made = [padded(list(part), dtype=torch.float32)[0] for part in _chunks(batch, size)]
        counts = [compute_denominators(inputs, config) for inputs in made]
        total = sum(counts[1:], counts[0])
        stats = [compute_objective(inputs, config, total, noise_key=(3, 1)).stats for inputs in made]
        metrics.append(finalize_metrics(MetricStats.merge(stats)))
    for other in metrics[1:]:
        assert other == rounded(metrics[0], dtype=torch.float32)  # of a token; sums are in float64


def _chunks(items, size):
    return [items[i : i + size] for i in range(0, len(items), size)]


def test_variance_refuses_row_numbers_as_identities_of_a_microbatch():
    inputs, _ = padded(random_batch(1))
    inputs = replace(inputs, sequence_ids=None)
    config = ObjectiveConfig.model_validate({"variance": {"sigma": 0.2}})
    assert np.isfinite(compute_objective(inputs, config).loss.item())
    with pytest.raises(InputError, match="sequence_ids"):
        compute_objective(inputs, config, compute_denominators(inputs))


@pytest.mark.parametrize(("with_inference", "dual_clip"), list(itertools.product([False, True], [None, 3.0])))
def test_an_empty_microbatch_adds_nothing(with_inference, dual_clip):
    """A data-parallel rank may hold no sequence in a microbatch."""
    config = ObjectiveConfig.model_validate({"policy_term": {"name": "ppo_clip", "dual_clip": dual_clip}})
    inputs, _ = padded(random_batch(2))
    if not with_inference:
        inputs = replace(inputs, inference_logprobs=None)
    empty = {k: v[:0] if isinstance(v, torch.Tensor) else v for k, v in vars(inputs).items()}
    counts = compute_denominators(inputs, config)
    full = compute_objective(inputs, config, counts)
    nothing = compute_objective(type(inputs)(**empty), config, counts)
    assert nothing.loss.item() == 0.0
    assert finalize_metrics(MetricStats.merge([full.stats, nothing.stats])) == full.metrics


@pytest.mark.parametrize("detail", [False, True])
def test_a_mean_over_no_tokens_is_absent(detail):
    """All responses masked (`reward.mask_truncated`): an alarm on the entropy must not read 0."""
    corrections = [{"mode": "tis", "level": "token", "cap": 2.0}]
    config = ObjectiveConfig.model_validate({"correction": corrections, "mismatch_detail": detail})
    inputs, _ = padded(random_batch(2))
    entropy = torch.ones_like(inputs.current_logprobs)
    some = compute_objective(replace(inputs, entropy=entropy), config)
    masked = replace(inputs, entropy=entropy, loss_mask=torch.zeros_like(inputs.loss_mask))
    result = compute_objective(masked, config)
    assert some.metrics["actor/entropy"] == 1.0
    counts = {name: 0.0 for name in some.metrics if name.startswith("mismatch/rho_count/")}
    assert counts
    assert result.metrics == {"actor/pg_loss": 0.0, **counts}
    both = MetricStats.merge([some.stats, result.stats])
    assert finalize_metrics(both) == some.metrics


def collected(values: torch.Tensor, mask: torch.Tensor) -> MetricStats:
    collector = Collector()
    kept = values * mask
    collector.add("halves", kept, scale=0.5)
    collector.add("count", mask)
    collector.add_moments("x", kept)
    collector.add_product("x·m", kept, mask.to(values.dtype))
    collector.add_vector("row", kept.sum(dim=1)[:2])
    collector.range_of("x", values, mask, smallest=True)
    return collector.stats()


def test_statistics_by_hand():
    stats = collected(torch.tensor([[1.0, 2.0], [-4.0, 8.0]]), torch.tensor([[True, True], [True, False]]))
    sums = dict(zip(stats.sum_names, stats.sums.tolist(), strict=True))
    assert sums == {"halves": -0.5, "count": 3, "x": -1, "x²": 21, "x·m": -1, "row[0]": 3, "row[1]": -4}
    assert (stats.max_names, stats.maxs.tolist()) == (("x",), [2.0])
    assert (stats.min_names, stats.mins.tolist()) == (("x",), [-4.0])


def test_sums_of_float32_are_taken_in_float64():
    values = torch.tensor([1e8, 1.0, -1e8], dtype=torch.float32)
    collector = Collector()
    collector.add("sum", values)
    collector.add_product("product", values, torch.ones(3))
    assert collector.stats().sums.tolist() == [1.0, 1.0]
    assert collector.stats().sums.dtype == torch.float64


def test_parts_together_are_the_whole():
    values, mask = torch.arange(8.0).reshape(4, 2) - 3, torch.tensor([[1, 1], [0, 0], [1, 0], [1, 1]]).bool()
    names = ("halves", "count", "x", "x²", "x·m")
    whole, parts = collected(values, mask), [collected(values[:2], mask[:2]), collected(values[2:], mask[2:])]
    merged = MetricStats.merge(parts)
    assert merged.sum_names == whole.sum_names
    for name in names:  # integers and halves: exact in any order
        place = whole.sum_names.index(name)
        assert merged.sums[place] == whole.sums[place]
    assert (merged.maxs.tolist(), merged.mins.tolist()) == (whole.maxs.tolist(), whole.mins.tolist()) == ([4.0], [-3.0])


def test_statistics_of_different_configurations_are_not_merged():
    one, other = Collector(), Collector()
    one.add("a", torch.ones(1))
    other.add("b", torch.ones(1))
    with pytest.raises(AssertionError, match="different configurations"):
        MetricStats.merge([one.stats(), other.stats()])


@pytest.mark.parametrize("size", [0, 2])
def test_nothing_under_the_mask_has_no_range(size):
    collector = Collector()
    collector.add("a", torch.ones(1))
    collector.range_of("x", torch.ones(size), torch.zeros(size, dtype=torch.bool), smallest=True)
    assert (collector.stats().maxs.tolist(), collector.stats().mins.tolist()) == ([-math.inf], [math.inf])
