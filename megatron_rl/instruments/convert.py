"""The command `convert`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.arguments import output
from megatron_rl.errors import EXIT_DONE, InputError


def add_convert(parser: argparse.ArgumentParser) -> None:
    directions = parser.add_subparsers(dest="direction", required=True, metavar="to-hf|to-megatron")
    for name, text in (
        ("to-hf", "Convert from Megatron to Hugging Face."),
        ("to-megatron", "Convert the weights from Hugging Face to Megatron."),
    ):
        command = directions.add_parser(name, help=text, description=text)
        command.add_argument("source", type=Path, help="Read this folder.")
        command.add_argument("target", type=output, help="Write this folder. It must not exist.")
        command.add_argument(
            "--dtype", choices=("bf16", "fp16", "fp32"), help="Round the weights to this dtype (default: as stored)."
        )
        if name == "to-hf":
            command.add_argument(
                "--model",
                type=Path,
                help="Take config.json and tokenizer from this folder (default: SOURCE/hf, if there).",
            )
            command.add_argument("--master", action="store_true", help="Take the optimizer's fp32 weights.")


def run_convert(options: argparse.Namespace) -> int:
    """Convert checkpoints between Hugging Face and Megatron, tensor by tensor, and prove the result.

        megatron-rl convert to-hf RUN/checkpoints/step_00000050 OUT --model START
        megatron-rl convert to-megatron HF OUT

    `to-hf` reads what a run wrote (or `to-megatron`); of a run directory, the newest. START is the Hugging Face folder
    that the run started from (the recipe's model.path): its config.json and tokenizer go into OUT.
    `--master` takes the fp32 master weights, which a bf16 or fp16 run keeps beside the rounded ones, as
    `precision.export_from: master` does for the rollout engine.

    `to-megatron` writes weights alone (no optimizer): `megatron-rl eval RECIPE --checkpoint OUT` reads it under every
    layout. A new run needs no conversion: its model.path is a Hugging Face folder.

    Layouts: a run's checkpoint stores each full tensor under its own name, whichever TP, EP, PP and ETP wrote it, and
    Megatron splits it for the layout that reads it. The conversion therefore runs in one process without a GPU and
    without the model in memory. It holds one tensor at a time, and in `to-hf` three times a file of up to 1 GiB.

    Proof: each tensor is hashed (SHA-256 over name, dtype, shape, bytes) when it is read. The written files are read
    back, converted back and hashed again. OUT gets its name only if all hashes agree. The printed `weights` hash is the
    same for equal weights in either format. A round trip cannot check the table of names: `megatron-rl check` does,
    which compares the learner's model of a folder with transformers'.

    The families of models are those of docs/families.md. A run with learner.lora writes adapters: use checkpoints/hf
    instead. Exit status: 0 done, 2 unusable input.
    """
    from megatron_rl.checkpoint import conversion
    from megatron_rl.learner.model import DTYPES
    from megatron_rl.run.saving import newest_checkpoint, run_of_checkpoint, sampling_of

    dtype = DTYPES[options.dtype] if options.dtype else None
    source, target = options.source.resolve(), options.target.resolve()
    if options.direction == "to-hf":
        source = newest_checkpoint(source)
        model = options.model or source / conversion.HF_FOLDER
        if not (model / "config.json").is_file():
            raise InputError(
                f"convert to-hf: {model} has no config.json; --model names the folder that the run started from (its "
                "recipe's model.path), which has config.json and the tokenizer"
            )
        directory = run_of_checkpoint(source)
        sampling = None if directory is None else sampling_of(directory)
        digests = conversion.to_hf(
            source, target, model.resolve(), dtype=dtype, master=options.master, sampling=sampling
        )
    else:
        digests = conversion.to_megatron(source, target, dtype=dtype)
    print(f"{len(digests)} tensors written to {target}, read back and equal")
    print(f"weights {conversion.total(digests)}")
    return EXIT_DONE
