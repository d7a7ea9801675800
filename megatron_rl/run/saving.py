"""Writes a run's checkpoints, at once or while training goes on, and finds the one that ``--resume`` continues from.

`Evidence` keeps what explains an alarm later (`recorder.evidence`): the batches before it, and a checkpoint from before
its onset.

A rule goes off some steps after what it tells of began. So the batches of the newest steps are on disk in every step,
and at the first alarm they stay, together with the newest checkpoint from before the rule's condition began to hold.
One alarm of a run gets this, or two where no checkpoint was there yet at the first: disk is bounded, and what goes off
later is often a consequence.

A file of its own counts how often a run went back (alarm action `rollback`): it outlives the steps that were undone.

`write_model_card` writes README.md of an exported checkpoint: a model card as the Hugging Face hub reads it, of what
the run directory holds. The licence is left to whoever publishes: it depends on the base model's and the data's. No
path of a machine goes into the card: files are named without their folders, and what lies in the hub's cache by its
name there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.hf_folder import CHAT_TEMPLATE, Sampling
from megatron_rl.checkpoint.manifest import checkpoint_name
from megatron_rl.checkpoint.save import PendingSave, SaveError, damage
from megatron_rl.config.base import name_of_cached
from megatron_rl.config.monitor import RISKS
from megatron_rl.config.sections import CheckpointConfig, RecorderConfig
from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.monitor import AlarmEvent, RunDirectory
from megatron_rl.monitor.alarms import BUILT_IN
from megatron_rl.monitor.run_directory import code_of, read_metrics
from megatron_rl.process.host import write_whole
from megatron_rl.process.ranks import any_rank, broadcast_object, on_main_rank, world_rank
from megatron_rl.process.run_files import read_json
from megatron_rl.run.recorded_batches import batch_bytes, delete_batch, keep_batch, recorded_steps

EXIT_WAIT_S = 60.0  # for a thread that still writes when the run ends by an error


class Saving:
    """The saves of one run. All ranks call the same methods in the same order.

    ``folder``: of the checkpoints. ``say``: writes to the run's log.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, learner: Learner, say: Callable[..., None]):
        self.owed = False  # the last save failed
        self.written: Path | None = None  # the newest checkpoint that this process published
        self.pinned: int | None = None  # step of a checkpoint that stays, whatever its age; on rank 0
        self._config, self._folder, self._learner, self._say = config, folder, learner, say
        self._pending: PendingSave | None = None

    def write(self, state: dict[str, Any], protected: list[int]) -> Path:
        """Write a checkpoint of the learner's step and wait for it. ``state``: of the loop. ``protected``: steps whose
        checkpoints stay. Raises `SaveError` on every rank."""
        self.settle(wait=True)
        return self._published(self._begin(state, protected, in_background=False))

    def begin(self, state: dict[str, Any], protected: list[int]) -> None:
        """As `write`, but returns once the state is copied; `settle` publishes it. Waits for the save before it."""
        self.settle(wait=True)
        self._pending = self._begin(state, protected, in_background=True)

    def pin(self, before: int) -> int | None:
        """See that a checkpoint stays: the newest of a step before ``before``, else the oldest. For rank 0.

        Returns its step; None where there is none, or where an earlier call's is still there.
        """
        steps = [manifest.checkpoint_step(path) for path in manifest.list_checkpoints(self._folder)]
        if self._pending is not None:
            steps.append(manifest.checkpoint_step(self._pending.path))
        if self.pinned in steps:
            return None
        earlier = [step for step in steps if step < before]
        self.pinned = max(earlier) if earlier else min(steps, default=None)
        if self._pending is not None and self.pinned is not None:
            self._pending.protected.add(self.pinned)
        return self.pinned

    def settle(self, wait: bool = False) -> Path | None:
        """Publish the save under way once every rank has written its share, and return its path. A failure is said, and
        the save is owed. ``wait``: for the ranks that still write."""
        if self._pending is None or not (wait or not any_rank(not self._pending.is_done())):
            return None
        pending, self._pending = self._pending, None
        try:
            return self._published(pending)
        except SaveError as error:
            self.failed(error)
            return None

    def failed(self, error: SaveError) -> None:
        self.owed = True
        self._say(f"{error}; the run goes on and tries again after the next step", style="bold red")

    def leave(self) -> None:
        """At the end of the process: wait for this rank's thread, which may still write where an error ends the run."""
        if self._pending is not None:
            self._pending.wait(EXIT_WAIT_S)

    def _begin(self, state: dict[str, Any], protected: list[int], in_background: bool) -> PendingSave:
        if self.pinned is not None:
            protected = [*protected, self.pinned]
        return self._learner.begin_save(self._folder, state, self._config.keep_last, protected, in_background)

    def _published(self, save: PendingSave) -> Path:
        path = save.finish()
        self.owed, self.written = False, path
        self._say(f"checkpoint: {path}")
        return path


def newest_checkpoint(path: Path) -> Path:
    """Return the newest complete checkpoint of a run directory; any other folder is returned as it is."""
    folder = RunDirectory(path).checkpoints
    if not folder.is_dir():
        return path
    if not (checkpoints := manifest.list_checkpoints(folder)):
        raise InputError(f"{path}: a run directory without a complete checkpoint in {folder.name}/")
    return checkpoints[-1]


def newest_before(folder: Path, step: int) -> Path | None:
    """The newest checkpoint of a step before ``step`` whose files are whole. Collective."""
    for path in reversed(broadcast_object(manifest.list_checkpoints(folder))):
        if manifest.checkpoint_step(path) < step and damage(path) is None:
            return path
    return None


_REMEDY = "restore it, or start again under another name (--set name=…)"


def check_resume(directory: RunDirectory, resume: str) -> None:
    """Refuse what ``--resume`` (``auto``, ``never`` or a folder) says, as far as names and sizes show; quick.

    Also a run directory in which something else has the name of a file or folder of a run.
    """
    directory.check()
    if resume == "auto":
        return
    if resume == "never":
        if directory.metrics.exists():
            raise InputError(
                f"--resume never: {directory.root} already holds a run; use --resume auto to continue it, another name "
                "(--set name=…) to keep both, or delete the folder"
            )
        return
    if problem := manifest.incomplete(Path(resume)):
        near = [path.name for path in manifest.list_checkpoints(directory.checkpoints)]
        raise InputError(
            f"--resume {resume}: not a complete checkpoint ({problem}); this run has {', '.join(near) or 'none'}"
        )


def find_checkpoint(directory: RunDirectory, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to continue from, every file verified, and what to say of the search.

    Collective; for the holder of the run's lock, because it tidies: half-finished saves are completed or removed,
    damaged checkpoints that newer ones rest on are set aside (renamed, never deleted). Raises `InputError` where the
    named checkpoint is damaged, or all there are.
    """
    notes = on_main_rank(lambda: manifest.recover(directory.checkpoints))
    if resume == "never":
        return None, notes
    if resume != "auto":
        path = Path(resume)
        if problem := damage(path):
            raise InputError(f"--resume {path}: damaged: {problem}; {_REMEDY}")
        return path, notes + on_main_rank(lambda: abandon_newer(directory, path))
    damaged: list[tuple[Path, str]] = []
    for path in reversed(broadcast_object(manifest.all_checkpoints(directory.checkpoints))):
        if (problem := damage(path)) is None:
            return path, notes + on_main_rank(lambda path=path: _set_aside(damaged, path))
        damaged.append((path, problem))
    if damaged:
        newest, problem = damaged[0]
        raise InputError(
            f"{directory.checkpoints}: none of {len(damaged)} checkpoints is whole; {newest.name}: {problem}; {_REMEDY}"
        )
    return None, notes


def _set_aside(damaged: list[tuple[Path, str]], instead: Path) -> list[str]:
    return [
        f"checkpoint {path.name} is damaged ({problem}): set aside as {manifest.set_aside(path, 'damaged').name}; "
        f"falling back to {instead.name}"
        for path, problem in damaged
    ]


def abandon_newer(directory: RunDirectory, path: Path) -> list[str]:
    """Set newer checkpoints aside. After a return to ``path`` they belong to another history, which ``auto`` must not
    take up."""
    if path.resolve().parent != directory.checkpoints.resolve():
        return []
    newer = [later for later in manifest.all_checkpoints(directory.checkpoints) if later.name > path.name]
    return [
        f"checkpoint {later.name} is newer than {path.name}: set aside as {manifest.set_aside(later, 'abandoned').name}"
        for later in newer
    ]


GIB = 1 << 30
# One failed reward is no sign of an unstable run; a risk is none yet.
UNRELATED = RISKS | {rule.name for rule in BUILT_IN}


class Evidence:
    """The evidence of one run, which rank 0 keeps.

    ``batches``: the folder of the batches. ``saving``: of the checkpoints. ``say``: writes to the run's log.
    """

    def __init__(self, config: RecorderConfig, batches: Path, saving: Saving, say: Callable[..., None]):
        self.alarm: int | None = None  # step of the alarm whose evidence is kept
        self._config, self._batches, self._saving, self._say = config, batches, saving, say
        self._sizes: dict[int, int] = {}  # step → bytes of its batch
        self._kept: set[int] = set()  # steps whose batches were found to be kept

    def after_step(self, step: int, events: Sequence[AlarmEvent]) -> None:
        """Delete batches that became too old at ``step``; see that what explains the first alarm stays.

        The batch of ``step`` is on disk, and none of its checkpoints is deleted yet. A full disk does not end the run.
        """
        if world_rank() != 0:
            return
        try:
            newest = self._delete_older(step)
            alarms = [event for event in events if event.name not in UNRELATED]
            if alarms and self._config.evidence is not None:
                self._keep(step, alarms, newest)
        except (OSError, InputError) as error:
            self._say(f"recorder.evidence: step {step}: {error}", style="bold red")

    def state_dict(self) -> dict[str, Any]:
        """JSON values. That of rank 0 counts."""
        return {"alarm": self.alarm, "checkpoint": self._saving.pinned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; {} where an earlier version wrote the checkpoint."""
        if self._config.evidence is not None:
            self.alarm, self._saving.pinned = state.get("alarm"), state.get("checkpoint")

    def _delete_older(self, step: int) -> list[int]:
        """Delete what is older than the newest batches up to ``step``, and return the steps of these."""
        config, evidence = self._config, self._config.evidence
        # Later steps are of an attempt that was killed. This attempt comes to them and replaces them.
        steps = [recorded for recorded in recorded_steps(self._batches) if recorded <= step]
        if not config.is_every_step:
            return []
        if config.record_batches == "all":
            return steps
        certain = config.keep if config.record_batches == "last_n" else 1
        most = max(certain, evidence.batches if evidence is not None else 0)
        newest: list[int] = []
        total = 0
        for recorded in reversed(steps[-most:]):
            total += self._size(recorded, is_new=recorded == step)
            if len(newest) >= certain and total > evidence.max_gib * GIB:
                break
            newest.insert(0, recorded)
        for recorded in sorted({*steps} - {*newest} - self._kept):
            try:
                is_gone = delete_batch(self._batches, recorded)
            except InputError as error:  # it is said once, and stays
                self._say(f"{error}; it stays")
                is_gone = False
            if is_gone:
                self._sizes.pop(recorded, None)
            else:
                self._kept.add(recorded)
        return newest

    def _size(self, step: int, is_new: bool) -> int:
        if is_new or step not in self._sizes:
            self._sizes[step] = batch_bytes(self._batches, step)
        return self._sizes[step]

    def _keep(self, step: int, alarms: Sequence[AlarmEvent], batches: Sequence[int]) -> None:
        """Keep ``batches`` and a checkpoint for ``alarms`` of ``step``, unless an earlier alarm has both."""
        onset = min(event.onset for event in alarms)
        checkpoint = self._saving.pin(onset)
        if checkpoint is None and self.alarm is not None:
            return
        self.alarm = step
        for recorded in batches:
            keep_batch(self._batches, recorded)
        self._say(f"evidence of {', '.join(event.name for event in alarms)}: {_said(batches, checkpoint, onset)}")


def _said(batches: Sequence[int], checkpoint: int | None, onset: int) -> str:
    """What is kept, in words."""
    stored = f"batches of steps {batches[0]} to {batches[-1]} stay; " if batches else ""
    if checkpoint is None:
        return f"{stored}no checkpoint is there, so the weights before step {onset} are those of the start"
    age = "the newest" if checkpoint < onset else "the oldest there is, none is"
    return f"{stored}{checkpoint_name(checkpoint)} stays, {age} from before step {onset}"


class Rollbacks:
    """The rollbacks of one run, at most ``most``. ``file``: rollbacks.json in the run directory. Collective."""

    def __init__(self, file: Path, most: int) -> None:
        self._file, self.most = file, most
        self._events: list[dict[str, Any]] = on_main_rank(self._read)
        self.count = len(self._events)  # and those of the run whose checkpoint this one began from

    @property
    def is_spent(self) -> bool:
        return self.count >= self.most

    def add(self, alarms: list[str], at: int, to: int) -> None:
        """Note that the run goes back from the end of step ``at`` to the checkpoint of step ``to``."""
        self.count += 1
        self._events.append({"alarms": alarms, "at": at, "to": to, "time": round(time.time(), 3)})
        on_main_rank(self._write)

    def halvings_due(self, before: int) -> int:
        """How often the rate of a checkpoint is still to be halved that was written after ``before`` rollbacks."""
        self.count = max(self.count, before)
        return self.count - before

    def _read(self) -> list[dict[str, Any]]:
        try:
            return read_json(self._file, [{}]) if self._file.is_file() else []
        except InputError as error:
            raise InputError(f"{self._file}: not the list of rollbacks of a run ({error})") from error

    def _write(self) -> None:
        write_whole(self._file, json.dumps(self._events, indent=2) + "\n")


CARD = "README.md"
_FIGURE = re.compile(r"val/(?P<source>.+)/(?P<name>avg@\d+|pass@\d+|num_problems)")
_LICENCE = "# license: name it before you publish; the terms of the base model and of the data hold for these weights"
_BASE = "# base_model: OWNER/NAME of the model that training began with; the run read it from a folder"
_FOLDER = "The model of the folder `{}`"


def run_of_checkpoint(checkpoint: Path) -> RunDirectory | None:
    """The run that wrote ``checkpoint``, a folder step_…; None where it lies elsewhere."""
    directory = RunDirectory(checkpoint.parent.parent)
    return directory if checkpoint.parent == directory.checkpoints and directory.recipe.is_file() else None


def sampling_of(directory: RunDirectory) -> Sampling:
    """How the run ``directory`` made prompts and ended responses. Raises `InputError` where its template is gone."""
    recipe = parse(directory.recipe.read_text(encoding="utf-8"))[0]
    prompt = {"chat_template": "auto", **recipe["data"].get("prompt", {})}
    sampling = Sampling.of(prompt["chat_template"], recipe["rollout"].get("stop_token_ids"))
    if sampling.chat_template is not None and not sampling.chat_template.is_file():
        raise InputError(
            f"{directory.recipe}: data.prompt.chat_template: {sampling.chat_template} is gone, and the model would be "
            "served with other prompts than it was trained on; put the template back there"
        )
    return sampling


def write_model_card(folder: Path, directory: RunDirectory, step: int) -> None:
    """Write `README.md` into ``folder``, which holds the weights of the run ``directory`` after ``step`` steps."""
    recipe = parse(directory.recipe.read_text(encoding="utf-8"))[0]
    like = {"versions": {"": ""}, "git": {"commit": "", "changed": []}, "resumed": [{}]}
    environment = read_json(directory.environment, like) if directory.environment.is_file() else {}
    records = read_metrics(directory.metrics) if directory.metrics.is_file() else []
    (folder / CARD).write_text(model_card(recipe, environment, records, step), encoding="utf-8")


def model_card(
    recipe: Mapping[str, Any],
    environment: Mapping[str, Any],
    records: Sequence[Mapping[str, float]],
    step: int,
) -> str:
    """The card's text. ``recipe``: as resolved. ``records``: of metrics.jsonl. ``step``: steps that were trained."""
    from huggingface_hub import EvalResult, ModelCardData

    recipe = card_value(recipe)
    base = _on_hub(recipe["model"]["path"])
    measured = [r for r in records if r["step"] <= step and any(name.startswith("val/") for name in r)]
    results = _results(measured[-1]) if measured else {}
    sources = [*recipe["data"]["train"], *recipe["data"].get("validation", [])]
    header = ModelCardData(
        base_model=base,
        datasets=sorted({name for source in sources if (name := _on_hub(source["path"]))}) or None,
        eval_results=[
            EvalResult("text-generation", source, source, name, round(value, 4))
            for source, figures in results.items()
            for name, value in figures.items()
            if name.startswith("pass@")
        ]
        or None,
        library_name="transformers",
        model_name=recipe["name"],
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "megatron-rl", recipe["objective"]["advantage"]],
    )
    parts = [
        "\n".join(["---", _LICENCE, *([] if base else [_BASE]), header.to_yaml(), "---"]),
        f"# {recipe['name']}",
        f"{base or _FOLDER.format(recipe['model']['path'])}, trained by reinforcement learning with megatron_rl "
        f"{_version()}.",
        _table(("", ""), _facts(recipe, environment, step)),
        "## Results on held-out problems",
        _shown(results, int(measured[-1]["step"]) if measured else 0, step),
        "## Recipe",
        "<details>\n<summary>All keys, defaults included</summary>\n",
        f"```yaml\n{yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)}```\n\n</details>",
    ]
    return "\n\n".join(parts) + "\n"


def card_value(value: Any) -> Any:
    """Return ``value`` of a recipe with every absolute path cut to its last part, or to its name on the hub."""
    if isinstance(value, Mapping):
        return {key: card_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [card_value(item) for item in value]
    if isinstance(value, str) and value.startswith("/"):
        return name_of_cached(Path(value)) or Path(value).name
    return value


def _on_hub(name: str) -> str | None:
    """OWNER/NAME, where the path was one of the hub's cache."""
    return "/".join(name.partition("@")[0].split("/")[:2]) if "@" in name and "/" in name else None


def _version() -> str:
    try:
        return metadata.version("megatron-rl")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _facts(recipe: Mapping[str, Any], environment: Mapping[str, Any], step: int) -> list[tuple[str, str]]:
    objective, batch, data = recipe["objective"], recipe["batch"], recipe["data"]
    term = objective["policy_term"]
    optimizer, rollout = recipe["learner"]["optimizer"], recipe["rollout"]
    versions = {"python": environment.get("python"), **environment.get("versions", {})}
    facts = {
        "Base model": recipe["model"]["path"],
        "Data": ", ".join(source["path"] for source in data["train"]),
        "Held-out data": ", ".join(source["path"] for source in data.get("validation", [])),
        "Reward": recipe["reward"]["name"],
        "Steps": f"{step} of {recipe['num_steps']}; each {batch['prompts']} prompts × {rollout['num_samples']} "
        f"responses in {batch['minibatches']} mini-batches",
        "Objective": f"advantage {objective['advantage']}, policy term {term.get('function', term['name'])}, "
        f"aggregation {objective['aggregation']}",
        "Learning rate": f"{optimizer['lr']:g}",
        "Precision": f"learner {recipe['learner']['dtype']}, rollouts {rollout['dtype']}",
        "Responses": f"at most {rollout['max_response_length']} tokens at temperature {rollout['temperature']:g}",
        "Prompts": _prompts(data.get("prompt", {})),
        "Ends of responses": ", ".join(map(str, rollout.get("stop_token_ids") or ())),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "Commit": (code_of(environment) or "").replace("+changes", " with changes"),
    }
    return [(name, value) for name, value in facts.items() if value]


def _prompts(prompt: Mapping[str, Any]) -> str:
    """What of `data.prompt` a reader has to do alike."""
    template = prompt.get("chat_template", "auto")
    words = {"auto": "chat template of the tokenizer", "none": "plain text, without the chat template"}
    added = {"template": "{problem}", "system": None, "chat_template_args": {}}
    others = [f"{key} {prompt[key]!r}" for key, default in added.items() if prompt.get(key, default) != default]
    return "; ".join([words.get(template, f"{CHAT_TEMPLATE} (in the run: {template})"), *others])


def _results(record: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Source → figures of one validation, with the ends of intervals."""
    results: dict[str, dict[str, float]] = {}
    for key, value in record.items():
        if match := _FIGURE.fullmatch(key):
            figures = results.setdefault(match["source"], {})
            figures[match["name"]] = value
            ends = {f"{match['name']} {end}": record.get(f"{key}_ci95_{end}") for end in ("low", "high")}
            figures |= {name: end for name, end in ends.items() if end is not None}
    return results


def _shown(results: Mapping[str, Mapping[str, float]], measured: int, step: int) -> str:
    if not results:
        return "None were measured in the run."
    names = sorted({name for figures in results.values() for name in figures if "@" in name and " " not in name})
    names.sort(key=lambda name: (name.partition("@")[0], int(name.partition("@")[2])))
    rows = [
        [
            source,
            f"{figures['num_problems']:.0f}" if "num_problems" in figures else "",
            *(_cell(figures, n) for n in names),
        ]
        for source, figures in results.items()
    ]
    when = "Of these weights" if measured == step else f"Of the weights after {measured} steps"
    return f"{when}; 95% intervals over problems.\n\n{_table(['source', 'problems', *names], rows)}"


def _cell(figures: Mapping[str, float], name: str) -> str:
    if name not in figures:
        return ""
    ends = [figures.get(f"{name} {end}") for end in ("low", "high")]
    around = "" if None in ends else f" [{ends[0]:.4f}, {ends[1]:.4f}]"
    return f"{figures[name]:.4f}{around}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
