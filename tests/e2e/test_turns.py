"""The worked example of several turns, on both engines: recipes/tiny/calculator.yaml trains, resumes and is held to its
file."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.monitor import RHO_BOUNDS
from megatron_rl.monitor import RunDirectory
from megatron_rl.run.recorded_batches import batch_path, load_batch
from tests.support.patience import PATIENCE_S
from tests.support.tiny import REPOSITORY
from tests.support.written_run import without_times
from tests.support.zygote import run_command, surroundings
from tools.dev.make_tiny_checkpoint import build_tokenizer

STEPS = 3
RESULT = re.compile(r"=[0-4?]#")


def arguments(root: Path, name: str, steps: int, function: Path) -> list[str]:
    settings = [f"name={name}", f"run_root={root}", f"num_steps={steps}", "batch.prompts=4", "validation.every=0"]
    settings += ["checkpoint={every: 0, keep_last: 0}", "monitor.plots=false", "recorder.record_batches=all"]
    settings.append(f"rollout.function={function}:calculator")
    return ["train", "recipes/tiny/calculator.yaml", *(x for setting in settings for x in ("--set", setting))]


def rows(root: Path, name: str) -> list[dict]:
    lines = (root / name / "metrics.jsonl").read_text().splitlines()
    return without_times([json.loads(line) for line in lines])


def batches(root: Path, name: str):
    return [load_batch(batch_path(RunDirectory(root / name).batches, step)).batch for step in range(STEPS)]


@pytest.fixture(scope="module")
def function(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("own") / "calculator.py"
    shutil.copy(REPOSITORY / "recipes" / "tiny" / "calculator.py", file)
    return file


@pytest.fixture(scope="module")
def root(tmp_path_factory, function) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, steps in (("whole", STEPS), ("parts", STEPS - 1), ("parts", STEPS)):
        done = run_command("megatron_rl", arguments(root, name, steps, function), root)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return root


def test_both_engines_agree_on_what_was_sampled(root):
    for row in rows(root, "whole"):
        assert row["mismatch/rho_std"] < RHO_BOUNDS["fp32"]
        assert row["router/replay_coverage"] == 1.0
        assert 1.0 < row["rollout/turns_mean"] <= 3.0


def check_masks(batch) -> int:
    """Tokens are out of the loss where the calculator's results stand in the text, and nowhere else. Returns how many
    results there are."""
    decode, count = build_tokenizer().decode, 0
    for sequence in batch.sequences:
        tokens = sequence.tokens
        characters = [decode([token]) or "·" for token in tokens]  # one each
        text, expected = "".join(characters), np.ones(len(tokens), dtype=bool)
        calls = 0
        place = 0
        while calls < 2 and (call := text.find("#", place)) >= 0:
            if len(text) == call + 1:
                break  # there was no room for a result
            match = RESULT.match(text, call + 1)
            assert match, text
            expected[call + 1 : match.end()] = False
            calls, place = calls + 1, match.end()
        assert sequence.loss_mask.tolist() == expected.tolist(), text
        assert (sequence.inference_logprobs[~expected] == 0).all()
        assert (sequence.inference_logprobs[expected] != 0).any()
        count += calls
    return count


def test_results_of_the_tool_are_masked(root):
    assert sum(check_masks(batch) for batch in batches(root, "whole")) > 32


def test_a_resume_repeats_the_run_bit_for_bit(root):
    assert rows(root, "parts") == rows(root, "whole")
    for resumed, whole in zip(batches(root, "parts"), batches(root, "whole"), strict=True):
        for one, other in zip(resumed.sequences, whole.sequences, strict=True):
            for name in ("tokens", "loss_mask", "inference_logprobs", "current_logprobs", "routed_experts"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_an_edited_function_makes_another_run(root, function):
    before = function.read_text()
    function.write_text(before.replace("% 5", "% 7"))
    try:
        done = run_command("megatron_rl", arguments(root, "parts", STEPS + 1, function), root)
    finally:
        function.write_text(before)
    assert done.returncode == 2
    assert f"rollout.{function}:calculator: " in done.stdout + done.stderr
    assert len(rows(root, "parts")) == STEPS


@pytest.mark.slow
def test_ranks_share_conversations(tmp_path, function):
    """Two ranks with an engine each: masks that cover a part of a response travel with it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megatron_rl"]
    done = subprocess.run(
        [sys.executable, *launcher, *arguments(tmp_path, "two", STEPS, function)],
        cwd=REPOSITORY,
        env=surroundings(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for row in rows(tmp_path, "two"):
        assert row["mismatch/rho_std"] < RHO_BOUNDS["fp32"]
        assert row["router/replay_coverage"] == 1.0
    assert sum(check_masks(batch) for batch in batches(tmp_path, "two")) > 32
