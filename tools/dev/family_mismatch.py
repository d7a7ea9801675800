"""The mismatch of small random models of every family with experts, side by side, and routing's share of it.

    python -m tools.dev.family_mismatch measure OUT.json [FAMILY …]   # 20 CPU seconds a family; finished ones are kept
    python -m tools.dev.family_mismatch table docs/lab/families.json

vLLM samples in bf16 from models with the weights of `SEEDS`. The learner scores the same tokens in bf16 with its own
routes, and with the engine's (R3). The spread is the root mean square of log po − log mu over all tokens. Routing's
share is what replay takes away of the mean square.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.model.families import FAMILIES

SEEDS = (0, 1, 2)
NUM_PROMPTS, NUM_SAMPLES, RESPONSE = 12, 4, 40
VARIANTS = {"bf16": {}, "fp32 router and head": {"fp32_router": True, "fp32_head": True}}
COLUMNS = ("spread", "replayed", "rows")


def measure(family: str, seed: int, precision: dict[str, bool]) -> dict[str, float]:
    """One model: spread with the learner's routes and with the engine's, and the share of rows of routes that agree."""
    from megatron_rl.batch import build_batch
    from megatron_rl.data.prompts import load_prompts, load_tokenizer
    from megatron_rl.learner.learner import Learner
    from megatron_rl.model.architecture import read_architecture
    from megatron_rl.rollout.vllm_engine import VllmGenerator
    from tests.support.families import save_family
    from tests.support.tiny import tiny_recipe

    with tempfile.TemporaryDirectory() as folder:
        model = save_family(Path(folder), family, seed)
        if read_architecture(model).router_in_fp32:
            precision = precision | {"fp32_router": True}  # as `check` asks for
        recipe = tiny_recipe(
            model={"path": str(model)},
            rollout={"dtype": "bf16", "max_response_length": RESPONSE, "kv_cache_gib": 0.0625},
            learner={"dtype": "bf16"},
            objective={"max_response_length": RESPONSE},
            routing={"replay": "r3"},
            precision=precision,
        )
        learner = Learner(recipe)
        prompts = load_prompts(recipe.data.train, load_tokenizer(str(model)), recipe.data.prompt)
        longest = recipe.data.prompt.max_length
        engine = VllmGenerator(
            recipe.rollout, model, max_prompt_length=longest, record_routes=True, precision=recipe.precision
        )
        with closing(engine):
            groups = engine.rollout([prompts[i] for i in range(NUM_PROMPTS)], NUM_SAMPLES, policy_version=0, step=0)
            batch = build_batch(0, groups, recipe.batch, recipe.objective)
            mu = np.concatenate([s.inference_logprobs for s in batch.sequences]).astype(np.float64)
            engines = [np.sort(s.routed_experts[: s.whole_length - 1], -1) for s in batch.sequences]
            replayed, native = (np.concatenate(learner.compute_logprobs(batch, mode)) for mode in ("replay", "record"))
        owns = [np.sort(s.routed_experts[: s.whole_length - 1], -1) for s in batch.sequences]  # "record" wrote them
        learner.close()
    agree = np.concatenate([(a == b).all(-1).reshape(-1) for a, b in zip(engines, owns, strict=True)])
    spread = {
        name: float(np.sqrt(np.mean((po - mu) ** 2))) for name, po in (("spread", native), ("replayed", replayed))
    }
    return spread | {"rows": float(agree.mean()), "tokens": len(mu)}


def run(out: Path, families: list[str]) -> None:
    results_of_family: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for family in families:
        for variant, precision in VARIANTS.items():
            if variant not in results_of_family.get(family, {}):
                results = [measure(family, seed, precision) for seed in SEEDS]
                results_of_family.setdefault(family, {})[variant] = results
                out.write_text(json.dumps(results_of_family, indent=1) + "\n")
                print(family, variant, results, flush=True)


def table(file: Path, *variants: str) -> list[str]:
    """Return a Markdown table of ``variants`` (default: all): means over the seeds.

    Routing's share is that of the mean squares, with its range over the seeds.
    """
    lines = [
        "| family | precision | spread | with the engine's routes | routing's share | rows of routes that agree |",
        "|---|---|---|---|---|---|",
    ]
    results_of_family = json.loads(file.read_text())
    for family in (name for name in FAMILIES if name in results_of_family):
        for variant, results in results_of_family[family].items():
            if variants and variant not in variants:
                continue
            spread, replayed, rows = (np.array([result[key] for result in results]) for key in COLUMNS)
            shares = 1 - (replayed / spread) ** 2
            share = 1 - (replayed**2).sum() / (spread**2).sum()
            lines.append(
                f"| `{family}` | {variant} | {spread.mean():.3f} | {replayed.mean():.3f} | {share:.0%} "
                f"({shares.min():.0%} to {shares.max():.0%}) | {rows.mean():.2%} |"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="run the models and write their figures")
    measuring.add_argument("out", type=Path, help="JSON file, gone on with where it is there")
    measuring.add_argument("families", nargs="*", help="default: all families with experts")
    commands.add_parser("table", help="print the table").add_argument("file", type=Path, help="what measure wrote")
    args = parser.parse_args()
    if args.command == "table":
        print("\n".join(table(args.file)))
    else:
        from tests.support.families import MOE

        run(args.out, args.families or ["qwen3_moe", *MOE])
    return 0


if __name__ == "__main__":
    sys.exit(main())
