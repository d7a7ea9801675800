"""Runs every witness over the same tokens, one after the other, so that one model is in memory at a time.

`write_first_layers` cuts a model that is too large down to its first layers, at full width.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from megatron_rl.checkpoint.hf_folder import HFFolder, check_weights, model_shapes, model_weights, write_hf_checkpoint
from megatron_rl.checkpoint.manifest import list_checkpoints
from megatron_rl.checkpoint.shards import WeightMap
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.learner import LearnerConfig, PrecisionConfig
from megatron_rl.config.model_rules import beyond_exact
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.exact.decode import Decoder
from megatron_rl.exact.generator import GivenTokens
from megatron_rl.instruments.parity import learner_taps, transformers_taps, vllm_taps
from megatron_rl.instruments.parity.record import Record, place
from megatron_rl.instruments.plan.hardware import GIB
from megatron_rl.instruments.plan.learner import BYTES
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.logprobs import token_logprobs
from megatron_rl.learner.model import DTYPES, build_model
from megatron_rl.learner.process_groups import initialize
from megatron_rl.model.architecture import Architecture, read_architecture, read_object
from megatron_rl.model.names import stored_tensors
from megatron_rl.monitor import RunDirectory
from megatron_rl.process.devices import default_device
from megatron_rl.process.ranks import broadcast_object, world_rank, world_size
from megatron_rl.rollout.vllm_engine import VllmGenerator

ALL = ("transformers", "learner", "exact", "vllm")
LENGTHS = (70, 24, 9)
"""Tokens of the sequences where none are given: one is longer than a block of vLLM's cache (64 on a CPU) and of exact
mode's, and all are packed into one row of the learner."""
_TF32_PRODUCT = 2.0**-10  # both factors are rounded to 11 bits


@dataclass(frozen=True)
class Setup:
    """What is compared. ``witnesses``: some of `ALL`. ``sequences``: tokens, at least two in each."""

    model: Path
    learner: LearnerConfig
    rollout: RolloutConfig
    sequences: tuple[tuple[int, ...], ...]
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    device: str = "auto"
    witnesses: tuple[str, ...] = ALL

    @property
    def temperature(self) -> float:
        return self.rollout.temperature or 1.0


def of_model(model: Path, dtype: str, tokens: Sequence[Sequence[int]] = (), device: str = "auto") -> Setup:
    """Return the setup of a model's folder: both engines in ``dtype``."""
    rollout = RolloutConfig.model_validate({"dtype": dtype, "max_response_length": 1})
    precision = PrecisionConfig(fp32_router=read_architecture(model).router_in_fp32)
    return _checked(Setup(model, LearnerConfig(dtype=dtype), rollout, tuple(map(tuple, tokens)), precision, device))


def of_types(recipe: Recipe, device: str = "auto") -> Setup:
    """Set up a recipe's model in its types, on one rank, with weights not rounded."""
    rollout = RolloutConfig.model_validate({"dtype": recipe.rollout.dtype, "max_response_length": 1})
    learner = LearnerConfig(dtype=recipe.learner.dtype)
    return _checked(Setup(recipe.model.path, learner, rollout, (), recipe.precision, device))


def of_recipe(recipe: Recipe, tokens: Sequence[Sequence[int]] = ()) -> Setup:
    """Return the setup of a recipe: its dtypes, layout, precision and temperature."""
    quantized = recipe.rollout.quantization
    if quantized.weights or quantized.kv_cache:
        name = "weights" if quantized.weights else "kv_cache"
        raise InputError(
            f"parity: rollout.quantization.{name} is {getattr(quantized, name)}: vLLM computes with other numbers than "
            f"the checkpoint holds. Compare without: --set rollout.quantization.{name}=null"
        )
    if recipe.rollout.tensor_parallel > 1:
        raise InputError(
            f"parity: rollout.tensor_parallel is {recipe.rollout.tensor_parallel}; parity does not put parts of vLLM's "
            "layers together. Compare with --set rollout.tensor_parallel=1"
        )
    setup = Setup(
        recipe.model.path,
        recipe.learner,
        recipe.rollout,
        tuple(map(tuple, tokens)),
        recipe.precision,
        recipe.runtime.device,
    )
    return _checked(setup)


def of_run(folder: Path, overrides: Sequence[str], tokens: Sequence[Sequence[int]], scratch: Path) -> Setup:
    """Return the setup of a run's recipe and newest checkpoint, whose weights are written to ``scratch`` as a model's
    folder. Collective."""
    directory = RunDirectory(folder)
    if not directory.recipe.is_file():
        raise InputError(
            f"parity: {folder} is neither a model's folder (config.json) nor a run directory ({directory.recipe.name})"
        )
    recipe = load_recipe(directory.recipe, overrides)
    checkpoints = list_checkpoints(directory.checkpoints)
    if not checkpoints:
        raise InputError(f"parity: {directory.checkpoints} holds no checkpoint; give the recipe instead of the run")
    setup = of_recipe(recipe, tokens)
    learner = Learner(recipe)
    learner.load(checkpoints[-1])
    model = Path(broadcast_object(str(scratch / "model")))
    learner.export_hf(model)
    learner.close()
    return replace(setup, model=model)


def of_first_layers(setup: Setup, num_layers: int, scratch: Path) -> Setup:
    """``setup`` with the first layers of its model alone, which are written to ``scratch``. Collective."""
    initialize(setup.learner.parallel, setup.device, seed=0)
    model = Path(broadcast_object(str(scratch / setup.model.name)))
    write_first_layers(setup.model, num_layers, model)
    return replace(setup, model=model)


SPARE_HOST_GIB = 3.0
"""Python, and the code of both engines."""
BOUNDED_BYTES = 16
"""Bytes a number in float64: the value, and its bound."""


def host_gib(setup: Setup, a: Architecture) -> float:
    """Host memory that a comparison of a model of shape ``a`` takes, in GiB.

    It is one model (on a GPU: transformers'), the taps of all witnesses, and the model in float64, whose weights are
    read one tensor at a time.
    """
    size = BYTES[max((setup.learner.dtype, setup.rollout.dtype), key=BYTES.__getitem__)]
    tensors = [math.prod(shape) for entry in stored_tensors(a) for shape in entry.hf_shapes]
    num_witnesses = sum(2 if name in ("exact", "vllm") else 1 for name in setup.witnesses)
    device = default_device() if setup.device == "auto" else setup.device
    on_host = "transformers" in setup.witnesses or device == "cpu"
    tokens, moe, rows = sum(map(len, setup.sequences)), sum(a.moe_layers), 2 * a.hidden_size * a.experts_per_token
    numbers = a.num_layers * _numbers(a) + moe * a.num_experts + 3 * (a.num_layers - moe) * a.ffn_hidden_size
    numbers += 2 * a.hidden_size + a.vocab_size
    taps, definition = num_witnesses * (numbers + moe * rows) * size, numbers * BOUNDED_BYTES
    whole = on_host * sum(tensors) * size + tokens * (taps + definition) + max(tensors) * BOUNDED_BYTES
    return whole / GIB + SPARE_HOST_GIB


def _numbers(a: Architecture) -> int:
    """Numbers of a token at the taps of a layer, without those of gate, up, router and single experts."""
    query = a.num_heads * a.head_dim
    return 6 * a.hidden_size + 4 * (query + (query if a.latent else a.num_kv_heads * a.head_dim))


def layers_that_fit(setup: Setup, a: Architecture, free_gib: float, most: int) -> int:
    """Return how many first layers of ``a``, up to ``most``, fit into ``free_gib`` of the host; 0: too few."""
    for number in range(min(most, a.num_layers), fewest_layers(a) - 1, -1):
        if host_gib(setup, first_layers_of(a, number)) <= free_gib:
            return number
    return 0


def refuse_without_memory(setup: Setup, num_layers: int | None, free_gib: float) -> None:
    """Raises `InputError` where ``free_gib`` of host memory do not hold the comparison of the first ``num_layers``
    layers (None: of all), by arithmetic."""
    whole = read_architecture(setup.model)
    a = whole if num_layers is None else first_layers_of(whole, num_layers)
    needed = host_gib(setup, a)
    if needed <= free_gib:
        return
    fitting = layers_that_fit(setup, whole, free_gib, a.num_layers)
    advice = f"--layers {fitting} fits" if fitting else "not even its first layers fit: use a larger host"
    raise InputError(
        f"parity: {a.num_layers} layers of {setup.model} and {sum(map(len, setup.sequences))} tokens take "
        f"{needed:.1f} GiB of host memory, {free_gib:.1f} are free; {advice}, and so may fewer --tokens or --witnesses"
    )


def _checked(setup: Setup) -> Setup:
    """With tokens where none were given. Raises `InputError` for tokens that the model does not have."""
    architecture = read_architecture(setup.model)
    size, longest = architecture.vocab_size, architecture.max_position_embeddings
    if not setup.sequences:
        random = torch.Generator().manual_seed(0)
        sequences = [torch.randint(size, (min(n, longest),), generator=random).tolist() for n in LENGTHS]
        setup = replace(setup, sequences=tuple(map(tuple, sequences)))
    for number, tokens in enumerate(setup.sequences):
        if not 2 <= len(tokens) < longest:
            raise InputError(
                f"parity: --tokens: sequence {number} has {len(tokens)} tokens; 2 … {longest - 1} are allowed"
            )
        if wrong := [token for token in tokens if not 0 <= token < size]:
            raise InputError(f"parity: --tokens: {wrong[0]} is not a token of the model; 0 … {size - 1} are allowed")
    return setup


def collect(setup: Setup) -> list[Record]:
    """Records of all witnesses of ``setup``. Collective; those of the engines are whole on every rank."""
    architecture = read_architecture(setup.model)
    parallel = setup.learner.parallel
    device = initialize(parallel, setup.device, seed=0)
    wanted = parallel.tensor * parallel.pipeline * parallel.context
    if world_size() % wanted:
        raise InputError(f"parity: the layout takes a multiple of {wanted} ranks, {world_size()} were started")
    setup = replace(setup, device=device.type)
    records: list[Record] = []
    if "transformers" in setup.witnesses and world_rank() == 0:
        records.append(_run_transformers(setup))
    if "learner" in setup.witnesses:
        with learner_model(setup, architecture) as module:
            records.append(learner_record(setup, architecture, module))
    has_exact = beyond_exact(architecture, parallel.tensor) is None and parallel.context == 1 and device.type == "cpu"
    if "exact" in setup.witnesses and has_exact:
        with learner_model(setup, architecture, exact=True) as module:
            records.append(learner_record(setup, architecture, module, exact=True))
            if world_size() == 1:
                hold_against_generation(records[-1], module, architecture.vocab_size)
    if "vllm" in setup.witnesses:
        with closing(start_engine(setup)) as engine:
            records += vllm_records(setup, engine)
    return records


def product_of(dtype: str) -> float:
    return _TF32_PRODUCT if dtype == "tf32" else 0.0


@contextmanager
def learner_model(setup: Setup, architecture: Architecture, exact: bool = False) -> Iterator[torch.nn.Module]:
    """The learner's model with the folder's weights, without an optimizer. Collective."""
    device = initialize(setup.learner.parallel, setup.device, seed=0)
    module = build_model(architecture, setup.learner, device, setup.precision, exact)
    WeightMap(module, architecture).load(setup.model)
    try:
        yield module
    finally:
        del module
        gc.collect()


def learner_record(setup: Setup, architecture: Architecture, module: torch.nn.Module, exact: bool = False) -> Record:
    return learner_taps.run(
        module,
        setup.sequences,
        vocabulary=architecture.vocab_size,
        witness="exact pass" if exact else learner_taps.WITNESS,
        exact=exact,
        product=product_of(setup.learner.dtype),
        temperature=setup.temperature,
    )


@torch.no_grad()
def hold_against_generation(record: Record, module: torch.nn.Module, vocabulary: int) -> None:
    """Generate the sequences of ``record``, of exact mode's pass, token by token, and note in it which of its taps
    differ in a bit. On one rank.
    """
    device = next(module.parameters()).device
    options = {"max_tokens": len(record.tokens), "max_sequences": len(record.lengths)}
    decoder = Decoder(module, vocabulary, device, token_logprobs, **options)
    taps = {"embedding": "embedding", "final norm": "final_norm"}
    taps |= {f"layer {i}": f"{i}.output" for i in range(len(module.decoder.layers))}
    rows: dict[str, torch.Tensor] = {}

    def keep(name: str, hidden: torch.Tensor) -> None:
        for row, (sequence, position) in enumerate(decoder.row_owners):
            if name in taps and position < record.lengths[sequence]:
                like = record.taps[taps[name]]
                rows.setdefault(taps[name], torch.full_like(like, torch.nan))[record.starts[sequence] + position] = (
                    hidden[row].cpu()
                )

    sequences = [part.tolist() for part in record.tokens.split(record.lengths)]
    # One further token makes the last one's row; which token it is does not matter.
    responses = [np.array([*tokens[1:], tokens[0]]) for tokens in sequences]
    prompts, limits = [tokens[:1] for tokens in sequences], [*map(len, responses)]
    with decoder.watched(keep):
        decoder.run(prompts, limits, GivenTokens(responses, device))
    different = [tap for tap, value in rows.items() if not torch.equal(value, record.taps[tap])]
    record.generation = (len(rows), sorted(different, key=place))


def _run_transformers(setup: Setup) -> Record:
    model = transformers_taps.load(setup.model, DTYPES[setup.learner.dtype])
    record = transformers_taps.taps_of(model, setup.sequences, setup.temperature)
    del model
    gc.collect()
    return record


def start_engine(setup: Setup) -> VllmGenerator:
    """vLLM as the recipe has it, eager and without a prefix cache."""
    longest = max(map(len, setup.sequences))
    config = setup.rollout.model_copy(
        update={
            "engine": "vllm",
            "max_response_length": longest + 1,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "verify_refit": False,
            "max_num_seqs": max(8, len(setup.sequences)),
        }
    )
    return VllmGenerator(config, setup.model, max_prompt_length=longest, device=setup.device, precision=setup.precision)


def vllm_records(setup: Setup, engine: VllmGenerator) -> list[Record]:
    product = product_of(setup.rollout.dtype)
    return [
        vllm_taps.prefill(engine, setup.sequences, product),
        vllm_taps.decode(engine, setup.sequences, product, setup.temperature),
    ]


def first_layers_of(a: Architecture, num_layers: int) -> Architecture:
    """The shape of the first layers of ``a``. Raises `InputError` where there are fewer, or none has experts."""
    fewest = fewest_layers(a)
    if not fewest <= num_layers <= a.num_layers:
        with_what = "attention" if a.linear else "experts"
        why = f": layer {fewest - 1} is the first with {with_what}" if fewest > 1 else ""
        raise InputError(
            f"parity: --layers {num_layers}: the model has {a.num_layers} layers; {fewest} … {a.num_layers} are "
            f"allowed{why}"
        )
    return replace(a.of_layers(range(num_layers)), unused_layers=0)


def fewest_layers(a: Architecture) -> int:
    """Count layers up to the first attention and first experts."""
    of_attention = a.linear_layers.index(False) + 1 if a.linear else 1
    return max(of_attention, a.moe_layers.index(True) + 1 if a.is_moe else 1)


def write_first_layers(model: Path, num_layers: int, folder: Path) -> None:
    """Write the first ``num_layers`` layers of ``model`` to ``folder``, with embedding, last norm and head.

    Every rank calls it; the first one writes. Only the tensors that stay are read.
    """
    source = HFFolder(model)
    whole = read_architecture(model)
    check_weights(source, whole)
    cut = first_layers_of(whole, num_layers)
    shapes = model_shapes(cut)
    size = sum(math.prod(shape) * source.dtype(name).itemsize for name, shape in shapes.items())
    if (free := shutil.disk_usage(folder.parent).free) < size:
        raise InputError(
            f"parity: --layers {num_layers} writes {size / GIB:.1f} GiB below {folder.parent}, where {free / GIB:.1f} "
            "are free; name another folder with TMPDIR, or ask for fewer layers"
        )
    write_hf_checkpoint(folder, model_weights(source, cut), model)
    if world_rank() == 0:
        file = folder / "config.json"
        config = read_object(file) | {"num_hidden_layers": num_layers}
        if "num_nextn_predict_layers" in config:
            config["num_nextn_predict_layers"] = 0
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:num_layers]
        if config.get("mlp_only_layers"):
            config["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < num_layers]
        file.write_text(json.dumps(config, indent=2) + "\n")
