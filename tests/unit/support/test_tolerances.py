"""Every tolerance of the tests is a bound of tests/support/rounding.py or a named statement that is no rounding."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[2]
COMPARISONS = {"approx", "assert_close", "assert_allclose", "allclose", "isclose", "assert_almost_equal"}
TOLERANCES = {"rel", "abs", "rtol", "atol", "rel_tol", "abs_tol"}
SMALL = 2e-3  # a smaller number that something is compared with is a tolerance
ELSEWHERE = ("support/rounding.py", "unit/support/test_tolerances.py")
# Function where a number stands for itself → what it states.
STATEMENTS = {
    "parallel/test_learner_teacher.py::test_the_losses_of_mini_batches_are_averaged": "unequal mini-batches",
    "parallel/test_delta_nets.py::test_a_model_of_two_types_goes_on_in_another_layout": "orders of sums",
    "parallel/test_delta_nets.py::test_sequences_are_cut_over_ranks_by_heads_of_delta_nets": "orders of sums",
    "unit/layers/test_delta_net.py::test_the_convolution_sees_no_other_sequence": "four products against numpy",
    "unit/instruments/parity/test_delta_net.py::test_the_rule_is_that_of_the_paper_and_each_way_is_within_its_bound": (
        "the paper's sums in double"
    ),
    "unit/tools/test_rope_study.py::test_the_others_round_once": "a kernel's own fp32 sums",
    "parallel/test_learner_noise.py::test_update_size_is_what_the_weights_did": "the bound itself is small",
    "parallel/test_transformer_engine_layouts.py::error": "the bound is below what is asked for",
    "parallel/test_families.py::test_biases_that_are_to_move_follow_the_load": "signs of fp32 sums",
    "parallel/test_memory.py::test_one_rank": "what the planner promises: 15%",
    "parallel/test_memory.py::test_every_rank_of_a_layout": "what the planner promises: 15%",
    "unit/doctor/test_rates.py::test_products_are_those_of_a_layer_on_one_rank": "norms and routers are left out: 0.5%",
    "unit/tools/test_published.py::test_a_fit_finds_the_law_again": "least squares of four points that the law made",
    "unit/monitor/test_alarms.py::test_t_quantiles": "what t_quantile_975 allows its series",
    "unit/monitor/test_alarms.py::test_slope_and_interval_of_a_worked_example": "the same series",
    "unit/instruments/lab/test_report.py::test_primaries_are_decided_together": "what made-up seeds differ by",
    "unit/instruments/lab/test_results_statistics.py::test_equal_differences_and_few_seeds_decide_nothing": "a small p",
    "unit/instruments/parity/test_witnesses_first_layers.py::test_memory_at_30_billion_parameters": "three digits",
    "unit/instruments/parity/test_witnesses_first_layers.py::test_a_model_too_large_is_refused": "digits",
    "unit/instruments/why/test_causes.py::test_what_was_there_before_stands_behind_what_departs_at_once": "a size",
    "unit/instruments/plan/test_generation_exact.py::test_a_step_of_128_sequences_by_hand": "norms are left out",
    "unit/instruments/plan/test_head.py::test_the_peak_in_the_output_layer_is_the_one_that_is_planned": "is left out",
    "unit/schedule/test_schedule.py::test_schedule_is_what_its_name_says": "what the documentation says",
}


def constants(tree: ast.Module) -> dict[str, float]:
    """Numbers that have a name at the top of a module."""
    return {
        target.id: float(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and type(node.value.value) in (int, float)
    }


def value_of(node: ast.expr, names: dict[str, float]) -> float | None:
    """The number that a node is, if it is one: written out, by a name of the module, or a product of such."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.Name(id=name):
            return 1.0 if name == "TOLERANCE" else names.get(name)  # imported: tools.dev.measure_memory's promise
        case ast.BinOp(left=left, op=ast.Mult() | ast.Pow(), right=right):
            parts = [value_of(part, names) for part in (left, right)]
            if None not in parts:
                return parts[0] * parts[1] if isinstance(node.op, ast.Mult) else parts[0] ** parts[1]
    return None


def bare(node: ast.AST, names: dict[str, float]) -> bool:
    """Whether a comparison has a tolerance that no bound gave."""
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called not in COMPARISONS:
            return False
        values = [value_of(keyword.value, names) for keyword in node.keywords if keyword.arg in TOLERANCES]
        return not values or any(value for value in values)
    if isinstance(node, ast.Compare):
        pairs = zip(node.ops, node.comparators, strict=True)
        limits = [value_of(right, names) for op, right in pairs if isinstance(op, ast.Lt | ast.LtE)]
        return any(limit is not None and 0 < limit <= SMALL for limit in limits)
    return False


def found_in(source: str, path: str) -> set[str]:
    """``path::function`` of every bare tolerance."""
    tree = ast.parse(source)
    names = constants(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {f"{path}::{f.name}" for f in functions for node in ast.walk(f) if bare(node, names)}


def test_every_tolerance_is_a_bound_or_a_statement():
    tolerances: set[str] = set()
    for path in sorted(TESTS.rglob("*.py")):
        name = str(path.relative_to(TESTS))
        if name not in ELSEWHERE:
            tolerances |= found_in(path.read_text(), name)
    assert sorted(tolerances) == sorted(STATEMENTS)
