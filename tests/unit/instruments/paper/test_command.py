"""The perfectible set (sampling is tested with the engine) and the verdict on a run."""

from __future__ import annotations

import json

import pytest
import yaml

from megatron_rl.__main__ import main
from megatron_rl.config.data import DataSourceConfig
from megatron_rl.data.source import read_problems
from megatron_rl.errors import InputError
from megatron_rl.instruments.paper.command import read_progress, write_kept
from tests.support.tiny import tiny_recipe

SETTINGS = {"model": "m", "samples": 40, "temperature": 1.0}


def test_kept_problems_are_neither_hopeless_nor_solved(tmp_path):
    source = tmp_path / "set.jsonl"
    rows = [{"id": str(i), "problem": f"p{i}", "answer": str(i)} for i in range(6)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = list(read_problems(DataSourceConfig(path=str(source))))
    correct = {"set:0": 7, "set:1": 8, "set:2": 20, "set:3": 32, "set:4": 33}  # of 40; number 5 was not sampled
    out = tmp_path / "kept.jsonl"
    assert write_kept(out, problems, correct, 40, low=0.2, high=0.8) == (3, 5)
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["id"], row["accuracy"]) for row in kept] == [("1", 0.2), ("2", 0.5), ("3", 0.8)]
    again = list(read_problems(DataSourceConfig(path=str(out), name="set")))
    assert [problem.id for problem in again] == ["set:1", "set:2", "set:3"]
    assert [problem.answer for problem in again] == ["1", "2", "3"]


def test_an_interrupted_run_continues_where_it_stopped(tmp_path):
    file = tmp_path / "progress.jsonl"
    assert read_progress(file, SETTINGS) == {}
    with file.open("a") as stream:
        stream.write('{"id": "a", "correct": 3}\n{"id": "b", "correct": 40}\n{"id": "c", "cor')
    assert read_progress(file, SETTINGS) == {"a": 3, "b": 40}
    with file.open("a") as stream:
        stream.write('{"id": "c", "correct": 1}\n')
    assert read_progress(file, SETTINGS) == {"a": 3, "b": 40, "c": 1}


def test_progress_of_other_settings_is_refused(tmp_path):
    file = tmp_path / "progress.jsonl"
    read_progress(file, SETTINGS)
    with pytest.raises(InputError, match=r"made with other settings \(temperature: 1.0\)"):
        read_progress(file, SETTINGS | {"temperature": 0.6})


@pytest.fixture
def run(tmp_path):
    """A function scores → run directory over 32 problems, 8 a step: four steps see each once."""

    def make(scores: list[float]):
        data = tmp_path / "train.jsonl"
        data.write_text("".join(json.dumps({"problem": str(i), "answer": "0"}) + "\n" for i in range(32)))
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        recipe = tiny_recipe(data={"train": str(data)}, batch={"prompts": 8})
        (folder / "recipe.resolved.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        lines = [json.dumps({"step": i, "time": 0.0, "critic/score/mean": score}) for i, score in enumerate(scores)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return make


def test_a_run_passes_on_a_whole_epoch_above_the_threshold(run, capsys):
    assert main(["sanity-verdict", str(run([0.5, 0.9, 0.96, 0.96, 0.95, 0.96, 0.2]))]) == 0
    assert "PASS  run: training accuracy 0.958 at step 5 of 7 (above 0.95; 32 problems)" in capsys.readouterr().out


def test_one_lucky_step_is_no_pass(run, capsys):
    assert main(["sanity-verdict", str(run([0.5, 1.0, 0.9, 0.9, 0.9]))]) == 1
    assert capsys.readouterr().out.startswith("FAIL  run: training accuracy 0.925")


def test_too_short_a_run_has_no_verdict(run, capsys):
    assert main(["sanity-verdict", str(run([1.0, 1.0]))]) == 2
    assert "2 steps recorded, one pass over the problems takes 4" in capsys.readouterr().err
