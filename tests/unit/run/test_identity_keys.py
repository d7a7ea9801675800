"""Which changes of a recipe a run may make, and which make another run of it."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from megatron_rl.run.identity import MAY_CHANGE, differences, recipe_changes
from tests.support.tiny import tiny_recipe

DECAYS = {"name": "a", "metric": "m", "above": 1.0, "then": ["decay_lr"]}
WARNS = {"name": "b", "metric": "m", "above": 1.0}


def values(**sections):
    return tiny_recipe(**sections).model_dump(mode="json")


def changed(old: dict, new: dict) -> tuple[list[str], list[str]]:
    allowed, refused = recipe_changes(values(**old), values(**new))
    return [str(change) for change in allowed], [str(change) for change in refused]


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"num_steps": 12}, "num_steps: 10 → 12"),
        ({"learner": {"parallel": {"tensor": 2}}}, "learner.parallel.tensor: 1 → 2"),
        ({"rollout": {"kv_cache_gib": 2.0}}, "rollout.kv_cache_gib: null → 2.0"),
        ({"rollout": {"servers": {"wait_s": 5.0}}}, "rollout.servers.wait_s: 900.0 → 5.0"),
        ({"monitor": {"plots": False}}, "monitor.plots: True → False"),
        ({"checkpoint": {"every": 5}}, "checkpoint.every: 0 → 5"),
        ({"recorder": {"evidence": {"batches": 3}}}, "recorder.evidence.batches: 12 → 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_run_may_change(section, line):
    assert changed({}, section) == ([line], [])


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"seed": 1}, "seed: 0 → 1"),
        ({"batch": {"prompts": 4}}, "batch.prompts: 8 → 4"),
        (
            {"objective": {"aggregation": "seq-mean-token-mean"}},
            "objective.aggregation: token-mean → seq-mean-token-mean",
        ),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature: 1.0 → 0.5"),
        ({"validation": {"temperature": 0.5}}, "validation.temperature: 1.0 → 0.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_another_run(section, line):
    assert changed({}, section) == ([], [line])


def test_a_schedule_that_ends_with_the_run_ties_its_length():
    cosine = {"schedule": {"style": "cosine"}}
    allowed, refused = changed(cosine, {**cosine, "num_steps": 12})
    assert allowed == []
    assert refused == [
        "num_steps: 10 → 12 (schedule.style cosine ends at the last step, as schedule.decay_steps is null)"
    ]
    fixed = {"schedule": {"style": "cosine", "decay_steps": 8}}
    assert changed(fixed, {**fixed, "num_steps": 12}) == (["num_steps: 10 → 12"], [])


def test_alarms_may_change_unless_they_set_the_learning_rate():
    allowed, refused = changed({}, {"monitor": {"alarms": [WARNS]}})
    assert (len(allowed), refused) == (1, [])
    allowed, refused = changed({"monitor": {"alarms": [DECAYS]}}, {"monitor": {"alarms": [DECAYS, WARNS]}})
    assert (len(allowed), refused) == (1, [])
    allowed, refused = changed({}, {"monitor": {"alarms": [DECAYS]}})
    assert allowed == []
    assert refused[0].endswith("(alarms with decay_lr or rollback set the learning rate)")


def test_a_reference_may_move_but_not_begin():
    allowed, refused = changed({"reference": {}}, {"reference": {"path": "/elsewhere"}})
    assert (allowed, refused) == (["reference.path: null → /elsewhere"], [])
    assert changed({}, {"reference": {}})[0] == ["reference.path: absent → null"]
    assert changed({}, {"reference": {}})[1] == ["reference: null → absent"]


def test_the_servers_of_a_teacher_may_move():
    there, elsewhere = (
        {"teacher": {"engine": "vllm_server", "path": "/m", "addresses": [f"http://{host}:1"]}} for host in "ab"
    )
    assert changed(there, elsewhere) == (["teacher.addresses: ['http://a:1'] → ['http://b:1']"], [])
    assert changed(there, {"teacher": there["teacher"] | {"path": "/n"}}) == ([], ["teacher.path: /m → /n"])


def test_servers_of_teachers_of_data_sources_may_move_but_not_teach_others():
    def served(*hosts, sources=("x", "y")):
        each = [{"engine": "vllm_server", "path": "/m", "addresses": [f"http://{host}:1"]} for host in hosts]
        return {"teacher": {"by_source": [{**one, "data_sources": [x]} for one, x in zip(each, sources)]}}

    allowed, refused = changed(served("a", "b"), served("a", "c"))
    assert (allowed, refused) == (["teacher.by_source.1.addresses: ['http://b:1'] → ['http://c:1']"], [])
    allowed, refused = changed(served("a", "b"), served("c", "b", sources=("z", "y")))
    assert refused == ["teacher.by_source.0.data_sources: ['x'] → ['z']"]
    assert allowed == ["teacher.by_source.0.addresses: ['http://a:1'] → ['http://c:1']"]
    assert [len(part) for part in changed(served("a", "b"), served("a"))] == [0, 1]


def test_a_list_is_compared_key_by_key_where_it_has_as_many_sections():
    old = {"a": [{"b": 1, "c": [{"d": 1}]}, {"b": 2}], "e": [1, 2], "f": [{"b": 1}], "g": [{}], "h": None}
    new = {"a": [{"b": 1, "c": [{"d": 2}]}, {"b": 3}], "e": [1, 3], "f": [], "g": None, "h": [{"b": 1}]}
    assert [str(change) for change in differences(old, new)] == [
        "a.0.c.0.d: 1 → 2",
        "a.1.b: 2 → 3",
        "e: [1, 2] → [1, 3]",
        "f: [{'b': 1}] → []",
        "g: [{}] → null",
        "h: null → [{'b': 1}]",
    ]


def test_a_rule_that_sets_the_rate_is_another_schedule_in_each_of_its_keys():
    allowed, refused = changed({"monitor": {"alarms": [DECAYS]}}, {"monitor": {"alarms": [DECAYS | {"above": 2.0}]}})
    assert (allowed, len(refused)) == ([], 1)
    assert refused[0].startswith("monitor.alarms.0.above: 1.0 → 2.0 (alarms with")
    allowed, refused = changed({"monitor": {"alarms": [WARNS]}}, {"monitor": {"alarms": [WARNS | {"above": 2.0}]}})
    assert (allowed, refused) == (["monitor.alarms.0.above: 1.0 → 2.0"], [])


def test_data_may_be_elsewhere():
    there = {"data": {"train": [{"path": "/a.jsonl"}], "prompt": {"max_length": 16}}}
    elsewhere = {"data": {"train": [{"path": "/b.jsonl"}], "prompt": {"max_length": 16}}}
    assert changed(there, elsewhere) == (["data.train.0.path: /a.jsonl → /b.jsonl"], [])


def test_every_key_that_may_change_exists():
    """A pattern that matches no key would be a promise about nothing."""
    teacher = {"by_source": [{"data_sources": ["a"]}]}
    empty = {"teacher": {"by_source": [{}]}}
    keys = {change.key for change in differences(empty, values(reference={}, scoring="fp32", teacher=teacher))}
    assert [pattern for pattern in MAY_CHANGE if not any(fnmatchcase(key, pattern) for key in keys)] == []


def test_a_key_that_one_recipe_lacks_is_a_difference():
    assert [str(change) for change in differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}})] == ["a.c: 2 → absent"]
