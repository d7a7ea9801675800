"""`math_reward`: what counts as the same answer, what does not, and what a hostile response may cost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_rl.rewards import math_reward
from megatron_rl.rewards.math_task import MAX_ANSWER_CHARS, final_answer

SHARED_DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
SAME = [
    # numbers
    ("0.5", r"\frac{1}{2}"), ("1/2", r"\frac12"), (r"\frac{2}{4}", r"\dfrac 1 2"), ("025", "25"), ("142", "142.0"),
    ("32,348", r"\$32,\!348"), ("58500", "58,500"), (r"\frac{275}{2}", r"137 \frac{1}{2}"), ("1.8", r"1\frac{4}{5}"),
    (r"\frac{1}{-2}", r"-\frac{1}{2}"), (r"\frac{1}{29322216}", r"\dfrac{1}{29,\!322,\!216}"), ("2^{10}", "1024"),
    ("50\\%", "50"), ("0.1", r"10\%"), ("0.333333", r"\frac13"), ("3.14159265", r"\pi"), ("204_{5}", "204_5"),
    (r"6.02\times10^{23}", r"6.02 \times 10^{23}"), ("x = 5", "5"), ("5", "x=5"), ("m+n = 142", "142"),
    # decimals against what they equal exactly, however few digits they have
    (r"\sqrt{4}", "2.0"), (r"1+\frac12", "1.5"), ("2^{-1}", "0.5"), ("0.5x", r"\frac{1}{2}x"),
    ("y=0.5x+3", r"y=\frac12x+3"), ("2^{0.5}", r"\sqrt{2}"), (r"\frac{0.5}{x}", r"\frac{1}{2x}"), ("x=0.5", "x=2^{-1}"),
    (r"2\cdot0.5x", "x"), (r"2.5^2", r"6\frac14"),
    # units
    ("15", r"15\mbox{ cm}^2"), ("15 cm^2", r"15\mbox{ cm}^2"), ("30", r"30^\circ"), (r"30\text{ degrees}", r"30^\circ"),
    ("7 hours", r"7\text{ hours}."), ("18.90", r"\$18.90"),
    # expressions
    (r"\sqrt{8}", r"2\sqrt2"), (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"), ("ab+2a+5b+10", "(a+5)(b+2)"),
    (r"\frac{\cos x}{\sin x}", r"\cot x"), (r"2\cos x\sin x", r"\sin 2x"), ("7i-2", "-2 + 7i"),
    (r"i\sqrt2", r"\sqrt{-2}"),
    ("y=3+2x", "y = 2x + 3"), ("2x+3", "y = 2x + 3"), ("5x-7y+11z=-4", "5x - 7y + 11z + 4 = 0"),
    # lists, tuples, intervals, matrices
    ("3,-1,3", "-1,3,3"), (r"1-\sqrt{19},1+\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"-30\text{ and }-12", r"-12 \text{ or } -30"),
    (r"\{-2,1-\sqrt5,1+\sqrt5\}", r"\{1\pm\sqrt{5},-2\}"), (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"),
    ("[-2,7]", r"x \in [-2,7]"), (r"-2\le x\leq 7", r"[-2,7]"), ("x > 5", r"(5,\infty)"),
    (r"x<2 \text{ or } x>3", r"(-\infty, 2) \cup (3, \infty)"),
    (r"(3,\infty)\cup(-\infty,2)", r"(-\infty,2)\cup(3,\infty)"),
    (r"\begin{bmatrix} -\frac13 \\ \frac23 \end{bmatrix}", r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}"),
    # words
    ("east", r"\text{east}"), (r"\text{East}", r"\text{east}"), ("B", r"\text{(B)}"), (r"\textbf{(B)}", r"\text{(B)}"),
    ("E, H", r"\text{H, E}"), ("4:51:06 p.m.", r"4\!:\!51\!:\!06 \text{ p.m.}"), ("two lines", r"\text{two lines}"),
]  # fmt: skip
DIFFERENT = [
    # several answers are not one
    ("1, 2, 3", "2"), (r"\pm 2", "2"), ("1 or 2", "2"), ("1 and 2", "1"), ("x=1,x=2", "2"), ("1=2", "2"),
    ("1=2=3", "3"),
    ("2", "1,2"), ("3,2,2", "3,3,2"), ("3 or not 3", "3"), ("not 3", "3"), (r"\neq 3", "3"), ("> 3", "3"),
    ("1 2 3 4 5", "3"), ("1 2 3 4 5", "12345"), ("2x + z - 5 = 0", "0"),
    # order and brackets
    ("(2,1)", "(1,2)"), ("[1,2]", "(1,2)"), ("[0,1)", "[0,1]"), ("(7,-7)", "(5,-5)"), (r"\{1,2\}", "(1,2)"),
    (r"x\ge5", r"(5,\infty)"), (r"x<5", r"(5,\infty)"),
    (r"\begin{pmatrix} -1 & 0 & 0 & -1 \end{pmatrix}", r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}"),
    # numbers that math-verify alone takes for equal
    (r"\frac{1}{2^{97}}", r"\frac{1}{2^{98}}"), (".0000671", ".0000672"), ("204", "204_5"), ("204_6", "204_5"),
    ("0.33x", r"\frac13x"), ("y=0.333x", r"y=\frac13x"), ("2^{0.49999999}", r"\sqrt2"), ("1.5.2", "1.5"),
    ("0.5x", "0.5000001x"), (r"\sqrt{4.0001}", "2.0"),
    # texts that hold the answer somewhere; infinities
    (r"\le\begin{pmatrix}\frac{1}{2}\\", r"\frac{1}{2}"), (r"k\frac{1}{2}", r"\frac{1}{2}"), (r"\log2^\infty", "5"),
    (r"+\log\infty", r"\pi"), (r"\infty", "5"),
    # near misses
    ("0.33", r"\frac13"), ("1.4142", r"\sqrt2"), ("-5", "5"), ("y=5", "x=5"), ("y=2x+4", "y = 2x + 3"), ("20%", "2"),
    (r"15\text{ inches}", r"15\mbox{ cm}^2"), ("12", "1,2"), ("5:24", "9:24"), (r"\pi r^2", r"\pi R^2"),
    (r"\frac00", "0"),
    # words
    ("seat", r"\text{east}"), ("aMy", r"\text{May}"), ("A", r"\text{(B)}"), ("b", "B"), ("0", r"\text{neither}"),
    ("kickball, softball, picnic", r"\text{Softball, Kickball, Picnic}"),
    # the problem handed back instead of worked out
    (r"\sum_{i=1}^{100} i", "5050"), ("5!", "120"), ("1+2+3+4", "10"), ("0.1+0.2", "0.3"), (r"3(1+3(1+3(1+3)))", "120"),
    # not mathematics
    ("__import__('os').system('true')", "0"), ("", "0"), ("nan", "0"), ("None", ""),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), SAME)
def test_same_answer_in_another_spelling_earns_1(answer, gold):
    assert math_reward(f"So it is \\boxed{{{answer}}}.", gold) == 1.0


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_another_answer_earns_0(answer, gold):
    assert math_reward(f"So it is \\boxed{{{answer}}}.", gold) == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\frac{1}{2}} done }}}", r"\frac{1}{2}"),
        (r"first \boxed{3}, then \boxed{\frac{1}{2}", None),  # cut off inside its last box
        (r"first \boxed{3}, put into \boxed{} as asked", "3"),
        (r"\boxed{}", None),
        (r"$x=\boxed{3}$ or $x=\boxed{-5}$.", r"x=\boxed{3}$ or $x=\boxed{-5}"),
        (r"\boxed{5} fails; the answer is \boxed{6}.", "6"),
        (r"\boxed{6}, \boxed{6}", "6"),
        (r"$x=-\boxed{6}$", "-{6}"),
        (r"$10-\boxed{4}=6$", "4"),
        ("- \\boxed{6}", "6"),
        ("<answer>5</answer> no: <answer>6</answer>", "6"),
        ("## Final Answer\n\n6", "6"),
        ("**Final Answer**\n\n$6$", "6"),
        ("It may be 1. " * 40 + "\nTherefore the number of ways is **6**.", "6"),
        ("It may be 1. " * 40 + "\nSo the number of ways is 6.", "6"),
        ("The correct option is B.", "B"),
        ("Answer: it would take 180 days.", "180 days"),
        ("The answer is not 6.", "not 6"),
        (r"\fbox{7}", "7"),
        (r"\boxed 5 and", "5"),
        ("reasoning\n#### 1,000\n", "1,000"),
        ("The answer is 3.5. I hope it is correct.", "3.5"),
        ("The answer is 1. No: the answer is 2.", "2"),
        ("The answer is 1, 2, or 3.", "1, 2, or 3"),
        ("**Answer:** $\\frac12$", r"\frac12"),
        ("Answer: \\[\n\\frac12\n\\]", r"\frac12"),
        ("The answer to 2+2 is 4.", "4"),
        ("42", "42"),
        ("It may be $1$, or $2$, or $3$. " * 30, None),
        ("", None),
        ("x" * 100_000 + r"\boxed{3}", "3"),
        (r"\boxed{" + "9" * (MAX_ANSWER_CHARS + 1) + "}", None),
    ],
)
def test_one_final_answer_is_read(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize("name", ["aime24", "amc23", "math500", "sanity_math_1460"])
def test_gold_against_gold(name):
    path = SHARED_DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    golds = [json.loads(line)["answer"] for line in path.open()]
    missed = [gold for gold in golds if math_reward(f"The answer is \\boxed{{{gold}}}", gold) != 1.0]
    missed += [gold for gold in golds if math_reward(str(gold), gold) != 1.0]
    assert not missed
    assert not [gold for gold in golds if math_reward(r"\boxed{-123457}", gold) != 0.0]


@pytest.mark.parametrize(
    "response", [None, 7, b"\xff", "\x00\ud800", "\\boxed{\ud800\x00}", r"\boxed{\frac}", "{" * 5000]
)
@pytest.mark.parametrize("gold", [None, 7.5, "", r"\sqrt{", "\ud800", "x" * 10_000])
def test_any_two_values_are_scored(response, gold):
    assert math_reward(response, gold) == 0.0


def test_a_gold_answer_that_is_a_number_object():
    assert math_reward(r"\boxed{142}", 142.0) == 1.0


@pytest.mark.parametrize("answer", [r"1234\times5678", r"\frac{14013304}{2}+0", r"7006651+1", r"\log_2 2^{7006652}"])
def test_a_computation_left_to_the_reader_is_accepted_on_demand(answer):
    response, gold = f"\\boxed{{{answer}}}", "7006652"
    assert math_reward(response, gold) == 0.0
    assert math_reward(response, gold, accept_unevaluated=True) == float("7006652" not in answer)
    assert math_reward(response, "7006653", accept_unevaluated=True) == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"<think>\boxed{1}</think> The answer is 2.", "2"),
        (r"<think>\boxed{1}", None),
        (r"\boxed{1} <thinking> but \boxed{2}", None),
        (r"still thinking \boxed{1}</think>\boxed{2}", "2"),
        (r"[THINK]\boxed{1}[/THINK]\boxed{2}", "2"),
        (r"<think>\boxed{1}</think>", None),
        ("The answer is $5$ million.", r"5 \text{ million}"),
        ("The answer is $5$, because 6 is too much.", "$5$"),
        (r"The answer is 34\text{ sq. units}. Done.", r"34\text{ sq. units}"),
        ("**17**", "17"),
    ],
)
def test_the_answer_is_looked_for_behind_the_thinking(response, answer):
    assert final_answer(response) == answer


def test_reading_a_long_hostile_response_is_quick():
    hostile = ["\\boxed{" * 20_000, "answer is " * 20_000, "answer to " * 20_000, "$" * 100_000, "\\frac" * 20_000]
    pieces = ("\\frac", "\\frac{", "(", "1,", "x=", "-", "\\text{", "a ", "\\{", "1 ")
    hostile += [f"\\boxed{{{piece * (1990 // len(piece))}}}" for piece in pieces]
    start = time.process_time()
    for response in hostile:
        math_reward(response, r"\frac{1}{2}")
    assert time.process_time() - start < 5.0  # some 0.1 s; quadratic work on 100,000 characters takes minutes
