"""Parts of a step on the tiny model, each against what it cannot be faster than: `python -m tools.bench NAME`.

Sides alternate in one process, and a ratio is of one round (tools/bench/lib/timing.py).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM

from megatron_rl.batch import build_batch
from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.data import load_prompts, load_tokenizer
from megatron_rl.layers.attention import PackedSequences
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.logprobs import token_logprobs
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.routing import RouteShape, pack_routes, packed_keys, route_checksums
from megatron_rl.run.engines import start_generator
from megatron_rl.types import Prompt
from tools.bench.lib.cases import made_up_batch
from tools.bench.lib.timing import alternate, median_ratio, medians, spread

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny"


def tiny(name: str = "grpo", *changes: str, length: int = 64) -> Recipe:
    """A tiny recipe whose responses all have ``length`` tokens, and whose updates change nothing."""
    fixed = [f"rollout.max_response_length={length}", "rollout.stop_token_ids=[]", "learner.optimizer.lr=1e-9"]
    return load_recipe(TINY / f"{name}.yaml", [*fixed, "runtime.device=cpu", *changes])


def first_prompts(recipe: Recipe, number: int) -> list[Prompt]:
    tokenizer = load_tokenizer(str(recipe.model.path))
    return list(load_prompts(recipe.data.train, tokenizer, recipe.data.prompt))[:number]


def learner(rounds: int = 15, sizes: tuple[tuple[int, int], ...] = ((8, 256), (64, 70))) -> None:
    """Forward and backward of the learner's model against the same model in transformers, fp32."""
    ours = Learner(tiny())
    path, vocabulary = ours.recipe.model.path, ours.architecture.vocab_size
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    theirs.set_experts_implementation("grouped_mm")  # the fastest of its implementations on a CPU
    for number, length in sizes:
        tokens = torch.randint(3, vocabulary, (number, length), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(number * length).reshape(number, length)[:, :-1].flatten()
        packed = PackedSequences.from_lengths([length] * number, torch.device("cpu"))
        ours.module.rotary_pos_emb.position_ids = torch.arange(length).repeat(number)

        def megatron(tokens: Any = tokens, positions: Any = positions, packed: Any = packed) -> torch.Tensor:
            logits = ours.module(tokens.reshape(1, -1), None, None, packed_seq_params=packed).flatten(0, 1)
            return token_logprobs(logits, positions, tokens[:, 1:].flatten(), vocab_size=vocabulary)[0].mean()

        def transformers(tokens: Any = tokens) -> torch.Tensor:
            return theirs(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()

        difference = (megatron() - transformers()).abs().item()
        assert difference < 1e-5, f"the models disagree by {difference}: nothing to compare"
        sides = {"ours": lambda: megatron().backward(), "transformers": lambda: transformers().backward()}
        times = alternate(rounds, sides)
        seconds = {name: f"{median:.3f} s" for name, median in medians(times).items()}
        print(
            f"{number} × {length} tokens: {seconds}; transformers / ours {spread(times['transformers'], times['ours'])}"
        )


def refit(rounds: int = 15) -> None:
    """An update of the engine's weights, and the learner's stream alone, against a copy of the same bytes."""
    recipe = tiny("grpo", "learner.dtype=bf16", "rollout.dtype=bf16")
    ours, engine = Learner(recipe), VllmGenerator(recipe.rollout, recipe.model.path, max_prompt_length=16)
    copies = {name: tensor.clone() for name, tensor in ours.export_weights()}
    sources = {name: tensor.clone() for name, tensor in copies.items()}
    sides = {
        "memcpy": lambda: [copies[name].copy_(tensor) for name, tensor in sources.items()],
        "export": lambda: [None for _ in ours.export_weights()],
        "refit": lambda: engine.refit(ours.export_weights(), 0),
    }
    times = alternate(rounds, sides)
    print(f"{len(copies)} tensors, {sum(tensor.nbytes for tensor in copies.values())} bytes")
    for name, median in medians(times).items():
        print(f"{name:<7} {1e3 * median:9.2f} ms, {median_ratio(times[name], times['memcpy']):7.1f} × memcpy")
    engine.close()


def servers(rounds: int = 9, prompts: int = 8, group: int = 8, length: int = 64) -> None:
    """A batch of responses and a push of weights: a server on this machine against an engine in this process.

    By the clock on the wall, because a server is another process: nothing else should run.
    """
    with tempfile.TemporaryDirectory() as folder:
        changes = ("name=bench", f"run_root={folder}", "rollout.max_staleness=0", "rollout.servers.launch=1")
        recipe = tiny("servers", *changes, length=length)
        file = Path(folder) / "bench" / "recipe.resolved.yaml"
        file.parent.mkdir()
        file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        model, asked = recipe.model.path, first_prompts(recipe, prompts)
        longest = recipe.data.prompt.max_length
        server = ServerGenerator(
            recipe.rollout, model, max_prompt_length=longest, run_dir=file.parent, recipe_file=file
        )
        engine = VllmGenerator(recipe.rollout, model, max_prompt_length=longest)
        weights = list(HFFolder(model).items())

        def batch(engine: Any) -> list[list[int]]:
            groups = engine.rollout(asked, group, policy_version=0, step=0)
            return [rollout.tokens.tolist() for one in groups for rollout in one.rollouts]

        assert batch(server) == batch(engine), "other responses: nothing to compare"
        sides = {
            "batch": {"server": partial(batch, server), "engine": partial(batch, engine)},
            "weights": {
                "server": lambda: server.refit(iter(weights), 0),
                "engine": lambda: engine.refit(iter(weights), 0),
            },
        }
        for what, both in sides.items():
            times = alternate(rounds, both, clock=time.perf_counter)
            shown = ", ".join(f"{name} {1e3 * median:.1f} ms" for name, median in medians(times).items())
            print(f"{what}: {shown}; server / engine {spread(times['server'], times['engine'])}")
        server.close()
        engine.close()


def replay(rounds: int = 5, length: int = 8192) -> None:
    """What a rank does with routes of Qwen3-30B-A3B's shape in a step, µs a token."""
    shape = RouteShape(128, 8, tuple(range(48)))
    batch, layers, random = made_up_batch(2, length // 8, length - length // 8), range(48), np.random.default_rng(0)
    for s in batch.sequences:
        scores = random.random((s.whole_length - 1, 48, 128), dtype=np.float32)
        s.routed_experts = np.argpartition(scores, 8, axis=-1)[..., :8].astype(shape.dtype)
        s.route_checksums = route_checksums(s.id, s.whole, s.routed_experts)
    sequences, num_tokens = batch.sequences, sum(s.whole_length for s in batch.sequences)
    packed = pack_routes(sequences, 0, shape)
    tokens, positions = (np.concatenate(x) for x in zip(*((s.whole, np.arange(s.whole_length)) for s in sequences)))
    keys = packed_keys(tokens, positions, [s.id for s in sequences], [s.whole_length for s in sequences])

    def take() -> Any:
        """A rank's rows and layers, proved against the tensors that the model gets."""
        routes = packed.take([(0, num_tokens)], layers)
        routes.verify(keys, layers, shape)
        routes.settle()
        return routes

    taken = take()
    sides = {
        "checksums": lambda: [route_checksums(s.id, s.whole, s.routed_experts) for s in sequences],
        "check": lambda: pack_routes(sequences, 0, shape),
        "slice": take,
        "each pass": lambda: taken.on(torch.device("cpu")),
    }
    costs = {name: 1e6 * seconds / num_tokens for name, seconds in medians(alternate(rounds, sides)).items()}
    print(
        f"{shape.bytes_per_token} bytes a token; " + ", ".join(f"{name} {cost:.2f} µs" for name, cost in costs.items())
    )


def exact(rounds: int = 5, sizes: tuple[int, ...] = (8, 32, 128), length: int = 64) -> None:
    """Generation and update of exact mode against vLLM's and the ordinary learner's, fp32.

    Exact generation cannot be faster than a forward pass of the same tokens in whole rows.
    """
    common = ("rollout.verify_refit=false", "data.prompt.max_length=8", "reward={name: modsum}")
    both = [Learner(tiny("grpo", f"rollout.engine={name}", *common, length=length)) for name in ("exact", "vllm")]
    decoder = SimpleNamespace(decode=lambda tokens, **_: "")  # no side needs text
    engines = [start_generator(one.recipe, decoder, one) for one in both]
    for size in sizes:
        random = np.random.default_rng(size)
        asked = [Prompt(f"p:{i}", random.integers(3, 98, 8).tolist(), "") for i in range(size)]
        ours, plain = (partial(engine.rollout, asked, 1, policy_version=0, step=0) for engine in engines)
        batch = build_batch(0, ours(), both[0].recipe.batch, both[0].recipe.objective)
        sides: dict[str, Callable[[], object]] = {"exact": ours, "vLLM": plain}
        sides["forward"] = partial(both[0].compute_logprobs, batch)
        sides |= {name: partial(one.update, batch) for name, one in zip(("exact update", "update"), both)}
        times = medians(alternate(rounds, sides))
        rates = ", ".join(f"{name} {size * length / seconds:.0f}" for name, seconds in times.items())
        print(f"{size} sequences, tokens a second: {rates}; exact / forward {times['exact'] / times['forward']:.1f}")
    engines[1].close()


ALL = {function.__name__: function for function in (learner, refit, servers, replay, exact)}
