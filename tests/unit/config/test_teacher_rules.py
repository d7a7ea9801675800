"""The section `teacher`: what goes together, and why the rest does not."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from megatron_rl.config.model_rules import model_problems
from megatron_rl.config.monitor import mismatch_has_updates
from megatron_rl.config.teacher_rules import teacher_memory_problems
from megatron_rl.model.architecture import read_architecture
from tests.support.tiny import MODEL, tiny_recipe

SERVED = {"engine": "vllm_server", "path": str(MODEL), "addresses": ["http://10.0.0.5:8000"]}
ALONE = {"advantage": "none"}


@pytest.mark.parametrize(
    "sections",
    [
        {"teacher": {}},
        {"teacher": SERVED},
        {"teacher": {"engine": "learner"}, "rollout": {"temperature": 0.7}},
        {"teacher": {"engine": "learner"}, "rollout": {"top_k": 8, "top_p": 0.9, "kept_sets": True}},
        {"teacher": SERVED, "rollout": {"engine": "exact"}},
        {"teacher": {"engine": "learner"}, "rollout": {"engine": "exact"}},
        {"teacher": SERVED, "rollout": {"tensor_parallel": 2}},
        {"teacher": {}, "rollout": {"engine": "vllm_server", "tensor_parallel": 2}},
        {"teacher": {"weight": 0.0}, "batch": {"filter_groups": True}},
        {"teacher": {"discount": 1.0, "student": "rollout"}, "objective": ALONE, "rollout": {"num_samples": 1}},
        {"teacher": {"top_k": 16}},
        {"teacher": {"top_k": 16, "forward": 0.5, **SERVED}, "objective": {"correction": ["m2po"]}},
        {"teacher": {"top_k": 64, "forward": 1.0, "normalized": False, "engine": "learner"}},
        {"teacher": {"top_k": 8, "tokens": "student", "engine": "learner"}, "rollout": {"sampled_head": 8}},
        {
            "teacher": {"top_k": 8, "tokens": "student", "engine": "learner"},
            "rollout": {"top_k": 8, "top_p": 0.9, "kept_sets": True, "sampled_head": 8},
        },
        {"teacher": {"by_source": [{"data_sources": ["a", "b"], **SERVED}, {"data_sources": ["c"]}]}},
    ],
)
def test_what_goes_together(sections):
    assert tiny_recipe(**sections).teacher is not None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": ALONE}, "objective.advantage: none without a teacher that has a weight"),
        ({"objective": ALONE, "teacher": {"weight": 0.0}}, "every advantage would be 0; set teacher"),
        ({"teacher": {"engine": "vllm_server", "path": "m"}}, r"addresses: \[\] with engine: vllm_server"),
        ({"teacher": {"addresses": ["http://a:1"]}}, "with engine: vllm; vllm_server alone has addresses"),
        ({"teacher": {**SERVED, "addresses": ["10.0.0.5:8000"]}}, "found '10.0.0.5:8000'; write http://host:port"),
        ({"teacher": {**SERVED, "path": None}}, "path: null with engine: vllm_server, whose vocabulary is compared"),
        ({"teacher": {"weight": -1.0}}, "greater than or equal to 0"),
        ({"teacher": {"discount": 1.5}}, "less than or equal to 1"),
        ({"teacher": {"by_source": [{"data_sources": []}]}}, "at least 1 item"),
        (
            {"teacher": {"by_source": [{"data_sources": ["a"]}, {"data_sources": ["b", "a"]}]}},
            "a named twice",
        ),
        ({"teacher": {"engine": "learner", "by_source": [{"data_sources": ["a"]}]}}, "holds one second model"),
        ({"teacher": {"by_source": [{"data_sources": ["a"], "engine": "learner"}]}}, "holds one second model"),
        ({"teacher": {}, "rollout": {"temperature": 0.7}}, "rollout.temperature: 0.7 with teacher.engine: vllm, which"),
        (
            {"teacher": SERVED, "rollout": {"temperature": 0.7}},
            "engine: vllm_server, which scores at temp",
        ),
        (
            {"teacher": {"engine": "learner", "by_source": []}, "rollout": {"top_p": 0.9}},
            "top_p: 0.9, top_k: 0 with teacher.engine: learner: the student's",
        ),
        ({"teacher": SERVED, "rollout": {"top_k": 8, "kept_sets": True}}, "top_k: 8 with teacher.engine: vllm_server"),
        ({"teacher": {}, "rollout": {"engine": "exact"}}, "with rollout.engine exact, whose process has no vLLM"),
        ({"teacher": {}, "rollout": {"tensor_parallel": 2}}, "with rollout.tensor_parallel 2"),
        ({"teacher": {}, "rollout": {"dtype": "tf32"}, "runtime": {"device": "cuda"}}, "with dtype tf32"),
        (
            {"teacher": {"by_source": [{"data_sources": ["a"], **SERVED}]}, "rollout": {"temperature": 0.7}},
            "teacher.by_source.0.engine: vllm_server",
        ),
        ({"teacher": {}, "batch": {"filter_groups": True}}, "batch.filter_groups: true with teacher.weight 1: groups"),
        ({"teacher": {}, "objective": {"advantage": "min_variance"}}, "advantage: min_variance with teacher.weight 1"),
        ({"teacher": {}, "objective": {"correction": ["opsm"]}, "batch": {"minibatches": 2}}, "correction: opsm with"),
        ({"teacher": {}, "objective": {"correction": ["m2po"]}}, "correction: m2po with teacher.weight 1: it chooses"),
        (
            {"teacher": {}, "objective": {"correction": [{"mode": "f.py:keep", "renormalize": True}]}},
            "a function with renormalize with teacher.weight 1",
        ),
        (
            {"teacher": {}, "reference": {}, "objective": {**ALONE, "kl_in_reward": {}}},
            "objective.kl_in_reward: set with objective.advantage: none",
        ),
        ({"teacher": {"top_k": 1}}, "top_k: 1; a set has 2 to 1024 tokens"),
        ({"teacher": {"top_k": 2048}}, "top_k: 2048; a set has 2 to 1024 tokens"),
        ({"teacher": {"forward": 0.5}}, "forward: 0.5 without top_k"),
        ({"teacher": {"normalized": False}}, "normalized: False without top_k"),
        ({"teacher": {"top_k": 4, "student": "rollout"}}, "student: rollout, discount: 0 with top_k: 4, whose student"),
        ({"teacher": {"top_k": 4, "discount": 0.5}}, "student: current, discount: 0.5 with top_k: 4"),
        ({"teacher": {"top_k": 4, "normalized": False}}, "normalized: false with forward: 0"),
        (
            {"teacher": {"top_k": 4, "tokens": "student"}},
            "tokens: student with top_k: 4 and engine: vllm: vLLM returns",
        ),
        (
            {"teacher": {"top_k": 4, "tokens": "student", "engine": "learner"}},
            "rollout.sampled_head: 0 with teacher.tokens: student and top_k: 4",
        ),
        ({"teacher": {"top_k": 4}, "rollout": {"sampled_head": 4}}, "nothing reads the head"),
        (
            {"teacher": {"top_k": 4}, "batch": {"filter_groups": True}},
            "batch.filter_groups: true with teacher.weight 1",
        ),
        (
            {"teacher": {}, "acceptance": {"tolerance": 0.1}, "data": {"validation": "v.jsonl"}},
            "acceptance: set with teacher.weight 1: it judges updates by rewards alone",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
def test_what_does_not_go_together_is_named(sections, message):
    with pytest.raises(ValidationError) as caught:
        tiny_recipe(**sections)
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize(
    ("student", "minibatches", "makes_pass"),
    [("recompute", 1, False), ("recompute", 2, True), ("rollout", 2, False), ("current", 2, False)],
)
def test_po_is_computed_where_the_teacher_is_compared_with_it(student, minibatches, makes_pass):
    """Of an objective that goes without po."""
    assert not tiny_recipe(
        teacher={"top_k": 8}, objective={"policy_term": "reinforce"}, batch={"minibatches": minibatches}
    ).makes_old_logprobs
    recipe = tiny_recipe(
        teacher={"student": student}, objective={"policy_term": "reinforce"}, batch={"minibatches": minibatches}
    )
    assert recipe.makes_old_logprobs == makes_pass
    assert mismatch_has_updates(recipe.model_dump(mode="json")) == (minibatches > 1 and not makes_pass)


@pytest.mark.parametrize(
    ("teacher", "rollout", "engines"),
    [
        (None, {"gpu_memory_utilization": 1.0}, 0),
        (SERVED, {"gpu_memory_utilization": 1.0}, 0),
        ({"engine": "learner"}, {}, 0),
        ({}, {"gpu_memory_utilization": 0.45}, 0),
        ({}, {"kv_cache_gib": 4.0}, 0),
        ({}, {}, 2),
        ({}, {"engine": "vllm_server"}, 0),
        ({}, {"engine": "vllm_server", "gpu_memory_utilization": 1.0}, 1),
        ({"by_source": [{"data_sources": ["a"]}]}, {"gpu_memory_utilization": 0.4}, 3),
        ({"by_source": [{"data_sources": ["a"], **SERVED}]}, {"gpu_memory_utilization": 0.4}, 0),
    ],
)
def test_engines_leave_a_part_of_the_gpu_to_the_learner(teacher, rollout, engines):
    problems = teacher_memory_problems(tiny_recipe(teacher=teacher, rollout=rollout))
    assert len(problems) == (engines > 0)
    assert all(f"for each of {engines} engines on a GPU" in problem for problem in problems)


@pytest.mark.parametrize(("device", "is_refused"), [("cuda", True), ("cpu", False), (None, False)])
def test_shares_are_of_a_gpu(device, is_refused):
    recipe = tiny_recipe(teacher={})
    problems = model_problems(recipe, read_architecture(recipe.model.path), 1, device)
    assert any("for each of 2 engines" in problem for problem in problems) == is_refused
