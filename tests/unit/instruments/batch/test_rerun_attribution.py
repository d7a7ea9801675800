"""Shares of the mismatch that do not depend on the order in which causes are taken away."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain, combinations
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.batch import rerun
from megatron_rl.instruments.batch.rerun import CAUSES, Attribution, _every_set, left_over, shapley
from megatron_rl.run.recorded_batches import RecordedBatch
from tests.support.rounding import rounded
from tests.support.routes import random_routes, with_routes
from tests.support.tiny import MODEL, stored_rollouts, tiny_recipe


def subsets(causes):
    return map(frozenset, chain.from_iterable(combinations(causes, n) for n in range(len(causes) + 1)))


def test_causes_that_add_up_get_what_they_add():
    own = {"a": 4.0, "b": 2.0, "c": 1.0}
    left = {taken: 10.0 - sum(own[cause] for cause in taken) for taken in subsets(own)}
    assert shapley(left, own) == rounded(own)


def test_an_interaction_is_shared_equally():
    """Two causes that cancel each other: alone each takes away nothing, together everything."""
    left = {taken: 0.0 if len(taken) == 2 else 6.0 for taken in subsets("ab")}
    assert shapley(left, "ab") == {"a": 3.0, "b": 3.0}


def test_three_causes_by_hand():
    """v(S) is what S takes away: 1 and 2 for a and b alone, 5 for both; c takes away nothing with any of them."""
    gain = {frozenset(): 0.0, frozenset("a"): 1.0, frozenset("b"): 2.0, frozenset("ab"): 5.0}
    left = {taken: 9.0 - gain[taken - {"c"}] for taken in subsets("abc")}
    shares = shapley(left, "abc")
    assert shares == rounded({"a": 2.0, "b": 3.0, "c": 0.0})
    assert sum(shares.values()) == left[frozenset()] - left[frozenset("abc")]


def test_sets_that_need_no_measurement_are_filled_in():
    """fp32 throughout: only routing can be taken away, and it gets all of the difference."""
    measured = _every_set({frozenset(): 5.0, frozenset({"routing"}): 1.0})
    assert set(measured) == set(subsets(CAUSES))
    assert shapley(measured, CAUSES) == {"routing": 4.0, "LM head": 0.0, "body": 0.0}


def test_a_body_in_fp32_has_its_head_in_fp32():
    run = {frozenset(): 8.0, frozenset({"LM head"}): 6.0, frozenset({"LM head", "body"}): 1.0}
    measured = _every_set(run | {taken | {"routing"}: value - 1.0 for taken, value in run.items()})
    assert measured[frozenset({"body"})] == 1.0
    assert measured[frozenset({"body", "routing"})] == 0.0
    shares = shapley(measured, CAUSES)
    assert shares == rounded({"routing": 1.0, "LM head": 1.0, "body": 6.0})


@pytest.mark.parametrize(
    ("sections", "types"),
    [
        ({"rollout": {"dtype": "bf16"}, "learner": {"dtype": "bf16"}}, "(bf16)"),
        ({"rollout": {"quantization": {"weights": "int4"}}}, "(int4 weights, fp32 elsewhere)"),
        (
            {"rollout": {"quantization": {"weights": "fp8", "kv_cache": "fp8"}}},
            "(fp8 weights, fp8 keys and values, fp32 elsewhere)",
        ),
        ({"rollout": {"engine": "exact"}, "exact": {"noise_std": 0.1}}, "(fp32), a dose of the kind logits"),
    ],
)
def test_the_remainder_is_named_by_the_engines_types(sections, types):
    assert left_over(tiny_recipe(**sections)) == f"left over: the engine's rounding {types}"


class Scorer:
    """A learner whose log-probs differ from the engine's by what its recipe and the routing stand for."""

    modes: ClassVar[list[str]] = []
    architecture = SimpleNamespace(is_moe=True)

    def __init__(self, recipe) -> None:
        self.gap = 0.1 if recipe.learner.dtype == "fp32" else 0.2 if recipe.precision.fp32_head else 0.3
        self.close = lambda: None

    def compute_logprobs(self, batch, mode):
        self.modes.append(mode)
        gap = self.gap + (0.1 if mode == "native" else 0.0)
        return [s.inference_logprobs + gap * np.sign(np.arange(s.length) % 2 - 0.5) for s in batch.sequences]


def attributed(monkeypatch, routed: bool, **sections) -> Attribution:
    monkeypatch.setattr(Scorer, "modes", [])
    monkeypatch.setattr(rerun, "Learner", Scorer)
    monkeypatch.setattr(rerun, "learner_at", lambda d, original, changed, *_: nullcontext((Scorer(changed), "")))
    monkeypatch.setattr(rerun, "exported", lambda learner: nullcontext(MODEL))
    batch = stored_rollouts(0, num_sequences=4)
    for s in batch.sequences:
        s.inference_logprobs -= 1.0
        s.sampled, s.num_sampled = None, s.length
    sections = {"learner": {}, "rollout": {}} | sections
    half = {name: {"dtype": "bf16", **keys} for name, keys in sections.items()}
    recipe = tiny_recipe(**half, routing={"telemetry": routed})
    for s, stored in zip(batch.sequences, Scorer(recipe).compute_logprobs(batch, "native"), strict=True):
        s.current_logprobs = stored
    if routed:
        with_routes(batch, random_routes(batch))
    monkeypatch.setattr(Scorer, "modes", [])
    return rerun.attribute(None, recipe, RecordedBatch(batch, 0), "exact")


def test_a_batch_without_routes_has_routing_in_its_remainder(monkeypatch):
    whole, without_routes = attributed(monkeypatch, routed=True), attributed(monkeypatch, routed=False)
    assert [part.cause for part in whole.parts] == ["staleness", *CAUSES, "remainder"]
    assert [part.cause for part in without_routes.parts] == ["staleness", "LM head", "body", "remainder"]
    assert Scorer.modes == ["native"] * 3
    assert without_routes.total == rounded(whole.total)
    assert set(without_routes.measured) == set(subsets(CAUSES[1:]))
    assert {taken: whole.measured[taken] for taken in without_routes.measured} == without_routes.measured
    assert (
        without_routes.parts[-1].variance == whole.measured[frozenset({"LM head", "body"})] > whole.parts[-1].variance
    )
    assert "routing (the batch has no routes" in without_routes.parts[-1].what
    assert "routing" not in whole.parts[-1].what


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"engine": "exact"}},
        {"learner": {"quantization": "as_rollout"}, "rollout": {"quantization": {"weights": "int8"}}},
    ],
)
def test_a_recipe_that_wants_both_engines_in_one_type_is_split_too(monkeypatch, sections):
    alike, free = (attributed(monkeypatch, False, **values) for values in (sections, {}))
    assert alike.measured == free.measured


def test_a_batch_without_log_probs_of_the_learner_is_refused():
    batch = stored_rollouts(5, num_sequences=2)
    with pytest.raises(InputError, match="step 5: the batch has no current_logprobs"):
        rerun.attribute(None, tiny_recipe(), RecordedBatch(batch, 0), "exact")
