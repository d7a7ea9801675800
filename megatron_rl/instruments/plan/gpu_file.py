"""`--gpu FILE`: the figures of one's own GPUs, from data sheets or measured on a node.

    name: ours                                  # default: the file's name
    base: h100-80                               # whose figures count where this file has none
    memory_gib: 79.1                            # as torch reports it
    tflops: {bf16: 989, tf32: 494.5, fp32: 67}  # peak rates of dense matrices; bf16 stands for fp16 too
    memory_tb_s: 3.35
    nvlink_gb_s: 450                            # to GPUs of the node, one direction
    network_gb_s: 50                            # to other nodes, of one GPU
    measured: {tflops: {bf16: 690}}             # what `megatron-rl doctor --measure FILE` writes

All keys are in `KEYS` and `MEASURED`. Without `base` the required ones must be there.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError, shown
from megatron_rl.instruments.plan.hardware import COPY_SHARE, GPUS, LINK, PRODUCT_SHARE, Gpu

DTYPES = {"bf16": "flops_16bit", "tf32": "flops_tf32", "fp32": "flops_fp32"}
# Key → field of `Gpu`, and units of the field in one of the key.
KEYS = {
    "memory_gib": ("memory_gib", 1.0),
    "memory_tb_s": ("bandwidth", 1e12),
    "nvlink_gb_s": ("nvlink", 1e9),
    "network_gb_s": ("network", 1e9),
    "host_link_gb_s": ("host_link", 1e9),
    "host_memory_gib": ("host_gib", 1.0),
    "processors": ("processors", 1),
    "batched_tokens": ("batched_tokens", 1),
    "nvlink_gpus": ("nvlink_gpus", 1),
}
OPTIONAL = {"batched_tokens": 16384, "nvlink_gpus": 0}  # what counts without a base
WHOLE = ("processors", "batched_tokens", "nvlink_gpus")
# Measured key → field, units, and the share of the peak that such a measurement reaches.
MEASURED = {
    "memory_tb_s": ("bandwidth", 1e12, COPY_SHARE),
    "nvlink_gb_s": ("nvlink", 1e9, LINK),
    "network_gb_s": ("network", 1e9, LINK),
}
TOLD = {"memory_tb_s": "copies in memory", "nvlink_gb_s": "links in a node", "network_gb_s": "links between nodes"}


def find_gpu(text: str) -> Gpu:
    """Return the GPU of this name, or that of a file. Raises `InputError` for a file that cannot be used."""
    return GPUS[text] if text in GPUS else read_gpu(Path(text))


def read_gpu(path: Path) -> Gpu:
    """Return the GPU that ``path`` (YAML or JSON) describes. A measured figure replaces the assumed one."""
    found = _read(path)
    known = {"name", "base", "tflops", "measured", *KEYS}
    _refuse_unknown(path, "", found, known)
    name = found.get("name", path.stem)
    if not isinstance(name, str) or not name:
        raise InputError(f"{path}: name: {shown(name)}; expected a text")
    base = _base(path, found)
    own = {field: _number(path, key, found[key], unit) for key, (field, unit) in KEYS.items() if key in found}
    rates = _section(path, "tflops", found, set(DTYPES))
    own |= {DTYPES[key]: _number(path, f"tflops.{key}", value, 1e12) for key, value in rates.items()}
    if base is None:
        needed = [key for key, (field, _) in KEYS.items() if field not in own and key not in OPTIONAL]
        needed += [f"tflops.{key}" for key, field in DTYPES.items() if field not in own]
        if needed:
            raise InputError(
                f"{path}: {', '.join(needed)}: missing; give them, or `base: NAME`, one of {', '.join(GPUS)}, whose "
                "figures then count where the file has none"
            )
        gpu = Gpu(name=name, **{KEYS[key][0]: value for key, value in OPTIONAL.items()} | own)
    else:
        gpu = replace(base, name=name, **own)
    return _with_measured(path, found, gpu)


def _with_measured(path: Path, found: dict[str, Any], gpu: Gpu) -> Gpu:
    """Return ``gpu`` with peaks that give what was measured. A share of the peak is assumed of each measurement."""
    measured = _section(path, "measured", found, {"tflops", "attention_tflops", "source", *MEASURED})
    changes, told = {}, []
    rates = _section(path, "measured.tflops", {"measured.tflops": measured.get("tflops", {})}, set(DTYPES))
    for key, value in rates.items():
        rate = _number(path, f"measured.tflops.{key}", value, 1e12)
        changes[DTYPES[key]] = rate / PRODUCT_SHARE
        told.append(f"products in {key} {rate / 1e12:.4g} TFLOP/s (counted as {PRODUCT_SHARE:.0%} of the peak)")
    if "attention_tflops" in measured:
        rate = _number(path, "measured.attention_tflops", measured["attention_tflops"], 1e12)
        if len(rates) != 1:
            raise InputError(
                f"{path}: measured.attention_tflops: {shown(measured['attention_tflops'])}, but measured.tflops has "
                f"{len(rates)} types; give one, that in which attention was measured"
            )
        products = _number(path, "measured.tflops", next(iter(rates.values())), 1e12)
        changes["attention_cost"] = products / rate
        told.append(f"attention {rate / 1e12:.4g} TFLOP/s")
    for key, (field, unit, share) in MEASURED.items():
        if key in measured:
            rate = _number(path, f"measured.{key}", measured[key], unit)
            changes[field] = rate / share
            told.append(f"{TOLD[key]} {rate / 1e9:.4g} GB/s (counted as {share:.0%} of the peak)")
    return replace(gpu, measured=tuple(told), **changes)


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: not a file of a GPU's figures in YAML or JSON: {shown(error)}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: {shown(found)}; expected keys with values, such as memory_gib: 79.1")
    return found


def _base(path: Path, found: dict[str, Any]) -> Gpu | None:
    base = found.get("base")
    if base is not None and base not in GPUS:
        raise InputError(f"{path}: base: {shown(base)}; expected one of {', '.join(GPUS)}")
    return GPUS[base] if base is not None else None


def _section(path: Path, key: str, found: dict[str, Any], known: set[str]) -> dict[str, Any]:
    section = found.get(key, {})
    if not isinstance(section, dict):
        raise InputError(f"{path}: {key}: {shown(section)}; expected keys with values: {', '.join(sorted(known))}")
    _refuse_unknown(path, f"{key}.", section, known)
    return section


def _refuse_unknown(path: Path, prefix: str, found: dict[str, Any], known: set[str]) -> None:
    if unknown := [key for key in found if key not in known]:
        raise InputError(
            f"{path}: {prefix}{unknown[0]}: {shown(found[unknown[0]])}: no such key; remove it, or write one of "
            f"{', '.join(sorted(known))}"
        )


def _number(path: Path, key: str, value: Any, unit: float) -> float:
    """Return the number ``value`` in the units of `Gpu`. Raises `InputError` for anything but a positive number."""
    whole = key in WHOLE
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < 1e9:
        kind = "whole number" if whole else "number"
        fix = "; YAML reads 1e3 as a text, write 1000" if isinstance(value, str) else ""
        raise InputError(f"{path}: {key}: {shown(value)}; expected a {kind} above 0{fix}")
    return value * unit
