"""README.md of an exported checkpoint: a model card as the Hugging Face hub reads it, of what the run directory holds.

The licence is left to whoever publishes: it depends on the base model's and the data's. No path of a machine goes into
the card: files are named without their folders, and what lies in the hub's cache by its name there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.base import name_of_cached
from megatron_rl.config.yaml12 import parse
from megatron_rl.monitor import RunDirectory
from megatron_rl.monitor.run_directory import code_of, read_metrics

CARD = "README.md"
_FIGURE = re.compile(r"val/(?P<source>.+)/(?P<name>avg@\d+|pass@\d+|num_problems)")
_LICENCE = "# license: name it before you publish; the terms of the base model and of the data hold for these weights"
_BASE = "# base_model: OWNER/NAME of the model that training began with; the run read it from a folder"
_FOLDER = "The model of the folder `{}`"


def run_of_checkpoint(checkpoint: Path) -> RunDirectory | None:
    """The run that wrote ``checkpoint``, a folder step_…; None where it lies elsewhere."""
    directory = RunDirectory(checkpoint.parent.parent)
    return directory if checkpoint.parent == directory.checkpoints and directory.recipe.is_file() else None


def write_model_card(folder: Path, directory: RunDirectory, step: int) -> None:
    """Write `README.md` into ``folder``, which holds the weights of the run ``directory`` after ``step`` steps."""
    recipe = parse(directory.recipe.read_text(encoding="utf-8"))[0]
    environment = json.loads(directory.environment.read_text()) if directory.environment.is_file() else {}
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

    recipe = without_folders(recipe)
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


def without_folders(value: Any) -> Any:
    """Return ``value`` of a recipe with every absolute path cut to its last part, or to its name on the hub."""
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
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
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "Commit": (code_of(environment) or "").replace("+changes", " with changes"),
    }
    return [(name, value) for name, value in facts.items() if value]


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
