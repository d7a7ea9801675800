"""Sampled texts: which are kept, what is said of them, how much room they take, and that they do nothing."""

import json

import numpy as np
import pytest

from megatron_rl.__main__ import main
from megatron_rl.config.monitor import MonitorConfig, SamplesConfig
from megatron_rl.errors import InputError
from megatron_rl.monitor import Monitor, RunDirectory
from megatron_rl.monitor.samples import (
    SampleFile,
    choose,
    collect,
    printable,
    read_samples,
    render,
    repetition_fraction,
    rho_summary,
    rollout_metrics,
    shorten,
)
from megatron_rl.types import Group, Prompt, Rollout
from tests.support.groups import any_response
from tests.support.groups import group as group_of
from tests.support.rounding import rounded

HOSTILE = "\x1b]0;owned\x07\x9b31m<script>alert(1)</script>\r\u202egnp.exe\u2028\ud800\nstep 9, best: forged"


def rollout(text: str, sample: int = 0, reward: float = 0.0, length: int = 3) -> Rollout:
    return any_response(f"p/{sample}", length, text=text, reward=reward)


def group(name: str, *rollouts: Rollout) -> Group:
    return Group(Prompt(name, [1, 2], "7", text=f"What is {name}?"), list(rollouts))


def sequence(current: list[float] | None, old: list[float] | None = None) -> Rollout:
    def array(values):
        return None if values is None else np.array(values, np.float32)

    mu = np.full(2, np.log(0.5), np.float32)
    return any_response("p/0", 2, inference_logprobs=mu, old_logprobs=array(old), current_logprobs=array(current))


def test_the_best_the_worst_the_longest_and_then_the_first_are_kept_once_each():
    groups = [
        group("a", rollout("a0", reward=0.5), rollout("a1", reward=2.0, length=9)),
        group("b", rollout("b0", reward=-1.0), rollout("b1", length=20), rollout("b2")),
    ]
    assert choose(groups, 4) == [("best", 1), ("worst", 2), ("longest", 3), ("next", 0)]
    assert choose(groups, 2) == [("best", 1), ("worst", 2)]
    assert choose([group("a", rollout("only"))], 4) == [("best", 0)]
    assert choose([], 4) == []


def test_a_sample_says_what_there_is_to_know():
    ratios = {0: rho_summary(sequence([np.log(0.5), np.log(0.25)]))}
    (sample,) = collect(3, [group("q", rollout("seven", 5, 0.25))], SamplesConfig(), ratios)
    # Each log-prob is rounded to 24 bits, by at most 2^-25 of a number below 1.4: two of them, and the exponential.
    assert sample["rho"] == pytest.approx({"mean": 0.75, "std": 0.25, "min": 0.5, "max": 1.0}, rel=2**-22)
    del sample["rho"]
    assert sample == {
        "step": 3,
        "why": "best",
        "prompt_id": "q",
        "sample": 5,
        "reward": 0.25,
        "raw_reward": 0.0,
        "finish": "stop",
        "length": 3,
        "answer": "7",
        "prompt": "What is q?",
        "response": "seven",
    }


def test_rho_is_of_the_policy_that_sampled_or_unknown():
    assert rho_summary(sequence([0.0, 0.0], old=[np.log(0.5)] * 2))["max"] == 1.0
    assert rho_summary(sequence(None)) is None
    assert collect(0, [group("q", rollout("r"))], SamplesConfig())[0]["rho"] is None


def test_long_text_keeps_its_two_ends():
    text = "a" * 500 + "b" * 500
    assert shorten(text, 10) == "aaaaa […990 characters…] bbbbb"
    assert shorten(text, 1) == "a […999 characters…] "
    assert shorten(text, 1000) == text


def test_nothing_that_a_model_writes_reaches_a_terminal_unescaped():
    shown = render(collect(0, [group("q", rollout(HOSTILE))], SamplesConfig())[0])
    assert printable(shown) == shown
    assert shown.isascii()
    for escaped in (r"\x1b]0;owned\x07", r"\x9b31m", r"\r", r"\u202e", r"\u2028", r"\ud800"):
        assert escaped in shown
    assert "\nstep 9" not in shown, "a line of the response must not look like one of ours"
    assert printable("naïve 数学\tx\ny") == "naïve 数学\tx\ny"


def test_the_file_never_grows_beyond_its_size(tmp_path):
    file = SampleFile(tmp_path / "samples.jsonl", 10485)
    for step in range(100):
        file.write(collect(step, [group("q", rollout("\U0001f600" * 10, length=4))], SamplesConfig()))
        assert file.path.stat().st_size <= file.max_bytes == 10485
    steps = [sample["step"] for sample in read_samples(file.path)]
    assert steps == list(range(steps[0], 100)), "the newest stay, whole"
    assert len(steps) >= 10
    before = file.path.read_bytes()
    file.write([{"step": 100, "prompt": "", "response": "x" * 6000}])
    assert file.path.read_bytes() == before
    file.resume_at(95)
    assert [sample["step"] for sample in read_samples(file.path)] == list(range(steps[0], 95))


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    file = SampleFile(tmp_path / "samples.jsonl")
    ratios = {0: rho_summary(sequence([800.0, 0.0]))}
    file.write(collect(0, [group("q", rollout("r"))], SamplesConfig(), ratios))
    (sample,) = read_samples(file.path)
    assert sample["rho"]["max"] is None
    assert "rho mean not finite" in render(sample)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """Three steps of a run that keeps samples of every second one."""
    config = MonitorConfig.model_validate({"samples": {"every": 2, "number": 1}, "plots": False, "terminal": "off"})
    with Monitor(tmp_path, config, {}, True) as monitor:
        for step in range(3):
            monitor.record(step, {}, [group(f"q{step}", rollout(HOSTILE))])
    return RunDirectory(tmp_path)


def test_a_run_keeps_texts_in_its_file(run):
    assert [sample["step"] for sample in read_samples(run.samples)] == [0, 2]
    assert run.samples.read_bytes().isascii()


def test_the_command_prints_the_newest_first(run, capsys):
    assert main(["samples", str(run.root)]) == 0
    shown = capsys.readouterr().out
    assert [line.split(",")[0] for line in shown.splitlines() if line.startswith("step ")] == ["step 2", "step 0"]
    assert main(["samples", str(run.root), "--step", "0"]) == 0
    assert "What is q0?" in capsys.readouterr().out
    assert main(["samples", str(run.root), "--step", "1"]) == 2
    assert "has samples of step 0, 2" in capsys.readouterr().err
    assert main(["samples", str(run.root / "nothing")]) == 2
    assert "nothing: no such folder; expected a run directory" in capsys.readouterr().err


def test_a_broken_line_is_named_and_a_torn_one_left_out(tmp_path):
    file = tmp_path / "samples.jsonl"
    whole = json.dumps({"step": 1, "prompt": "p", "response": "r"})
    file.write_text(f'{whole}\n{{"step": 2')
    assert [sample["step"] for sample in read_samples(file)] == [1]
    file.write_text(f"[]\n{whole}\n")
    with pytest.raises(InputError, match=r"samples.jsonl, line 1: not a sample"):
        list(read_samples(file))


@pytest.mark.parametrize(
    "wrong",
    [{"step": "1"}, {"step": None}, {"step": True}, {"rho": [1]}, {"rho": "x"}],
)
def test_a_sample_of_other_types_is_named(tmp_path, wrong):
    file, good = tmp_path / "samples.jsonl", {"step": 1, "prompt": "p", "response": "r"}
    file.write_text(f"{json.dumps(good | wrong)}\n{json.dumps(good)}\n")
    with pytest.raises(InputError, match=r"samples.jsonl, line 1: not a sample"):
        list(read_samples(file))
    odd = {"prompt": [3], "response": {"a": 1}, "reward": ["x"], "rho": {"mean": None}, "length": {}, "answer": 3.5}
    file.write_text(f"{json.dumps(good | odd)}\n{'[' * 100_000}\n")
    assert [render(sample) for sample in read_samples(file)]  # the last line is taken for a torn one


def test_repetition_fraction():
    assert repetition_fraction(list(range(100)), 4) == 0.0
    assert repetition_fraction([1, 2, 3], 4) == 0.0
    loop = [1, 2, 3, 4, 5] * 20  # 97 four-grams, 5 of them different
    assert repetition_fraction(loop, 4) == rounded(92 / 97)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, 500).tolist()
    grams = [tuple(tokens[i : i + 5]) for i in range(496)]
    assert repetition_fraction(tokens, 5) == rounded(1 - len(set(grams)) / 496)


def test_rollout_metrics():
    groups = [group_of([1.0, 0.0], [[5] * 10, [1, 2]]), group_of([0.5, 0.5], [[1], [1, 2, 3]], reason="length")]
    metrics = rollout_metrics(groups, ngram=2)
    assert metrics["critic/rewards/mean"] == 0.5
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (4.0, 10.0)
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["groups/no_signal_frac"] == 0.5
    assert metrics["response/repetition_frac"] == rounded(8 / 9 / 4)
    assert metrics["response/repetitive_responses"] == 0.25
    assert rollout_metrics([], 2) == {}
