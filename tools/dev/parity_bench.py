"""A bench for planted faults: the witnesses of `megatron-rl parity` on a small model, and ways to change one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.hf_folder import HFFolder, model_weights
from megatron_rl.config.model_rules import beyond_exact
from megatron_rl.instruments.parity import transformers_taps, vllm_taps, witnesses
from megatron_rl.instruments.parity.definition import Checkpoint
from megatron_rl.instruments.parity.families import FAMILIES
from megatron_rl.instruments.parity.record import Record, replaced
from megatron_rl.learner.model import DTYPES
from megatron_rl.model.architecture import read_architecture
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

Tensor = torch.Tensor
VOCABULARY = 120  # vLLM pads it to 128
LAYER = 1
"""Where a fault of one layer is planted: the second and last of the small models."""
PREFILL, DECODE = "vLLM prefill", "vLLM decode"
GENERATION = "exact generation"

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "deepseek_v3 yarn": (
        "deepseek_v3",
        {"rope_parameters": YARN, "q_lora_rank": 48, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    ),
}
"""Models that are not the small one of their family: the family, and other keys of config.json."""
MODELS = tuple(dict.fromkeys((*FAMILIES, *OPTIONS)))
WITH_EXPERTS = tuple(name for name in MODELS if FAMILIES[OPTIONS.get(name, (name,))[0]].experts)


def make_models(folder: Path, names: Sequence[str] = MODELS) -> dict[str, Path]:
    """Small random models: norms and biases are random, too. ``names``: some of `MODELS`."""
    made = {}
    for name in names:
        family, options = OPTIONS.get(name, (name, {}))
        model = build_model(build_tiny_config(family, "nano", vocab_size=VOCABULARY, **options))
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
                if key.endswith(("norm.weight", "bias")):
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=random))
        made[name] = folder / name.replace(" ", "_")
        save_checkpoint(model, made[name])
    return made


class Bench:
    """Witnesses of one model in fp32, each started when it is first asked for; use it as a context."""

    def __init__(self, model: Path, dtype: str = "fp32"):
        self.setup = replace(witnesses.of_model(model, dtype, device="cpu"), device="cpu")
        self.architecture, self.checkpoint = read_architecture(model), Checkpoint(model)
        self._stack, self._held, self._clean = ExitStack(), {}, {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.clear()
        self._stack.close()

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._held:
            self._held[name] = make()
        return self._held[name]

    @property
    def engine(self) -> Any:
        def start() -> Any:
            engine = witnesses.start_engine(self.setup)
            self._stack.callback(engine.close)
            return engine

        self.learner  # noqa: B018 - the learner joins the world first
        return self._once("engine", start)

    @property
    def vllm(self) -> torch.nn.Module:
        return vllm_taps.model_of(self.engine)

    @property
    def learner(self) -> torch.nn.Module:
        make = lambda: self._stack.enter_context(witnesses.learner_model(self.setup, self.architecture))  # noqa: E731
        return self._once("learner", make)

    @property
    def exact(self) -> torch.nn.Module:
        model = lambda: witnesses.learner_model(self.setup, self.architecture, exact=True)  # noqa: E731
        return self._once("exact", lambda: self._stack.enter_context(model()))

    @property
    def transformers(self) -> torch.nn.Module:
        make = lambda: transformers_taps.load(self.setup.model, DTYPES[self.setup.learner.dtype])  # noqa: E731
        return self._once("transformers", make)

    def records(self, who: str) -> list[Record]:
        """Of the witnesses of ``who``, as they are now."""
        setup, temperature = self.setup, self.setup.temperature
        if who == "vllm":
            return witnesses.vllm_records(setup, self.engine)
        if who == "learner":
            return [witnesses.learner_record(setup, self.architecture, self.learner)]
        if who == "transformers":
            return [transformers_taps.taps_of(self.transformers, setup.sequences, temperature)]
        if beyond_exact(self.architecture, 1) is not None:
            return []
        record = witnesses.learner_record(setup, self.architecture, self.exact, exact=True)
        witnesses.hold_against_generation(record, self.exact, self.architecture.vocab_size)
        return [record]

    def clean(self, who: str) -> list[Record]:
        if who not in self._clean:
            self._clean[who] = self.records(who)
        return self._clean[who]

    def under(self, fault: AbstractContextManager, witnesses_: Sequence[str], others: Sequence[str]) -> list[Record]:
        """Records of sound ``others``, and of ``witnesses_`` within the block of ``fault``."""
        sound = [record for who in others for record in self.clean(who)]
        with fault:
            return [*sound, *(record for who in witnesses_ for record in self.records(who))]


# -- ways to change one


@contextmanager
def changed(*edits: tuple[Tensor, Tensor]) -> Iterator[None]:
    """Within the block, each first tensor has the values of the second."""
    before = [target.detach().clone() for target, _ in edits]
    values = [value.detach().clone() for _, value in edits]
    with torch.no_grad():
        for (target, _), value in zip(edits, values, strict=True):
            target.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for (target, _), value in zip(edits, before, strict=True):
                target.copy_(value)


def valued(owner: Any, name: str, value: Any) -> AbstractContextManager:
    return replaced(owner, name, lambda before: value)


def output_of(module: torch.nn.Module, change: Callable[[Any], Any]) -> AbstractContextManager:
    """Within the block, ``module`` returns ``change`` of what it computes."""

    def make(forward: Callable) -> Callable:
        return lambda *args, **kwargs: change(forward(*args, **kwargs))

    return replaced(module, "forward", make)


@contextmanager
def updated(bench: Bench, change: Callable[[str, Tensor, HFFolder], Tensor]) -> Iterator[None]:
    """Within the block, vLLM has weights that ``change(name, tensor, folder)`` returned, by a weight update."""
    folder = HFFolder(bench.setup.model)

    def weights(edit: bool) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model_weights(folder, bench.architecture):
            yield name, change(name, tensor, folder) if edit else tensor

    bench.engine.refit(weights(True), 0)
    try:
        yield
    finally:
        bench.engine.refit(weights(False), 0)
