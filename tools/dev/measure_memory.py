"""Predicted against measured memory of a learner rank, on models of 1 to 30 million parameters with random weights.

    python -m tools.dev.measure_memory [--quick] [--tokens 2048]
    torchrun --nproc-per-node 2 -m tools.dev.measure_memory --quick --set tensor=2 --set expert=2

Measured: the most bytes that PyTorch's CPU allocator had handed out at one time while a learner was built and updated
the weights twice, summed from the allocator's own events (`torch.profiler`, ``profile_memory``). That is what
`torch.cuda.max_memory_allocated` says on a GPU, and it misses nothing: temporaries inside kernels and the backward
pass are in it. The resident set size was not chosen, because it also holds libraries, the allocator's slack and pages
that were never given back. Predicted: `megatron_rl.instruments.plan.learner`, the arithmetic that `plan` uses for
GPUs, with the learner's CPU layers in place of TransformerEngine's. The exit status is 1 where they differ by more than
15%.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core import parallel_state
from torch.profiler import ProfilerActivity, profile

from megatron_rl.config import Recipe
from megatron_rl.instruments.plan.learner import learner_memory, total_parameters
from megatron_rl.learner.learner import Learner
from megatron_rl.model.architecture import read_architecture
from megatron_rl.process.ranks import world_rank, world_size
from megatron_rl.types import Batch, Rollout
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]

TOLERANCE = 0.15
LENGTH = 128  # tokens of a sequence
MIB = 1 << 20

# name → (family, what differs from the tiny configuration)
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "moe-1m": ("qwen3_moe", {}),
    "moe-4m": ("qwen3_moe", {"hidden_size": 192, "moe_intermediate_size": 160, "vocab_size": 1024}),
    "moe-10m": ("qwen3_moe", {"hidden_size": 256, "moe_intermediate_size": 320, "vocab_size": 2048}),
    "moe-30m": (
        "qwen3_moe",
        {"hidden_size": 384, "moe_intermediate_size": 384, "vocab_size": 8192, "num_hidden_layers": 6},
    ),
    "dense-10m": ("qwen3", {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192}),
}


@dataclass(frozen=True)
class Measurement:
    """Bytes on this rank."""

    model: str
    dtype: str
    recompute: str
    parameters: int
    measured: int
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1.0


def make_checkpoint(name: str, folder: Path) -> Path:
    """A random-weight checkpoint of ``MODELS[name]`` below ``folder``; made once."""
    path = folder / name
    if not path.exists():
        family, widths = MODELS[name]
        save_checkpoint(build_model(build_tiny_config(family, **widths)), path)
    return path


def measure(
    path: Path, dtype: str, recompute: str, tokens: int, microbatches: int = 1, parallel: dict[str, int] | None = None
) -> Measurement:
    """Build a learner in this process (of all ranks), update twice, and compare its peak with the prediction.

    ``tokens``: of one microbatch. ``microbatches``: per update and data-parallel rank.
    """
    recipe = _recipe(path, dtype, recompute, tokens, parallel or {})
    gc.collect()  # what an earlier learner left must not be given back while this one is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        learner = Learner(recipe)
        replicas = parallel_state.get_data_parallel_world_size()
        for step in range(2):
            learner.update(_batch(step, replicas * microbatches * tokens // LENGTH))
    peak = peak_bytes(profiler, {file.stat().st_size for file in path.glob("*.safetensors")})
    architecture, stage = learner.architecture, parallel_state.get_pipeline_model_parallel_rank()
    del learner
    predicted = learner_memory(architecture, recipe.learner, world_size(), tokens, microbatches, fused=False)[stage]
    parallel_state.destroy_model_parallel()
    return Measurement(
        path.name,
        dtype,
        recompute,
        total_parameters(read_architecture(path)),
        peak,
        predicted.static + predicted.dynamic,
    )


def peak_bytes(profiler: profile, mapped: Collection[int] = ()) -> int:
    """Most that torch's allocator had given out at one time while ``profiler`` (with ``profile_memory``) watched, above
    what there was before. ``mapped``: sizes of files that were mapped; their pages are the page cache's."""
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    changes = [(when, nbytes) for when, nbytes in changes if abs(nbytes) not in mapped]
    return int(np.cumsum([nbytes for _, nbytes in changes]).max())


def _recipe(path: Path, dtype: str, recompute: str, tokens: int, parallel: dict[str, int]) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "memory",
            "num_steps": 10,
            "runtime": {"device": "cpu"},
            "model": {"path": str(path)},
            "data": {"train": "unused.jsonl"},
            "learner": {
                "dtype": dtype,
                "recompute": recompute,
                "max_tokens_per_microbatch": tokens,
                "parallel": parallel,
            },
        }
    )


def _batch(step: int, num_sequences: int) -> Batch:
    random, prompt = np.random.default_rng(step), LENGTH // 4
    sequences = [
        Rollout(
            id=f"memory:{i}/0",
            prompt=random.integers(3, 98, prompt),
            tokens=random.integers(3, 98, LENGTH - prompt, np.int32),
            inference_logprobs=np.full(LENGTH - prompt, -3.0, np.float32),
            advantage=float(random.normal()),
            reward=1.0,
            policy_versions=np.zeros(LENGTH - prompt, np.int32),
        )
        for i in range(num_sequences)
    ]
    return Batch(step=step, sequences=sequences, minibatches=[list(range(num_sequences))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models instead of all")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a microbatch")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=SIZE", help="a key of learner.parallel")
    options = parser.parse_args()
    parallel = {key: int(size) for key, size in (item.split("=") for item in options.set)}
    worst = 0.0
    print(f"{'model':>10} {'dtype':>5} {'recompute':>9} {'measured':>9} {'predicted':>9}  MiB, rank {world_rank()}")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("moe-1m", "dense-10m") if options.quick else MODELS:
            path = make_checkpoint(name, Path(folder))
            for dtype in ("fp32", "bf16"):
                for recompute in ("none", "selective", "full"):
                    m = measure(path, dtype, recompute, options.tokens, parallel=parallel)
                    worst = max(worst, abs(m.error))
                    row = f"{m.measured / MIB:9.1f} {m.predicted / MIB:9.1f} {m.error:+7.1%}"
                    print(f"{name:>10} {dtype:>5} {recompute:>9} {row}", flush=True)
    print(f"largest difference {worst:.1%}; allowed {TOLERANCE:.0%}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
