"""The command `parity`: the first operator where vLLM or the learner departs from the checkpoint."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.arguments import COUNT, add_overrides, output
from megatron_rl.errors import EXIT_DONE, EXIT_FAULT, InputError

if TYPE_CHECKING:
    from megatron_rl.instruments.parity.witnesses import Setup


WITNESSES = ("transformers", "learner", "exact", "vllm")  # equals `witnesses.ALL`, whose module is slow to import
DTYPES = ("fp32", "bf16", "fp16", "tf32")


def add_parity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", help="Read this model's folder, recipe (a YAML file) or run directory.")
    add_overrides(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="Compute a model's folder in this type (default: bf16).")
    parser.add_argument(
        "--tokens",
        action="append",
        default=[],
        metavar="ID,ID,…",
        help="Compare on this sequence of tokens. The option may be given several times (default: three random ones).",
    )
    parser.add_argument(
        "--layers",
        type=COUNT,
        metavar="N",
        help="Compare the first N layers alone, at full width. The others are not read (default: all layers).",
    )
    parser.add_argument(
        "--witnesses",
        default=",".join(WITNESSES),
        metavar="NAME,NAME",
        help=f"Run these alone, of {', '.join(WITNESSES)} (default: all).",
    )
    parser.add_argument(
        "--out",
        type=output,
        metavar="DIR",
        help="Write the certificate here: parity.json, parity.txt and parity.png.",
    )


def run_parity(options: argparse.Namespace) -> int:
    """Find the first operator where vLLM or the learner departs from the checkpoint.

        megatron-rl parity MODEL [--dtype bf16]         a folder in Hugging Face layout
        megatron-rl parity RECIPE [--set KEY=VALUE]     its model, in the recipe's dtypes and layout
        megatron-rl parity RUN                          the newest checkpoint of a run directory

    The same tokens go through vLLM (all at once, and one at a time), the learner, exact mode and transformers. Each
    operator of each is compared with its definition in float64 on its own inputs. The definition comes from config.json
    and the tensors alone. docs/parity.md explains the report. For a layout of several ranks, start it under torchrun.

    A model that is too large for the host is refused, by arithmetic; --layers N compares its first layers.

    Exit status: 0 every operator is within its bound, 1 one is not, 2 bad arguments.
    """

    from megatron_rl.instruments.parity.witnesses import of_first_layers, refuse_without_memory
    from megatron_rl.learner.process_groups import shutdown
    from megatron_rl.process.host import available_gib

    tokens, witnesses = [_ids(text) for text in options.tokens], _witnesses(options.witnesses)
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        setup = replace(_parity_setup(options, tokens, Path(scratch)), witnesses=witnesses)
        refuse_without_memory(setup, options.layers, available_gib())
        try:
            if options.layers is not None:
                setup = of_first_layers(setup, options.layers, Path(scratch))
            return _run_witnesses(setup, options.out)
        finally:
            shutdown()


def _run_witnesses(setup: Setup, out: Path | None) -> int:
    from megatron_rl.instruments.parity import report as certificate
    from megatron_rl.instruments.parity.compare import compare
    from megatron_rl.instruments.parity.definition import Checkpoint
    from megatron_rl.instruments.parity.witnesses import collect
    from megatron_rl.process.ranks import broadcast_object, world_rank

    checkpoint = Checkpoint(setup.model)
    records = collect(setup)
    failed = False
    if world_rank() == 0:
        result = compare(checkpoint, records)
        failed = not result.passes
        print(certificate.as_text(setup, result))
        if out is not None:
            certificate.write(out, setup, result)
            print(f"wrote {out}/parity.json, parity.txt, parity.png")
    return EXIT_FAULT if broadcast_object(failed) else EXIT_DONE


def _parity_setup(options: argparse.Namespace, tokens: list[list[int]], scratch: Path) -> Setup:
    from megatron_rl.config import load_recipe
    from megatron_rl.instruments.parity import witnesses

    path = Path(options.subject)
    if (path / "config.json").is_file():
        if options.overrides:
            raise InputError(f"parity: {path} is a model's folder; --set changes keys of a recipe. Give a recipe")
        return witnesses.of_model(path, options.dtype or "bf16", tokens)
    if options.dtype:
        raise InputError(
            f"parity: --dtype {options.dtype} is for a model's folder; {path} has its own types. Use --set "
            f"learner.dtype={options.dtype} --set rollout.dtype={options.dtype}"
        )
    if path.is_dir():
        return witnesses.of_run(path, options.overrides, tokens, scratch)
    return witnesses.of_recipe(load_recipe(options.subject, options.overrides), tokens)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--tokens: {text!r}; write numbers of tokens with commas between them: 1,5,3") from error


def _witnesses(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in WITNESSES]:
        raise InputError(f"--witnesses: {unknown[0]!r}; there are {', '.join(WITNESSES)}")
    return names
