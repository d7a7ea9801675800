"""Any single change of a model's folder is refused, reported, or without effect on the logits against transformers."""

import json
import subprocess

import pytest

from megatron_rl.errors import InputError
from megatron_rl.learner import compare_logits
from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from, read_architecture
from tests.parallel.gloo import run_ranks
from tests.support.slow import slow_but
from tests.support.tiny import MODEL
from tools.dev.make_tiny_checkpoint import FAMILIES

PROGRAM = "tests.parallel.programs.folders"


QUICK = ("qwen3_moe", "qwen2", "deepseek_v3")  # experts and norms of heads, biases, latent vectors


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_no_change_of_a_folder_goes_in_unnoticed(family, tmp_path):
    ((counts, wrong),) = run_ranks(PROGRAM, "judge", 1, family=family, folder=str(tmp_path))
    assert not wrong, "\n".join(wrong)
    assert all(counts[kind] > 0 for kind in ("refused", "reported", "same", "followed")), counts


def test_the_witness_tells_equal_models_from_others(tmp_path):
    """Both compute in fp32: models that are equal differ by less than `BOUND`, with a factor to spare."""
    (result,) = run_ranks(PROGRAM, "differences", 1, folder=str(tmp_path))
    for name in ("whole", "ends"):
        assert result[name].largest < compare_logits.BOUND / 10
        assert (result[name].beyond, result[name].num_tokens) == (0, 23)
    assert result["another rope"].is_another_function
    assert result["another norm"].is_another_function


def test_queries_from_a_latent_vector_and_experts_in_groups(tmp_path):
    (result,) = run_ranks(PROGRAM, "latent_queries", 1, folder=str(tmp_path))
    assert result.largest < compare_logits.BOUND / 10
    assert result.num_tokens == 23


ANSWERS = {
    "equal": ('{"largest": 2e-06, "beyond": 0, "num_tokens": 63}', None),
    "near tie": ('{"largest": 0.2, "beyond": 3, "num_tokens": 63}', None),
    "another": ('{"largest": 0.2, "beyond": 60, "num_tokens": 63}', "60 of them by more than 0.001: the learner would"),
    "not a number": ('{"largest": NaN, "beyond": 0, "num_tokens": 63}', "differ by at most nan"),
    "not loaded": ('{"error": "ValueError: no such act"}', "transformers does not load .*no such act"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_is_said_of_the_other_process(case, monkeypatch):
    answer, refused = ANSWERS[case]
    asked = []

    def run(command, *, input, **options):
        asked.append((json.loads(input), options["env"]))
        return subprocess.CompletedProcess(command, 0, f"noise\n{answer}\n", "")

    monkeypatch.setattr(compare_logits.subprocess, "run", run)
    monkeypatch.setenv("WORLD_SIZE", "8")
    a = read_architecture(MODEL)
    if refused is None:
        said = compare_logits.witness(MODEL, a, [5, 6], free_gib=8.0)
        assert said.startswith("log-probs of the prompt (63 tokens, all 4 layers, fp32) under transformers and the")
    else:
        with pytest.raises(InputError, match=refused):
            compare_logits.witness(MODEL, a, [5, 6], free_gib=8.0)
    ((request, environment),) = asked
    assert request["layers"] == [0, 1, 2, 3]
    assert request["tokens"][:2] == [5, 6]
    assert len(request["tokens"]) == compare_logits.FEWEST_TOKENS
    assert "WORLD_SIZE" not in environment


def test_a_comparison_that_is_not_made_says_why(monkeypatch):
    large = architecture_from(KNOWN_MODELS["Qwen3-30B-A3B"])
    said = compare_logits.witness(MODEL, large, [5], free_gib=6.0)
    # 2 layers of 128 experts of 3 × 768 × 2048, of attention, embedding and head: 1.87e9 parameters of 6 bytes, and 3
    assert said == "not compared with transformers: layers 0 and 47 need 13 GiB of memory, 6 are free"
    killed = subprocess.CompletedProcess([], -9, "", "Killed")
    monkeypatch.setattr(compare_logits.subprocess, "run", lambda *arguments, **options: killed)
    said = compare_logits.witness(MODEL, large, [5], free_gib=16.0)
    assert said == "not compared with transformers: the process ended with status -9 (Killed)"
