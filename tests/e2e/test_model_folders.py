"""Folders with tensors that nobody reads run; a learner with another function than the engine ends after one step."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny import MODEL
from tests.support.zygote import run_command

SETTINGS = ("name=run", "num_steps=1", "batch.prompts=4", "validation.every=null", "monitor.plots=false")


def run_one_step(root: Path, *overrides: str, program: str = "megatron_rl"):
    settings = [*SETTINGS, f"run_root={root}", *overrides]
    arguments = [part for setting in settings for part in ("--set", setting)]
    return run_command(program, ["train", "recipes/tiny/grpo.yaml", *arguments], root)


def first_step(root: Path) -> dict:
    return json.loads((root / "run" / "metrics.jsonl").read_text().splitlines()[0])


@pytest.fixture(scope="module")
def with_extras(tmp_path_factory) -> Path:
    """The tiny model, tied, with its head stored again and the rotary frequencies of early releases."""
    folder = tmp_path_factory.mktemp("model")
    for file in MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(MODEL / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"].clone()
    weights |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(16) for i in range(4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("engine", ["vllm", "exact"])
def test_tensors_that_nobody_reads_run(engine, with_extras, tmp_path):
    done = run_one_step(tmp_path, f"model.path={with_extras}", f"rollout.engine={engine}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "lm_head.weight is stored beside the embedding" in done.stdout.replace("\n", " ")
    assert first_step(tmp_path)["mismatch/rho_std"] <= (1e-3 if engine == "vllm" else 0.0)


def test_a_learner_with_another_function_ends_after_the_first_step(tmp_path):
    done = run_one_step(tmp_path, program="tests.e2e.programs.another_rope")
    assert done.returncode == 3, done.stdout[-2000:] + done.stderr[-2000:]
    assert "run ended: alarm first-step-difference at step 0: training/rollout_probs_diff_mean = " in done.stderr
    row = first_step(tmp_path)
    assert (row["alarm/first-step-difference"], row["alarm/first-step-mismatch"]) == (1.0, 1.0)
