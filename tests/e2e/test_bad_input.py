"""Input that cannot work ends `train` with status 2 and one message, before an engine starts or a run directory exists.

Engines are not mocked away: they are made impossible to start, so that a check that comes too late shows.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_rl.__main__ import main
from tests.support.tiny import MODEL, REPOSITORY

GRPO = REPOSITORY / "recipes" / "tiny" / "grpo.yaml"


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    def forbidden(*arguments, **keywords):
        raise AssertionError("an engine was started before the input was checked")

    monkeypatch.setattr("megatron_rl.run.start.Learner", forbidden)
    monkeypatch.setattr("megatron_rl.run.start.start_generator", forbidden)

    def refused(*overrides: str, recipe: Path = GRPO, resume: str = "auto") -> str:
        settings = [f"run_root={tmp_path / 'runs'}", *overrides]
        arguments = [part for setting in settings for part in ("--set", setting)]
        assert main(["train", str(recipe), "--resume", resume, *arguments]) == 2
        assert not (tmp_path / "runs").exists()
        message = capsys.readouterr().err
        assert message.startswith("error: ")
        assert message.endswith("\n")
        if resume == "auto":  # `check` takes the same path, and says the same
            assert main(["check", str(recipe), "--ranks", "1", *arguments]) == 2
            assert capsys.readouterr().err == message
        return message

    return refused


ROWS = {
    "other column": '{"id": "a", "problem": "^12=", "reply": "3"}\n',
    "one": '{"problem": "^12=", "answer": "3"}\n',
    "empty": "",
}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.num_sample=4", ["did you mean 'num_samples'?"]),
        ("learner.parallel.tensor=3", ["3 does not divide the number of attention heads (4)"]),
        ("learner.parallel.expert=3", ["3 does not divide the number of experts (8)"]),
        ("learner.parallel.expert=2", ["does not divide the number of ranks (1)"]),
        ("data.train={other column}", ["answer", "reply", "{other column}"]),
        ("data.train={empty}", ["{empty}", "empty"]),
        ("data.train={one}", ["batch.prompts: 16 prompts a step, but data.train has 1"]),
        ("data.prompt.max_length=3", ["max_length", "train-0000"]),
        (
            "model.path=models/Qwen3-30B-A3B-Base",
            ["hf download Qwen/Qwen3-30B-A3B-Base --local-dir models/Qwen3-30B-A3B-Base", "--offline"],
        ),
    ],
)
def test_a_value_that_cannot_work(refused, tmp_path, override, expected):
    files = {name: tmp_path / f"{name}.jsonl" for name in ROWS}
    for name, file in files.items():
        file.write_text(ROWS[name])
    message = refused(override.format(**files))
    assert all(part.format(**files) in message for part in expected), message


BROKEN = """
def raises(response, answer):
    return int(response.split("=")[1])

def none(response, answer): ...
def three(response, answer, more): ...
"""


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("raises", 'line 3, in raises\n    return int(response.split("=")[1])'),
        ("none", "returned None (NoneType); expected a number, a bool or a mapping with `score`"),
        ("three", "takes (response, answer, more), which fits neither f(response, answer) nor"),
        ("four", "defines no function 'four'"),
    ],
)
def test_reward_function_that_cannot_work(refused, tmp_path, function, expected):
    file = tmp_path / "mine.py"
    file.write_text(BROKEN)
    assert expected in refused(f"reward.name={file}:{function}")


def test_model_without_a_tokenizer(refused, tmp_path):
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(MODEL / name)
    assert "tokenizer" in refused(f"model.path={tmp_path}")


def test_tokenizer_of_another_model(refused, tmp_path):
    """The tiny tokenizer with a model whose vocabulary ends before its digits."""
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 8, "eos_token_id": 2}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((MODEL / name).read_text())
    weights = load_file(MODEL / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        weights[name] = weights[name][:8].clone()
    save_file(weights, tmp_path / "model.safetensors")
    message = refused(f"model.path={tmp_path}")
    assert "the model's vocabulary has 8 (0 … 7)" in message
    assert "the tokenizer in model.path belongs to another model" in message


def test_resume_from_what_is_no_checkpoint(refused, tmp_path):
    assert "not a complete checkpoint" in refused(resume=str(tmp_path))
