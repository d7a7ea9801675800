"""Other spellings of gold answers, by which `check` finds golds that no right response meets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_AROUND = (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"), ('"', '"'), ("`", "`"), ("**", "**"))
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")  # of LaTeX that was escaped twice
_SMALLER = {r"\frac": r"\dfrac", r"\dfrac": r"\frac", r"\left": "", r"\right": "", r"\,": "", r"\!": ""}
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")


def respellings(gold: str) -> Iterator[str]:
    """Yield spellings that a response may well have and ``gold`` has not, most of them of one cause each."""
    text = gold.strip()
    for opens, closes in _AROUND:
        inner = text[len(opens) : len(text) - len(closes)]
        if text.startswith(opens) and text.endswith(closes) and inner.strip() and closes not in inner:
            yield inner
    yield from _of_a_list(text)
    changes = [
        _DOUBLED.sub(r"\\", text),
        _THOUSANDS.sub("", text) if _THOUSANDS.sub("", text).replace(".", "").isdigit() else text,
        text.removesuffix("."),
        *(re.sub(re.escape(old) + r"(?![A-Za-z.])", lambda _, new=new: new, text) for old, new in _SMALLER.items()),
    ]
    yield from (changed for changed in dict.fromkeys(changes) if changed.strip() and changed != gold)


def _of_a_list(text: str) -> Iterator[str]:
    """Yield the elements of a list that is written as JSON text, as a person would."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    texts = [part for part in value if isinstance(part, str)] if isinstance(value, list) else []
    if texts and len(texts) == len(value):
        yield ", ".join(texts)
