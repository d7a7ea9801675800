"""Real servers under weights that change while they sample, and what every token should be by its version.

Two sets of weights take turns under rising versions. What each token should be is computed from its versions alone, by
Hugging Face's model: under `abort_and_resume` each leg anew from the start, under `keep` token by token with the keys
and values that earlier weights left.
"""

import asyncio
import contextlib
import functools
import itertools
import shutil
from collections.abc import Callable, ItemsView, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config import Recipe
from megatron_rl.rollout.servers.dispatch import Legs
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.routing import route_checksums
from megatron_rl.types import Group, Prompt, Rollout
from tests.e2e.hf_reference import load
from tests.support.patience import PATIENCE_S
from tests.support.rounding import bound_from_double
from tests.support.tiny import MODEL, tiny_recipe

TOKEN = "token-of-the-servers-in-this-test"
LONGEST_PROMPT, TOP_K = 80, 2


def two_models(folder: Path, model: Path = MODEL) -> list[Path]:
    """Two checkpoints: of the trained weights, and of these moved by a quarter of their own spread."""
    other = folder / "model"
    shutil.copytree(model, other)
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: tensor + 0.25 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in HFFolder(model).items()
    }
    save_file(moved, other / "model.safetensors", metadata={"format": "pt"})
    return [model, other]


def served_recipe(run_dir: Path, length: int, model: Path = MODEL, **rollout: Any) -> tuple[Recipe, Path]:
    """The recipe of servers for responses of ``length`` tokens, and a file of it in ``run_dir``, which is made."""
    run_dir.mkdir()
    recipe = tiny_recipe(
        name=run_dir.name,
        run_root=str(run_dir.parent),
        model={"path": str(model)},
        rollout={
            "engine": "vllm_server",
            "dtype": "fp32",
            "max_response_length": length,
            "stop_token_ids": [],
            "kv_cache_gib": 0.0625,
            "max_num_seqs": 8,
            "max_staleness": 1,
            "verify_refit": False,
            **rollout,
        },
        routing={"replay": "r3"},
        data={"prompt": {"max_length": LONGEST_PROMPT}},
        objective={"max_response_length": length},
    )
    file = run_dir / "recipe.resolved.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    return recipe, file


def generator_on(
    run_dir: Path, recipe: Recipe, mode: str, recipe_file: Path | None = None, **servers: Any
) -> ServerGenerator:
    """A trainer's generator on the servers of ``run_dir``: two, unless ``servers`` say otherwise.

    ``version``: of the newest weights.
    """
    values = recipe.rollout.model_dump() | {"in_flight": {"mode": mode}}
    values["servers"] = {"count": 2, "health_every_s": 0.5, "wait_s": 550.0, "request_deadline_s": 120.0, **servers}
    config = type(recipe.rollout).model_validate(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_SERVER_TOKEN", TOKEN)
        made = ServerGenerator(
            config,
            recipe.model.path,
            max_prompt_length=LONGEST_PROMPT,
            run_dir=run_dir,
            recipe_file=recipe_file,
            record_routes=True,
        )
    made.version = 0
    return made


def prompts(number: int, seed: int) -> list[Prompt]:
    """Some longer than a block of the prefix cache (64 tokens), all of whose samples share it."""
    random = np.random.default_rng(seed)
    lengths = [72, 5, 30, 66, 12, 80, 7, 40]
    return [Prompt(f"p{seed}:{i}", random.integers(3, 98, lengths[i % 8]).tolist(), "") for i in range(number)]


def weights(models: list[Path], version: int) -> ItemsView[str, torch.Tensor]:
    """Those of ``version``; they can be sent again."""
    return tensors_of(models[version % 2]).items()


@functools.cache
def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(HFFolder(path).items())


def update(generator: ServerGenerator, models: list[Path]) -> None:
    """The next version, and wait until some server holds it."""
    generator.version += 1
    generator.refit(weights(models, generator.version), generator.version)
    pool = generator._servers.pool
    wait(generator, lambda: pool.weights.version == generator.version and bool(pool.ready))


def cut(generator: ServerGenerator, models: list[Path], ticket: Any, times: int = 6) -> None:
    """Updates while ``ticket`` is sampled."""
    for _ in range(times):
        asyncio.run(asyncio.sleep(0.1))
        if ticket.answers.done():
            return
        update(generator, models)


def wait(generator: ServerGenerator, condition: Callable[[], bool]) -> None:
    """Until ``condition``, asked in the generator's event loop."""
    generator._main.submit(until(condition)).result(PATIENCE_S)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


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
    """Where keys, values and states stay as they were computed when a token was first read, until an update that fails
    cuts the response: its next leg reads everything anew. transformers' delta nets go on by one token at a time."""
    tokens, past, parts, start = rollout.tokens.tolist(), None, [], 0
    starts = np.cumsum([0, *LEGS.get(f"{prompt.id}/{rollout.sample}", [])])
    changes = 1 + np.flatnonzero(np.diff(rollout.policy_versions))
    for end in sorted({*starts[1:].tolist(), *changes.tolist(), len(tokens)}):
        model = load(models[rollout.policy_versions[start] % 2], dtype)
        if start in starts:
            new, first = [*prompt.tokens, *tokens[: end - 1]], start and len(prompt.tokens) + start - 1
            part, past = read(model, new, tokens[start:end])
            parts.append(Expected(part.logprobs, part.router[first:]))
        else:
            together = 1 if hasattr(model.config, "linear_conv_kernel_dim") else end - start
            for place in range(start, end, together):
                after = place + together
                part, past = read(model, tokens[place - 1 : after - 1], tokens[place:after], past)
                parts.append(part)
        start = end
    return Expected(np.concatenate([x.logprobs for x in parts]), np.concatenate([x.router for x in parts]))


LEGS: dict[str, list[int]] = {}  # of responses that were put together under `recorded_legs`: tokens of each leg


@contextlib.contextmanager
def recorded_legs() -> Iterator[None]:
    """Note the legs of every response of several, by its name."""
    whole = Legs.whole

    def noted(legs: Legs) -> Rollout:
        LEGS[legs.body["id"]] = [len(answer.tokens) for answer in legs.answers]
        return whole(legs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Legs, "whole", noted)
        yield
    LEGS.clear()  # other files have responses of the same names


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
        return bound_from_double(
            np.concatenate(rough), np.concatenate(exact), longest_sum=max(e.router.shape[0] for e in double)
        )

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
    assert compared, "nothing was compared"


def first_row(wrong: np.ndarray) -> int:
    """The first place where ``wrong`` is true; its length where none is."""
    return int(wrong.argmax()) if wrong.any() else len(wrong)
