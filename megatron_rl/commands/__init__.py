"""The table of commands of `megatron-rl`. A module is imported when one of its commands is used.

For a command NAME a module has ``add_NAME(parser)`` and ``run_NAME(options)``, which returns the exit status. The
docstring of ``run_NAME`` is the text of --help. Commands raise the errors of `megatron_rl.errors`;
`megatron_rl.__main__` turns them into messages and exit statuses. An instrument has its command beside it, and
`megatron_rl.arguments` what several commands share.
"""

from __future__ import annotations

GROUPS = {
    "recipe": "List recipe keys, translate another project's script",
    "run": "Look at a run, while it goes on or afterwards",
    "batch": "Analyse one stored batch of a run",
    "paper": "Repeat a measurement of a paper with your model",
}
"""Groups of commands, each with its line in `megatron-rl --help`."""

COMMANDS = {
    "train": "Train a model as a recipe says.",
    "check": "Check a recipe before its job starts.",
    "plan": "Estimate memory, step time and layouts of a recipe on a GPU.",
    "eval": "Score a checkpoint on held-out problems.",
    "serve": "Start a rollout server of a run.",
    "convert": "Convert checkpoints between Hugging Face and Megatron.",
    "prepare-data": "Make a clean training set from a public dataset.",
    "parity": "Find the first operator where vLLM or the learner departs from the checkpoint.",
    "doctor": "Test whether this machine can run training.",
    "patch": "Apply the patches to Megatron-Core, or show which are applied.",
    "lab": "Run the arms of a study over its seeds, and report them.",
    "recipe schema": "Print the JSON Schema of recipes, for editors.",
    "recipe from-verl": "Translate a launch script or configuration of verl into a recipe.",
    "recipe from-slime": "Translate a launch script of slime into a recipe.",
    "recipe from-nemo-rl": "Translate a configuration of NeMo-RL into a recipe.",
    "run watch": "Watch runs in the terminal or on a local page.",
    "run samples": "Print sampled responses of a run.",
    "run plot": "Draw the curves of several runs over each other.",
    "run servers": "List the rollout servers of a run: what they do, and why one is not used.",
    "run explain-schedule": "Explain why the learning rate of a run was what it was.",
    "run why": "Say when a run left its baselines, and which causes are suspected.",
    "run branch": "Find the cause of an unstable run by experiment, from a checkpoint before its onset.",
    "run score-alarms": "Compare alarm rules on finished runs.",
    "batch replay": "Run the update of a stored batch again, as it was or changed.",
    "batch attribute": "Split the mismatch of a stored batch into its causes.",
    "batch gradient-bias": "Measure how far the mismatch turns the gradient of a stored batch.",
    "paper mismatch": "Measure the training-inference mismatch of a checkpoint by pairs of dtypes.",
    "paper sanity-set": "Choose the problems of a dataset that a sound run must learn to solve.",
    "paper sanity-verdict": "Say whether a run on such problems passed.",
}
"""Commands, each with its line in --help. `GROUP NAME` may also be typed as `NAME`."""

MODULES = {
    "commands.recipe": ("check", "recipe schema"),
    "commands.train": ("eval", "serve", "train"),
    "doctor.command": ("doctor",),
    "instruments.batch.command": ("batch attribute", "batch gradient-bias", "batch replay"),
    "instruments.branch.command": ("run branch",),
    "instruments.convert": ("convert",),
    "instruments.explain_schedule": ("run explain-schedule",),
    "instruments.lab.command": ("lab",),
    "instruments.paper.command": ("paper mismatch", "paper sanity-set", "paper sanity-verdict"),
    "instruments.parity.command": ("parity",),
    "instruments.plan.command": ("plan",),
    "instruments.plot": ("run plot",),
    "instruments.prepare_data": ("prepare-data",),
    "instruments.server_table": ("run servers",),
    "instruments.translate.command": ("recipe from-nemo-rl", "recipe from-slime", "recipe from-verl"),
    "instruments.watch.command": ("run samples", "run watch"),
    "instruments.why.command": ("run score-alarms", "run why"),
    "patching.command": ("patch",),
}
"""Modules of `megatron_rl`, each with its commands."""


def function_name(command: str) -> str:
    """Return what follows ``add_`` and ``run_`` in the functions of a command of `COMMANDS`: its last word."""
    return command.split()[-1].replace("-", "_")


def module_of(command: str) -> str:
    """Return the module of a command of `COMMANDS`."""
    return next(f"megatron_rl.{module}" for module, names in MODULES.items() if command in names)


def full_name(typed: str) -> str | None:
    """Return the command of `COMMANDS` for ``typed``, written with or without its group; None if there is none."""
    return next((name for name in COMMANDS if typed in (name, name.split()[-1])), None)
