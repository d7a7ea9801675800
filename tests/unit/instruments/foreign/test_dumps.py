"""Rollout dumps of slime, miles and NeMo-RL as stored batches.

The files in dumps/ hold the batch of `original` as the projects' own code wrote it: slime's and miles'
`save_debug_rollout_data`, NeMo-RL's `Logger.log_batched_dict_as_jsonl` (versions: `dumps.READ_FROM`).
"""

from __future__ import annotations

import json
import pickle
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from megatron_rl.__main__ import main
from megatron_rl.config import foreign_keys
from megatron_rl.errors import InputError
from megatron_rl.instruments import rerun
from megatron_rl.instruments.foreign import dumps
from megatron_rl.routing import route_checksums
from megatron_rl.run.recorded_batches import RecordedBatch, batch_path, load_batch
from megatron_rl.types import Batch
from tests.support.routes import random_routes, with_routes
from tests.support.tiny import MODEL, stored_rollouts, tiny_recipe

FILES = {name: Path(__file__).with_name("dumps") / file
         for name, file in (("slime", "slime.pt"), ("miles", "miles.pt"), ("NeMo-RL", "nemo_rl.jsonl"))}  # fmt: skip
RECIPE = tiny_recipe(rollout={"num_samples": 2, "dtype": "bf16"}, learner={"dtype": "bf16"})


def original() -> Batch:
    """Six responses with routes and log-probs of the learner."""
    batch, random = stored_rollouts(0, num_sequences=6), np.random.default_rng(1)
    for s in batch.sequences:
        noise = random.normal(0, 0.1, s.response_length).astype(np.float32)
        s.current_logprobs = (s.inference_logprobs + noise).clip(max=0)
    return with_routes(batch, random_routes(batch))


def imported(tmp_path, project, **changes) -> tuple[RecordedBatch, dumps.Imported]:
    """The batch from disk, as the commands read it, and what was said of it."""
    read = dumps.read_dump(changes.pop("file", FILES[project]), changes.pop("recipe", RECIPE), **changes)
    path = dumps.write_run(read, RECIPE, tmp_path / "run")
    assert path == batch_path(tmp_path / "run" / "batches", 0)
    return load_batch(path), read


@pytest.mark.parametrize("project", FILES)
def test_every_number_is_that_of_the_batch(tmp_path, project):
    recorded, read = imported(tmp_path, project)
    assert read.project == project
    for ours, theirs in zip(original().sequences, recorded.batch.sequences, strict=True):
        for name in ("tokens", "inference_logprobs", "loss_mask"):
            assert (getattr(ours, name) == getattr(theirs, name)).all(), name
        assert (ours.prompt_length, ours.reward) == (theirs.prompt_length, theirs.reward)
        if project == "NeMo-RL":
            assert theirs.advantage == np.float32(ours.advantage)
            assert (theirs.current_logprobs == ours.current_logprobs).all()
            assert theirs.routed_experts is None
        else:
            assert theirs.current_logprobs is None
            assert (theirs.routed_experts == ours.routed_experts).all()
            sealed = route_checksums(theirs.id, theirs.tokens, theirs.routed_experts)
            assert (theirs.route_checksums == sealed).all()


def test_what_a_dump_lacks_is_said(tmp_path):
    assert [lack.partition(":")[0] for lack in imported(tmp_path / "a", "slime")[1].lacks] == [
        "advantages", "log-probs of the learner", "versions of the weights",
    ]  # fmt: skip
    assert [lack.partition(":")[0] for lack in imported(tmp_path / "b", "NeMo-RL")[1].lacks] == [
        "routes", "versions of the weights",
    ]  # fmt: skip


def test_advantages_are_made_of_the_rewards_of_a_group(tmp_path):
    """Groups of two, one of them right: (r - 1/2) over the deviation of the group."""
    sequences = imported(tmp_path, "slime")[0].batch.sequences
    for first, second in zip(sequences[::2], sequences[1::2], strict=True):
        assert first.advantage == -second.advantage < 0
        assert (first.reward, second.reward) == (0.0, 1.0)


class Learner:
    """Its log-probs differ from the engine's by its dtype, by its head, and by routes that are not the engine's."""

    architecture = SimpleNamespace(is_moe=True)

    def __init__(self, recipe) -> None:
        self.gap = 0.1 if recipe.learner.dtype == "fp32" else 0.2 if recipe.precision.fp32_head else 0.3

    def close(self) -> None:
        pass

    def compute_logprobs(self, batch, mode):
        gaps = [self.gap + (0.01 * (s.tokens[s.prompt_length :] % 5) if mode == "native" else 0)
                + (0 if s.routed_experts is None else 0.001 * s.routed_experts.sum(axis=(1, 2))[s.prompt_length - 1 :])
                for s in batch.sequences]  # fmt: skip
        return [s.inference_logprobs - gap for s, gap in zip(batch.sequences, gaps, strict=True)]


def split(monkeypatch, recorded: RecordedBatch) -> dict[str, float]:
    monkeypatch.setattr(rerun, "Learner", Learner)
    monkeypatch.setattr(rerun, "learner_at", lambda d, original, changed, *_: nullcontext((Learner(changed), "")))
    monkeypatch.setattr(rerun, "exported", lambda learner: nullcontext(MODEL))
    return {part.cause: part.variance for part in rerun.attribute(None, RECIPE, recorded, "exact").parts}


@pytest.mark.parametrize("project", FILES)
def test_the_split_is_that_of_the_original(tmp_path, monkeypatch, project):
    batch = original()
    if project == "NeMo-RL":  # which has no routes
        for s in batch.sequences:
            s.routed_experts = s.route_checksums = None
    ours = split(monkeypatch, RecordedBatch(batch, 0))
    theirs = split(monkeypatch, imported(tmp_path, project)[0])
    assert set(ours) - set(theirs) == (set() if project == "NeMo-RL" else {"staleness"})
    assert theirs == {cause: ours[cause] for cause in theirs}
    assert ("routing" in theirs) == (project != "NeMo-RL")


def test_replayed_routes_that_a_dump_lacks_are_named(tmp_path):
    recorded, _ = imported(tmp_path, "NeMo-RL")
    recipe = tiny_recipe(routing={"replay": "r3"}, rollout={"dtype": "bf16"}, learner={"dtype": "bf16"})
    with pytest.raises(InputError, match=r"replay: r3, but the batch has no routes: .* --set routing\.replay=off"):
        rerun.attribute(None, recipe, recorded, "exact")


def changed(tmp_path, **changes) -> Path:
    """slime's dump, with ``changes`` of its first sample."""
    content = torch.load(FILES["slime"], weights_only=True)
    content["samples"][0] |= changes
    torch.save(content, tmp_path / "d.pt")
    return tmp_path / "d.pt"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_log_probs": None}, "sample 0: no rollout_log_probs"),
        ({"rollout_log_probs": [-0.1]}, "rollout_logprobs has 1 numbers"),
        ({"rollout_log_probs": ["a"]}, "rollout_log_probs: expected a list of numbers"),
        ({"response_length": 99}, "response_length 99 of 24 tokens"),
        ({"reward": {"score": 1.0, "format": 0.0}}, "name one: --reward-key"),
        ({"rollout_routed_experts": torch.zeros(3, 4, 2)}, "routes [3, 4, 2]; the recipe's model has [23, 4, 2]"),
        ({"tokens": [10**6] * 24}, "it is not the model of this dump"),
    ],
)
def test_a_dump_that_does_not_fit_is_refused(tmp_path, changes, said):
    with pytest.raises(InputError, match=re.escape(said)):
        dumps.read_dump(changed(tmp_path, **changes), RECIPE)


def test_one_reward_of_several_and_responses_without_routes(tmp_path):
    file = changed(tmp_path, reward={"score": 0.0, "format": 1.0}, rollout_routed_experts=None)
    recorded, read = imported(tmp_path, "slime", file=file, reward_key="score")
    assert recorded.batch.sequences[0].reward == 0.0
    assert recorded.batch.sequences[1].routed_experts is None
    assert read.lacks[1].startswith("routes: 1 of 6 responses have none")


def test_no_code_of_a_file_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"samples": [{"tokens": Evil()}]}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match="that would run code of the file"):
        dumps.read_dump(tmp_path / "evil.pt", RECIPE)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"samples": [Evil()]}))
    with pytest.raises(InputError):
        dumps.read_dump(tmp_path / "plain.pt", RECIPE)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"input": "2+2", "output": "4", "gts": "4", "score": 1.0, "step": 3}\n', "a rollout dump of verl"),
        ("a.jsonl", '{"token_ids": [[1]]}\n', "no generation_logprobs, token_loss_mask"),
        ("a.jsonl", "[1]\n", "a list; expected an object"),
        ("a.jsonl", '{"a\n', "line 1: no JSON"),
        ("a.jsonl", "\n", "no response in it"),
        ("a.pt", "text", "it is not an archive"),
        ("b.pt", None, "no such file"),
    ],
)
def test_other_files_are_refused(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=re.escape(said)):
        dumps.read_dump(tmp_path / name, RECIPE)


def test_the_command_says_what_is_lacking_and_keeps_other_folders(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(json.loads(RECIPE.model_dump_json(exclude_defaults=True))))
    words = ["batch", "import-dump", str(FILES["miles"]), "--recipe", str(tmp_path / "recipe.yaml")]
    assert main([*words, "--output", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "miles, 6 responses of" in out
    assert "the dump lacks log-probs of the learner" in out
    assert main([*words, "--output", str(tmp_path / "run")]) == 2
    assert "it is there already" in capsys.readouterr().err


def test_the_mismatch_of_a_dump_is_that_of_its_log_probs(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(json.loads(RECIPE.model_dump_json(exclude_defaults=True))))
    words = ["batch", "import-dump", str(FILES["NeMo-RL"]), "--recipe", str(tmp_path / "recipe.yaml")]
    assert main([*words, "--output", str(tmp_path / "run")]) == 0
    kept = [(s.current_logprobs[s.loss_mask], s.inference_logprobs[s.loss_mask]) for s in original().sequences]
    learner, engine = (np.concatenate(parts).astype(np.float64) for parts in zip(*kept, strict=True))
    rho = np.exp(learner - engine)
    told = re.search(r"by its own log-probs: mismatch/rho_std (\S+), mismatch/rho_max (\S+),", capsys.readouterr().out)
    assert told.groups() == (f"{rho.std(ddof=1):.3g}", f"{rho.max():.3g}")
    assert dumps.mismatch_of(imported(tmp_path / "b", "slime")[1].batch) == {}


def test_versions_are_those_of_the_keys():
    for project, version in foreign_keys.READ_FROM.items():
        assert dumps.READ_FROM.get(project, version) == version
