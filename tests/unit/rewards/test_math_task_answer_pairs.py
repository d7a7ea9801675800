"""The two error rates of `math_reward` on pairs that were written for it, apart: `python -m tools.score_answers`."""

from __future__ import annotations

import pytest

from megatron_rl.rewards.algebra import NumericAlgebra
from megatron_rl.rewards.compare import same
from megatron_rl.rewards.math_task import final_answer, gold_answer, math_verdict
from tools.score_answers import MAX_FALSE_NEGATIVES, MAX_FALSE_POSITIVES, PAIRS, print_table, rates, read_pairs


@pytest.fixture(scope="module")
def pairs():
    return read_pairs(PAIRS)


def whole_verdict(response: str, gold: str) -> bool:
    """What `math_reward` finds, with the worker's algebra in this process."""
    answer = final_answer(response)
    return answer is not None and same(answer, gold_answer(gold), NumericAlgebra())


def test_false_positives_and_false_negatives_stay_within_their_bounds(pairs):
    false_positives, wrong, false_negatives, right = rates(
        pairs, [whole_verdict(p["response"], p["gold"]) for p in pairs]
    )
    assert wrong + right >= 1000
    assert false_positives <= MAX_FALSE_POSITIVES * wrong
    assert false_negatives <= MAX_FALSE_NEGATIVES * right


FAMILIES = read_pairs(PAIRS.with_name("answer_families.jsonl"))
NOT_READ = {  # gold answers whose response here is equal and refused: see docs/own-data-and-reward.md
    r"2^4\cdot3^2": "`2^43^2` is 2 to the 43rd",
    "4:10": "may be a time",
    r"\text{isosceles}": "words in another form",
}


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in FAMILIES}))
def test_families_of_answers(kind):
    pairs = [pair for pair in FAMILIES if pair["kind"] == kind and pair["gold"] not in NOT_READ]
    wrong = [pair for pair in pairs if whole_verdict(pair["response"], pair["gold"]) != bool(pair["right"])]
    assert not wrong


def test_the_pairs_have_right_and_wrong_answers_of_every_kind_and_style(pairs):
    assert {pair["style"] for pair in pairs} == {"MATH", "AIME", "Olympiad", "minerva"}
    kinds = {pair["kind"] for pair in pairs}
    assert len(kinds) > 20
    assert all({pair["right"] for pair in pairs if pair["kind"] == kind} == {0, 1} for kind in kinds)


def test_the_trainers_process_decides_alone_what_fractions_decide(pairs):
    for pair in pairs[::7]:
        verdict = math_verdict(pair["response"], pair["gold"])
        assert isinstance(verdict, dict) or bool(verdict) == whole_verdict(pair["response"], pair["gold"])


def test_rates_are_counted_apart_and_by_kind(capsys):
    pairs = [{"right": right, "kind": kind} for right, kind in ((1, "a"), (1, "b"), (0, "a"), (0, "a"))]
    assert rates(pairs, [True, False, True, False]) == (1, 2, 1, 2)
    print_table(pairs, {"ours": [True, False, True, False]})
    assert capsys.readouterr().out.splitlines()[-3].split() == ["a", "1/2", "50.0%", "0/1", "0.0%"]


def test_a_line_that_is_no_pair_is_refused(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"gold": "1", "response": "1"}\n')
    with pytest.raises(ValueError, match="line 1: a pair needs gold, response and right"):
        read_pairs(tmp_path / "pairs.jsonl")
