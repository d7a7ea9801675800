"""The commands of `megatron-rl`: one module each, imported when its command is asked for.

A module has ``add_arguments(parser)`` and ``run(options)``, which returns the exit status. Its docstring is the text of
its --help. It raises the errors of `megatron_rl.errors`; `megatron_rl.__main__` turns them into a message and a status.
"""

from __future__ import annotations

# Name → its line in `megatron-rl --help`. The module is the name with underscores.
COMMANDS = {
    "train": "run a recipe; under torchrun or srun for several ranks",
    "check": "check a recipe without starting an engine",
    "doctor": "does this node, do these nodes, do what a run relies on",
    "plan": "memory, step time and layouts on a GPU, by arithmetic",
    "trace": "the real learner of a recipe as one rank of its job, without GPUs: bytes and collectives",
    "eval": "score a checkpoint on the recipe's data.validation",
    "eval-grid": "accuracy of a checkpoint by dtype, temperature, top-p and token budget",
    "serve": "start a rollout server of a run (rollout.engine: vllm_server)",
    "servers": "the rollout servers of a run: what they hold, how busy they are, why one is not used",
    "schema": "print the recipe's JSON Schema, for editors",
    "watch": "watch runs as they go on, in the terminal or on a local page",
    "samples": "print sampled responses of a run",
    "plot": "overlay the curves of several runs",
    "replay": "run the update of a stored batch again, as it was or changed",
    "attribute": "split the mismatch of a stored batch into its causes",
    "experts": "load, flips and share of the mismatch of each expert in a stored batch",
    "gradient-bias": "how far the mismatch turns the gradient of a stored batch",
    "mismatch": "training-inference mismatch of a checkpoint per pair of dtypes",
    "explain-schedule": "why the learning rate of a run was what it was",
    "score-alarms": "what alarm rules would have done in finished runs",
    "convert": "checkpoints between Hugging Face and Megatron, proven equal",
    "prepare-data": "training data of a public dataset: unique, checked, disjoint from evaluation",
    "lab": "run a study's arms over its seeds, and report them",
    "sanity-set": "the problems of a dataset that a sound run must learn to solve",
    "sanity-verdict": "whether a run on such a set passed",
    "softmax-study": "what one softmax in bf16 does to token probabilities",
    "patch": "the patches to Megatron-Core: status, check, apply, revert, export",
}
