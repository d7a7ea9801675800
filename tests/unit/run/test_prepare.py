"""What `check` shows: the layout, the data, one prompt with its answer and reward, and what will be recorded."""

from __future__ import annotations

import json
import shutil

import pytest
from pydantic import ValidationError

from megatron_rl.config import load_recipe
from megatron_rl.errors import InputError
from megatron_rl.monitor import RunDirectory
from megatron_rl.run.identity import keep_recipe
from megatron_rl.run.prepare import check_recipe, in_steps, prepare, report
from tests.support.tiny import MODEL, REPOSITORY, tiny_recipe

LARGE = REPOSITORY / "recipes" / "exact" / "grpo-qwen3-30b-a3b-4n8g-tp2ep8-exact.yaml"


def test_data_prompt_answer_and_reward_are_shown(tmp_path):
    rows = [{"id": i, "problem": f"^{'12' * (i + 1)}=\x1b[31m", "answer": "3"} for i in range(9)]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt = {"max_length": 24, "overlong": "drop", "template": "{problem}"}
    shown = dict(report(tiny_recipe(data={"train": str(file), "prompt": prompt}, run_root=str(tmp_path)), 1))
    assert shown["data"].startswith("8 prompts (1 too long, left out) to train on (mine), 0 prompts to validate on; ")
    assert shown["prompt"].startswith("mine:0: '^12=\\x1b[31m', ")
    assert (shown["answer"], shown["reward"]) == ("'3'", "1 for the response '#3'")


def test_what_is_not_read_and_what_no_answer_meets_is_shown(tmp_path):
    golds = ["34"] * 8 + ['["34"]']
    rows = [{"problem": f"^{i}=", "answer": gold, "ability": "MATH"} for i, gold in enumerate(golds)]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = dict(report(tiny_recipe(data={"train": str(file)}, reward={"name": "math"}, run_root=str(tmp_path)), 1))
    assert shown["not read"] == f"data.train {file}: ability"
    assert shown["tokens"] == "<bos> ^ 0 ="
    assert shown["golds"] == "of 9 tried: the gold '[\"34\"]' is not met by the answer '34'"


def test_epochs_become_steps_when_the_prompts_are_counted(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"problem": f"^{i}=", "answer": "3"}) + "\n" for i in range(10)))
    sections = {"data": {"train": str(file)}, "batch": {"prompts": 4}, "run_root": str(tmp_path)}
    recipe = tiny_recipe(num_steps=None, num_epochs=2.5, **sections)
    assert recipe.length == "2.5 epochs"
    counted, _ = in_steps(recipe, 10)
    assert (counted.num_steps, counted.num_epochs) == (7, None), "25 prompts, 4 a step"
    assert dict(report(recipe, 1))["steps"] == "num_epochs 2.5 over 10 prompts, 4 a step: 7 steps, 7 updates"
    with prepare(recipe, 1) as prepared:
        assert prepared.recipe.num_steps == 7


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"num_steps": 3, "num_epochs": 1}, "num_epochs: 1 beside num_steps: 3; give one"),
        ({"num_steps": None}, "num_steps: missing; give the number of steps, or num_epochs"),
        (
            {"num_steps": None, "num_epochs": 1, "batch": {"filter_groups": True}},
            "num_epochs: 1 with batch.filter_groups",
        ),
    ],
)
def test_a_run_has_one_length(sections, said):
    with pytest.raises(ValidationError, match=said):
        tiny_recipe(**sections)


def test_a_schedule_is_held_against_the_steps_of_its_epochs():
    recipe = tiny_recipe(num_steps=None, num_epochs=1, schedule={"style": "linear", "warmup_steps": 100})
    with pytest.raises(InputError, match="leaves nothing of the 2 steps"):
        in_steps(recipe, 2 * recipe.batch.prompts)


def test_rows_that_repeat_a_problem_are_counted(tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [{"problem": f"^{i % 7}=", "answer": "3"} for i in range(18)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = dict(report(tiny_recipe(data={"train": str(file)}, run_root=str(tmp_path)), 1))
    assert shown["data"].startswith("18 prompts (11 of them repeat another row) to train on")


def test_a_right_answer_that_is_not_rewarded_is_said(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def never(response, answer):\n    return 0\n")
    recipe = tiny_recipe(reward={"name": f"{file}:never"}, run_root=str(tmp_path))
    assert dict(report(recipe, 1))["reward"].endswith(": a right answer is not rewarded")


def test_a_layout_is_shown_for_ranks_that_can_hold_it():
    recipe = load_recipe(LARGE)
    shown = dict(report(recipe, None, offline=True))
    assert shown["layout"].startswith("8 ranks or a multiple")
    assert "tensor 2, pipeline 1, expert 8, data 4" in shown["layout"]
    assert dict(report(recipe, 32, offline=True))["layout"].startswith("32 ranks: tensor 2")
    with pytest.raises(InputError, match=r"expert · expert_tensor · pipeline = 8 does not divide .* ranks \(4\)"):
        report(recipe, 4, offline=True)


def test_what_train_would_go_on_from_is_shown_or_refused(tmp_path):
    recipe = tiny_recipe(run_root=str(tmp_path))
    directory = RunDirectory(recipe.run_dir).create()
    directory.metrics.write_text('{"step": 0}\n')
    keep_recipe(directory, recipe, 0)
    assert dict(report(recipe, 1))["there"].endswith(" goes on from step 0")
    with pytest.raises(InputError, match="\n  seed: 0 → 5\n"):
        report(tiny_recipe(run_root=str(tmp_path), seed=5), 1)


def test_what_is_in_the_model_folder_is_shown(tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"my_note": 1}))
    shown = dict(report(tiny_recipe(model={"path": str(tmp_path / "model")}), 1))
    assert shown["model"].startswith("qwen3_moe: 4 layers")
    assert shown["folder"] == (
        "names, shapes and types of its tensors are the learner's, responses end with tokens [2]; config.json has keys "
        "that no engine here is known to read: my_note"
    )


@pytest.mark.parametrize("has_cuda", [True, False])
def test_a_shape_that_vllm_lacks_on_a_cpu_is_said_where_no_gpu_is(has_cuda, tmp_path, monkeypatch):
    from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

    save_checkpoint(
        build_model(build_tiny_config("qwen3_moe", "nano", head_dim=16, moe_intermediate_size=48)), tmp_path
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    recipe = tiny_recipe(model={"path": str(tmp_path)}, runtime={"device": "auto"})
    said = dict(check_recipe(recipe, 1).report).get("on a CPU", "")
    assert said.startswith("" if has_cuda else "this recipe cannot run: model.path: head_dim is 16")
    assert ("experts are 48 wide" in said) != has_cuda


def test_stop_tokens_that_leave_out_the_tokenizers_own_are_said(tmp_path):
    shown = dict(report(tiny_recipe(rollout={"stop_token_ids": [50]}, run_root=str(tmp_path)), 1))
    assert shown["prompt"].endswith("6 tokens; responses end with tokens [50], not with the tokenizer's '<eos>' (2)")
    assert dict(report(tiny_recipe(run_root=str(tmp_path)), 1))["prompt"].endswith("6 tokens")
