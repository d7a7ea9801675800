"""Weights that change while real servers sample: every token's log-prob and routes are those of the policy that is said
to have sampled it, in each mode of `rollout.in_flight`, and every response comes once, whichever server dies.

Two sets of weights take turns under rising versions. What each token should be is computed from its versions alone, by
Hugging Face's model: under `abort_and_resume` each leg anew from the start, under `keep` token by token with the keys
and values that earlier weights left.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.rollout import Sampling
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.rollout.servers.local import LocalServers
from megatron_rl.routing import route_checksums
from megatron_rl.types import Group, Prompt, Rollout
from tests.e2e.hf_reference import load
from tests.support.rounding import bound_from_double
from tests.support.tiny import MODEL, tiny_recipe

TOKEN = "token-of-the-servers-in-this-test"
LENGTH, LONGEST_PROMPT, TOP_K = 160, 80, 2
SAMPLING = Sampling(LENGTH)
ROLLOUT = {
    "engine": "vllm_server",
    "dtype": "fp32",
    "max_response_length": LENGTH,
    "stop_token_ids": [],
    "kv_cache_gib": 0.0625,
    "max_num_seqs": 8,
    "max_staleness": 1,
}
MODES = ("abort_and_resume", "keep")


def prompts(number: int, seed: int) -> list[Prompt]:
    """Some longer than a block of the prefix cache (64 tokens), all of whose samples share it."""
    random = np.random.default_rng(seed)
    lengths = [72, 5, 30, 66, 12, 80, 7, 40]
    return [Prompt(f"p{seed}:{i}", random.integers(3, 98, lengths[i % 8]).tolist(), "") for i in range(number)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Two checkpoints: of the trained weights, and of these moved by a quarter of their own spread."""
    other = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(MODEL, other)
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: tensor + 0.25 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in HFFolder(MODEL).items()
    }
    save_file(moved, other / "model.safetensors", metadata={"format": "pt"})
    return [MODEL, other]


def weights(models: list[Path], version: int):
    return HFFolder(models[version % 2]).items()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers, which every mode uses: the mode is the trainer's."""
    run_dir = tmp_path_factory.mktemp("run") / "served"
    run_dir.mkdir()
    recipe = tiny_recipe(
        name=run_dir.name,
        run_root=str(run_dir.parent),
        rollout=ROLLOUT | {"verify_refit": False},
        routing={"replay": "r3"},
        data={"prompt": {"max_length": LONGEST_PROMPT}},
        objective={"max_response_length": LENGTH},
    )
    file = run_dir / "recipe.resolved.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    local = LocalServers(2, file, run_dir, TOKEN)
    yield run_dir, local, recipe
    local.close()


@pytest.fixture(scope="module", params=MODES)
def generator(request, servers):
    run_dir, local, recipe = servers
    local.relaunch(print)
    config = recipe.rollout.model_validate(
        ROLLOUT
        | {"in_flight": {"mode": request.param}}
        | {"servers": {"count": 2, "health_every_s": 0.5, "wait_s": 550.0, "request_deadline_s": 120.0}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_SERVER_TOKEN", TOKEN)
        made = ServerGenerator(config, MODEL, max_prompt_length=LONGEST_PROMPT, run_dir=run_dir, record_routes=True)
    made.version = 0
    yield made
    made.close()


def update(generator: ServerGenerator, models: list[Path]) -> None:
    """The next version, and wait until some server holds it."""
    generator.version += 1
    generator.refit(weights(models, generator.version), generator.version)
    reached = until(
        lambda: generator._servers.pool.weights.version == generator.version and generator._servers.pool.ready
    )
    generator._main.submit(reached).result(120)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def cut(generator: ServerGenerator, models: list[Path], ticket, times: int = 6) -> None:
    """Updates while ``ticket`` is sampled."""
    for _ in range(times):
        asyncio.run(asyncio.sleep(0.1))
        if ticket.answers.done():
            return
        update(generator, models)


def flat(groups: list[Group]) -> list[tuple[Prompt, Rollout]]:
    return [(group.prompt, rollout) for group in groups for rollout in group.rollouts]


def runs_of(rollout: Rollout) -> list[tuple[int, int]]:
    return [(int(version), len(list(tokens))) for version, tokens in itertools.groupby(rollout.policy_versions)]


@dataclass
class Expected:
    """One response as a Hugging Face model has it."""

    logprobs: np.ndarray  # [R]
    router: np.ndarray  # [P + R - 1, L, E] router logits

    @property
    def routes(self) -> np.ndarray:
        """[P + R - 1, L, K], sorted."""
        return np.sort(np.argsort(-self.router, -1, kind="stable")[..., :TOP_K], -1)

    @property
    def margins(self) -> np.ndarray:
        """[P + R - 1]: least distance of a row between the last expert that is taken and the first that is not."""
        ordered = -np.sort(-self.router, -1)
        return (ordered[..., TOP_K - 1] - ordered[..., TOP_K]).min(-1)


def read(model, tokens: list[int], labels: list[int], past=None) -> tuple[Expected, Any]:
    """What ``model`` makes of ``tokens`` after ``past``: log-probs of ``labels``, which follow the last ones."""
    output = model(input_ids=torch.tensor([tokens]), past_key_values=past, use_cache=True, output_router_logits=True)
    logprobs = output.logits[0, -len(labels) :].double().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(labels)[:, None])[:, 0]
    router = torch.stack([logits.double() for logits in output.router_logits], 1)
    return Expected(chosen.numpy(), router.numpy()), output.past_key_values


@torch.no_grad()
def anew(models: list[Path], prompt: Prompt, rollout: Rollout, dtype: torch.dtype) -> Expected:
    """Where the policy of a token read everything before it."""
    tokens = rollout.tokens.tolist()
    both = [read(load(path, dtype), [*prompt.tokens, *tokens[:-1]], tokens)[0] for path in models]
    which = rollout.policy_versions % 2
    of_row = np.concatenate([np.full(len(prompt.tokens) - 1, which[0]), which])
    router = np.where(of_row[:, None, None] == 0, both[0].router, both[1].router)
    return Expected(np.where(which == 0, both[0].logprobs, both[1].logprobs), router)


@torch.no_grad()
def with_kept_cache(models: list[Path], prompt: Prompt, rollout: Rollout, dtype: torch.dtype) -> Expected:
    """Where keys and values stay as they were computed when a token was first read."""
    tokens, past, start, parts = rollout.tokens.tolist(), None, 0, []
    for version, count in runs_of(rollout):
        new = [*prompt.tokens, *tokens[: count - 1]] if not start else tokens[start - 1 : start + count - 1]
        part, past = read(load(models[version % 2], dtype), new, tokens[start : start + count], past)
        parts.append(part)
        start += count
    return Expected(np.concatenate([x.logprobs for x in parts]), np.concatenate([x.router for x in parts]))


def assert_sampled_as_said(generator: ServerGenerator, models: list[Path], groups: list[Group]) -> None:
    """Every token's log-prob and every route is what its version says.

    A response is compared up to the first row in which two experts are so close that rounding decides between them:
    whatever follows depends on that choice.
    """
    reference = with_kept_cache if generator._config.in_flight.mode == "keep" else anew
    double, single = (
        [reference(models, prompt, rollout, dtype) for prompt, rollout in flat(groups)]
        for dtype in (torch.float64, torch.float32)
    )
    agree = [first_row((a.routes != b.routes).any((1, 2))) for a, b in zip(double, single, strict=True)]
    starts = [len(prompt.tokens) - 1 for prompt, _ in flat(groups)]  # the row whose output is the first token's

    def bound(field: str) -> float:
        ends = agree if field == "router" else [max(0, row - start) for row, start in zip(agree, starts, strict=True)]
        rough, exact = ([getattr(x, field)[:end].ravel() for x, end in zip(y, ends)] for y in (single, double))
        return bound_from_double(np.concatenate(rough), np.concatenate(exact), longest_sum=LONGEST_PROMPT + LENGTH)

    of_logprobs, of_router, compared = bound("logprobs"), bound("router"), 0
    for (prompt, rollout), expected, row, start in zip(flat(groups), double, agree, starts, strict=True):
        row = min(row, first_row(expected.margins <= 2 * of_router))
        error = np.abs(rollout.inference_logprobs - expected.logprobs)[: max(0, row - start)]
        compared += len(error)
        assert (error <= of_logprobs).all()
        assert (np.sort(rollout.routed_experts, -1) == expected.routes)[:row].all()
        whole = np.concatenate([prompt.tokens, rollout.tokens])
        seals = route_checksums(f"{prompt.id}/{rollout.sample}", whole, rollout.routed_experts)
        assert (rollout.route_checksums == seals).all()
    assert compared > sum(rollout.length for _, rollout in flat(groups)) / 2, "too little was compared"


def first_row(wrong: np.ndarray) -> int:
    """The first place where ``wrong`` is true; its length where none is."""
    return int(wrong.argmax()) if wrong.any() else len(wrong)


class TestInFlight:
    def test_every_token_is_of_the_policy_that_is_said_to_have_sampled_it(self, generator, models):
        ticket = generator.begin(prompts(6, 1), 4, policy_version=generator.version, step=0)
        begun_with = generator.version
        cut(generator, models, ticket)
        groups = generator.finish(ticket)
        assert [rollout.length for _, rollout in flat(groups)] == [LENGTH] * 24
        assert {rollout.finish_reason for _, rollout in flat(groups)} == {"length"}
        number = [len(runs_of(rollout)) for _, rollout in flat(groups)]
        assert max(number) > 1
        versions = np.concatenate([rollout.policy_versions for _, rollout in flat(groups)])
        assert begun_with <= versions.min() <= versions.max() <= generator.version
        assert_sampled_as_said(generator, models, groups)
        stats = generator.stats()
        assert stats["rollout/versions_mean"] == sum(number) / len(number)
        cuts = generator._config.in_flight.mode == "abort_and_resume"
        assert stats["rollout/legs_mean"] == (stats["rollout/versions_mean"] if cuts else 1)
        assert (stats["rollout/recomputed_tokens"] > 0) == cuts
        # The test can tell: with every change of version a token later, some log-prob is far off.
        for _, rollout in flat(groups):
            rollout.policy_versions[1:] = rollout.policy_versions[:-1].copy()
        with pytest.raises(AssertionError):
            assert_sampled_as_said(generator, models, groups)

    def test_what_is_asked_for_at_once_is_of_one_policy_and_meets_no_older_cache(self, generator, models):
        """Validation in the middle of a batch, of prompts that the batch has left in the prefix cache."""
        ticket = generator.begin(prompts(6, 2), 2, policy_version=generator.version, step=0)
        cut(generator, models, ticket, times=2)
        asked = generator.rollout(prompts(6, 2), 2, policy_version=generator.version, step=1, sampling=SAMPLING)
        versions = {int(v) for _, rollout in flat(asked) for v in rollout.policy_versions}
        assert versions == {generator.version}
        assert_sampled_as_said(generator, models, asked)
        assert_sampled_as_said(generator, models, generator.finish(ticket))

    def test_two_batches_at_once_the_first_one_first(self, generator, models):
        first = generator.begin(prompts(6, 3), 4, policy_version=generator.version, step=0)
        second = generator.begin(prompts(6, 4), 4, policy_version=generator.version, step=1)
        cut(generator, models, second, times=3)
        groups = generator.finish(first)
        assert not second.answers.done()
        assert_sampled_as_said(generator, models, groups)
        assert_sampled_as_said(generator, models, generator.finish(second))

    @pytest.mark.parametrize("fault", ["tampered", "killed"])
    def test_a_fault_costs_no_response_and_doubles_none(self, generator, models, servers, fault):
        ticket = generator.begin(prompts(6, 5), 4, policy_version=generator.version, step=0)
        victim = next(member for member in generator._servers.pool.members.values() if not member.lost)
        generator._main.submit(until(lambda: victim.in_flight > 0)).result(60)
        cut(generator, models, ticket, times=1)
        if fault == "killed":
            os.kill(victim.address.pid, signal.SIGSTOP)  # it hangs first: its answers do not come
            generator._main.submit(until(lambda: victim.in_flight > 0)).result(60)
            os.kill(victim.address.pid, signal.SIGKILL)
        else:
            generator._main.submit(until(lambda: victim.in_flight > 0)).result(60)
            generator._main.submit(victim.client.checksums()).result(60)  # may have changed weights: it closes
        groups = generator.finish(ticket)
        assert [rollout.length for _, rollout in flat(groups)] == [LENGTH] * 24
        assert generator.stats()["rollout/requeued"] > 0
        assert_sampled_as_said(generator, models, groups)
