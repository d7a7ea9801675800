"""Putting a run together: the parts of the loop, where they continue from, and how they end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.check import check_recipe
from megatron_rl.config import Recipe
from megatron_rl.data import PromptSampler, PromptSet, load_prompts, load_tokenizer
from megatron_rl.errors import InputError
from megatron_rl.learner.checkpoint import list_checkpoints
from megatron_rl.learner.distributed import any_rank, broadcast_object, gather_objects, shutdown, world_rank, world_size
from megatron_rl.learner.learner import Learner
from megatron_rl.lookahead import Lookahead
from megatron_rl.monitor import Monitor, RunDirectory, write_environment
from megatron_rl.precision import confirm_contract, contract
from megatron_rl.rewards import Rewarder
from megatron_rl.rollout import Generator
from megatron_rl.rollout.checkpoint import read_stop_token_ids
from megatron_rl.rollout.exact import ExactGenerator
from megatron_rl.types import Group

STOP_FILE = "STOP"  # `touch RUN/STOP`: save after the step at hand and leave; the way to stop a job under a scheduler


@dataclass
class Run:
    """Everything that the loop uses, ready to go. `start` makes one."""

    recipe: Recipe
    directory: RunDirectory
    learner: Learner
    generator: Generator
    rewarder: Rewarder
    prompts: PromptSampler
    ahead: Lookahead
    validation: PromptSet
    monitor: Monitor
    signals: list[int] = field(default_factory=list)  # received and not yet acted on

    def save(self) -> Path:
        """A checkpoint from which the run continues exactly; older ones beyond `keep_last` go."""
        state = {"prompts": self.prompts.state_dict(), "monitor": self.monitor.state_dict()}
        state = broadcast_object(state | {"ahead": self.ahead.state_dict()})
        path = self.learner.save(self.directory.checkpoints, state, keep_last=self.recipe.checkpoint.keep_last)
        self.monitor.log(f"checkpoint: {path}")
        return path

    def stop_requested(self) -> bool:
        """True on all ranks as soon as one has a signal or sees the STOP file. Collective: once a step."""
        return any_rank(bool(self.signals) or (self.directory.root / STOP_FILE).exists())


@contextlib.contextmanager
def start(recipe: Recipe, resume: str = "auto") -> Iterator[Run]:
    """Check, load, start both engines, resume; on leaving, end them in reverse order whatever happened.

    Raises `InputError` before an engine starts where recipe, data or checkpoint cannot be used.
    """
    checked = check_recipe(recipe)
    directory = RunDirectory(recipe.run_dir)
    checkpoint = find_checkpoint(directory, resume)
    tokenizer = load_tokenizer(str(recipe.model.path))
    train = load_prompts(recipe.data.train, tokenizer, recipe.data.prompt)
    if recipe.batch.prompts > len(train):
        raise InputError(
            f"batch.prompts: {recipe.batch.prompts} prompts a step, but data.train has {len(train)}; a step would "
            "sample a prompt twice. Lower batch.prompts or add data"
        )
    validation = load_prompts(recipe.data.validation, tokenizer, recipe.data.prompt) if recipe.data.validation else ()
    sampler = PromptSampler(train, seed=recipe.data.seed, shuffle=recipe.data.shuffle)
    sources = {*train.data_sources, *(prompt.data_source for prompt in validation)}
    with contextlib.ExitStack() as stack:
        rewarder = stack.enter_context(Rewarder(recipe.reward, recipe.rollout.max_response_length, sources))
        learner = Learner(recipe)
        stack.callback(shutdown)
        is_main = world_rank() == 0
        summary = {"run": str(directory.root), **dict(checked.report), "num_steps": recipe.num_steps}
        monitor = stack.enter_context(Monitor(directory, recipe.monitor, summary, is_main, share=broadcast_object))
        learner.phase = monitor.phase
        learner.keep_current_logprobs = recipe.may_record_batches
        if is_main:
            directory.done.unlink(missing_ok=True)  # a complete run that goes on, to more steps
            directory.recipe.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
            write_environment(directory.environment, applied_patches())
        generator = start_generator(recipe, tokenizer, learner, say=monitor.log)
        stack.callback(generator.close)
        stated = contract(recipe, checked.architecture)
        for row in confirm_contract(stated, learner.describe_precision(), generator.describe_precision()):
            if (row.aspect, str(row)) not in checked.report:  # printed at the start
                monitor.log(f"{row.aspect}: {row}")
        ahead = Lookahead(
            sampler,
            generator,
            num_prompts=recipe.batch.prompts,
            num_samples=recipe.rollout.num_samples,
            max_staleness=recipe.rollout.max_staleness,
            num_steps=recipe.num_steps,
        )
        run = Run(recipe, directory, learner, generator, rewarder, sampler, ahead, validation, monitor)
        if checkpoint is not None:
            _resume(run, checkpoint, train)
        elif is_main and directory.metrics.exists():
            monitor.resume_at(0)  # an attempt that ended before its first checkpoint
        for number in (signal.SIGTERM, signal.SIGUSR1):
            stack.callback(signal.signal, number, signal.signal(number, lambda n, _: run.signals.append(n)))
        yield run


def find_checkpoint(directory: RunDirectory, resume: str) -> Path | None:
    """Where ``--resume`` says to continue from: ``auto``, ``never`` or a folder."""
    if resume == "auto":
        found = list_checkpoints(directory.checkpoints)
        return found[-1] if found else None
    if resume == "never":
        if directory.metrics.exists():
            raise InputError(
                f"--resume never: {directory.root} already holds a run; use --resume auto to continue it, another name "
                "(--set name=…) to keep both, or delete the folder"
            )
        return None
    path = Path(resume)
    if path not in list_checkpoints(path.parent):
        near = [found.name for found in list_checkpoints(directory.checkpoints)]
        raise InputError(f"--resume {resume}: not a complete checkpoint; this run has {', '.join(near) or 'none'}")
    return path


def score_shared(rewarder: Rewarder, groups: list[Group]) -> dict[str, float]:
    """Reward every rollout: each rank scores its share, all ranks hold the result. Returns `reward/*` counts."""
    mine = groups[world_rank() :: world_size()]
    counts = rewarder.score(mine)
    scored = [(r.raw_reward, r.reward, r.masked) for group in mine for r in group.rollouts]
    shares = gather_objects((scored, counts))
    for rank, (values, _) in enumerate(shares):
        rollouts = [r for group in groups[rank :: len(shares)] for r in group.rollouts]
        for rollout, (raw, reward, masked) in zip(rollouts, values, strict=True):
            rollout.raw_reward, rollout.reward, rollout.masked = raw, reward, masked
    failures = ("reward/timeouts", "reward/worker_failures", "reward/errors")
    rollouts = [r for group in groups for r in group.rollouts]
    return {name: sum(share[name] for _, share in shares) for name in failures} | {
        "reward/masked_frac": sum(r.masked for r in rollouts) / max(1, len(rollouts))
    }


def start_generator(recipe: Recipe, tokenizer: Any, learner: Learner, say: Callable[[str], None] = print) -> Generator:
    """The engine that the recipe names, beside the learner of the same job. ``say``: what servers there are."""
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    if recipe.rollout.engine == "exact":
        stop = recipe.rollout.stop_token_ids
        return ExactGenerator(
            recipe.rollout,
            recipe.exact,
            learner.decoder(),
            stop_token_ids=read_stop_token_ids(recipe.model.path) if stop is None else stop,
            decode=decode,
            describe=learner.describe_precision,
        )
    if recipe.rollout.engine == "vllm_server":
        from megatron_rl.rollout.servers.generator import ServerGenerator

        return ServerGenerator(
            recipe.rollout,
            recipe.model.path,
            max_prompt_length=recipe.data.prompt.max_length,
            run_dir=recipe.run_dir,
            recipe_file=RunDirectory(recipe.run_dir).recipe,
            record_routes=recipe.routing.needs_engine_routes,
            decode=decode,
            precision=recipe.precision,
            say=say,
        )
    from megatron_rl.rollout.vllm_engine import VllmGenerator

    return VllmGenerator(
        recipe.rollout,
        recipe.model.path,
        max_prompt_length=recipe.data.prompt.max_length,
        record_routes=recipe.routing.needs_engine_routes,
        device=learner.device.type,
        decode=decode,
        precision=recipe.precision,
    )


def _resume(run: Run, checkpoint: Path, train: PromptSet) -> None:
    state = run.learner.load(checkpoint)
    run.prompts.load_state_dict(state["prompts"])
    run.ahead.load_state_dict(state.get("ahead", []), train)
    run.monitor.load_state_dict(state["monitor"])
    run.monitor.resume_at(run.learner.step)
    run.generator.refit(run.learner.export_weights(), run.learner.num_updates)
    run.monitor.log(f"resumed at step {run.learner.step} from {checkpoint}")


def applied_patches() -> dict[str, Any]:
    """What `tools/patches.py status` says of the environment's upstreams; empty where the tools are not at hand."""
    tool = Path(__file__).resolve().parents[1] / "tools" / "patches.py"
    if not tool.is_file():
        return {}
    status = subprocess.run([sys.executable, str(tool), "status"], capture_output=True, text=True, check=False)
    return {"status": status.stdout.strip().splitlines()}
