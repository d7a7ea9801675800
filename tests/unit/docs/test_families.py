"""docs/families.md lists every family, what config.json says of it, and what its tests are."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence

import pytest

from megatron_rl.config.model_rules import model_problems
from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from
from megatron_rl.model.families import FAMILIES
from tests.support.tiny import REPOSITORY, tiny_recipe

PAGE = (REPOSITORY / "docs" / "families.md").read_text()
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| `\w+` \|", line)
]


def test_each_family_has_its_lines():
    names = [f"`{name}`" for name in FAMILIES]
    assert [line[0] for line in LINES] == names


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0].strip("`"))
def test_a_line_says_what_the_file_says(line):
    name, known, router, shared, biases, norms, turned, *_ = line
    family = FAMILIES[name.strip("`")]
    assert KNOWN_MODELS[known]["model_type"] == family.model_type
    a = architecture_from(KNOWN_MODELS[known])
    assert router == ("none" if not a.is_moe else "sigmoid and bias" if a.sigmoid_router else "softmax")
    assert shared == ("no" if not a.shared_ffn_hidden_size else "with a gate" if a.shared_expert_gate else "yes")
    for cell, value in ((biases, a.qkv_bias), (norms, a.qk_layernorm)):
        wide = a.wide_qk_norm and cell is norms
        assert cell == ("over all heads" if wide else "yes" if value else "no") or cell.strip("`") in family.implemented
    assert turned == ("latent" if a.latent is not None else f"{a.rotary_fraction:g}")


# -- the last columns, and the sentence below the table: made of tests and of rules

MAIN = "qwen3_moe"  # most tests are about it
TESTS = {  # column → the test that is parametrised by family, or by a model's name, and the one of `MAIN`
    "`check`": ("parallel.test_model_folders:test_no_change_of_a_folder_goes_in_unnoticed", None),
    "vLLM": (
        "e2e.test_families:test_engines_agree_in_fp32_before_and_after_an_update",
        "e2e.test_router_replay:test_engines_disagree_in_bf16_and_agree_in_fp32",
    ),
    "R3": ("e2e.test_families:test_every_row_is_replayed_in_bf16", "e2e.test_router_replay:test_every_row_is_replayed"),
    "R2": (
        "parallel.test_families:test_routes_of_the_first_pass_are_replayed_in_the_update",
        "parallel.test_router_replay:test_r2_records_what_one_rank_routes_and_changes_nothing",
    ),
    "TP, EP, PP, export": (
        "parallel.test_families:test_layout_equals_one_rank",
        "parallel.test_learner_layouts:test_layout_equals_one_rank",
    ),
    "conversion": (
        "parallel.test_families:test_a_checkpoint_of_two_ranks_becomes_the_weights_that_were_trained",
        "parallel.test_convert:test_weights_survive_both_conversions_and_a_change_of_layout",
    ),
    "exact": (
        "e2e.test_exact:test_another_family_has_no_mismatch",
        "e2e.test_exact_layouts:test_the_gate_is_zero_in_every_step",
    ),
    "fp32 router, head": (
        "e2e.test_families:test_every_row_is_replayed_in_bf16",
        "e2e.test_precision:test_the_engines_router_is_fp32_after_an_update",
    ),
    "LoRA": (
        "parallel.test_families:test_adapters_of_every_linear_layer_move_as_on_one_rank",
        "parallel.test_learner_lora:test_adapters_of_experts_equal_those_of_one_rank",
    ),
    "rounded rollouts": (
        "e2e.test_quantized_rollouts:test_other_families_are_rounded_alike_at_the_start_and_in_an_update",
        "e2e.test_quantized_rollouts:test_every_stored_weight_is_the_rounded_one",
    ),
    "plan": ("unit.instruments.plan.test_report:test_count_is_that_of_the_table_of_weights", None),
}
REFUSED = {  # column → the part of a recipe that asks for it
    "exact": {"rollout": {"engine": "exact"}},
    "rounded rollouts": {"rollout": {"quantization": {"weights": "int8"}}},
}


OF_EXPERTS = ("R3", "R2", "fp32 router, head")


def function_of(test: str) -> Callable[..., None]:
    """``test`` ("module:function")."""
    module, _, name = test.partition(":")
    return getattr(importlib.import_module(f"tests.{module}"), name)


def families_of(test: str) -> set[str]:
    """The families that ``test`` is parametrised by."""
    marks = function_of(test).pytestmark
    cases = [case for mark in marks if mark.name == "parametrize" for case in mark.args[1]]
    values = {value for case in cases for value in getattr(case, "values", (case,)) if isinstance(value, str)}
    return {KNOWN_MODELS.get(value, {}).get("model_type", value) for value in values}


def cell_of(family: str, column: str) -> str:
    by_family, of_main = TESTS[column]
    architecture = architecture_from({"model_type": family, **next(iter(FAMILIES[family].known.values()))})
    if of_main is not None and family == MAIN:
        function_of(of_main)  # it is there
        return "Y"
    if not architecture.is_moe and column in OF_EXPERTS:
        return "no experts"
    if family in families_of(by_family):
        return "Y"
    asked = REFUSED.get(column)
    said = model_problems(tiny_recipe(**asked), architecture, None) if asked else []
    return "refused" if any(problem.startswith("rollout.") for problem in said) else "not tested"


def test_each_y_is_a_test_and_each_refusal_a_rule():
    lines = {name: [cell_of(name, column) for column in REFUSED] for name in FAMILIES}
    assert {line[0].strip("`"): line[-len(REFUSED) :] for line in LINES} == lines
    head = next(line for line in PAGE.splitlines() if line.startswith("| family |"))
    assert head.endswith(f"| {' | '.join(REFUSED)} |")


def test_all_families_have_the_tests_that_the_page_says_all_have():
    said = re.search(r"Every family has tests of (.*), and each with experts of (.*) \(tests/", " ".join(PAGE.split()))
    by_all = [column for column in TESTS if column not in REFUSED and column not in OF_EXPERTS]
    assert said.groups() == (_listed(by_all), _listed(OF_EXPERTS))
    for name in FAMILIES:
        assert {cell_of(name, column) for column in by_all} == {"Y"}
        assert len({cell_of(name, column) for column in OF_EXPERTS} - {"no experts"} - {"Y"}) == 0


def _listed(columns: Sequence[str]) -> str:
    """``columns`` as a sentence lists them."""
    return f"{', '.join(columns[:-1])} and {columns[-1]}"


# -- a family is one file

EXCEPT = (
    "instruments/parity/",  # reads config.json by itself, so that it does not err as the loop does
    "model/transformers_classes.py",  # what one family's file lacks
)
PACKAGE = REPOSITORY / "megatron_rl"


def test_no_family_is_named_outside_of_the_families_files():
    names = "|".join(FAMILIES)
    written = re.compile(rf"[\"'](?:{names})[\"']")
    places = [
        f"{file.relative_to(PACKAGE)}:{number}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if file.parent.name != "families" and not str(file.relative_to(PACKAGE)).startswith(EXCEPT)
        if written.search(line)
    ]
    assert places == []
