"""Whole runs with an objective of a user's file: they train as the built-in one, resume, and are held to the file."""

OWN = """
import torch
from megatron_rl.objective.corrections import Effect
from megatron_rl.objective.inputs import safe_exp


def sapo(tokens, tau_positive=1.0, tau_negative=1.05):
    tau = torch.full_like(tokens.weight, tau_positive).masked_fill_(tokens.advantages < 0, tau_negative)
    return -torch.sigmoid(tau * (safe_exp(tokens.log_ratio) - 1)) * (4 / tau) * tokens.advantages


def tis(ratios, cap):
    return Effect(weight=ratios.token.clamp(None, cap), bounds=(0.0, cap))


def centred(groups):
    return groups.centred
"""
BUILT_IN = (
    "objective.policy_term={name: sapo, tau_negative: 1.2}",
    "objective.correction=[{mode: tis, cap: 1.5}]",
    "objective.advantage=dr_grpo",
)
STEPS = 4


def test_a_users_objective_trains_resumes_and_changes_the_run_when_edited(runs, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    settings = (
        f"objective.policy_term={{name: '{file}:sapo', tau_negative: 1.2}}",
        f"objective.correction=[{{mode: '{file}:tis', cap: 1.5}}]",
        f"objective.advantage={file}:centred",
    )
    runs.train("built-in", *BUILT_IN, f"num_steps={STEPS}")
    runs.train("own", *settings, "num_steps=2")
    assert len(runs.rows("own")) == 3  # two steps, and the validation after them
    runs.train("own", *settings, f"num_steps={STEPS}")
    assert runs.rows("own") == runs.rows("built-in")
    assert f"continues from step 2 of {STEPS}, checkpoint {runs.root / 'own'}" in runs.log("own")

    file.write_text(OWN.replace("4 / tau", "2 / tau"))
    before = runs.files("own")
    refused = runs.train("own", *settings, f"num_steps={STEPS + 1}", expect=2)
    for name in ("sapo", "tis", "centred"):
        assert f"\n  objective.{file}:{name}: " in refused.output, "the file is another one"
    assert "--allow-changes" in refused.last_line
    assert runs.files("own") == before
    runs.train("own", *settings, f"num_steps={STEPS + 1}", flags=("--allow-changes",))
    assert f" changed: objective.{file}:sapo: " in runs.log("own")
    assert runs.rows("own")[:STEPS] == runs.rows("built-in")[:STEPS]
