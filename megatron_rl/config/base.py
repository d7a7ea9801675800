"""What every section of a recipe shares, and the marks that its fields carry.

`cached` finds names of the Hugging Face hub in the local cache, where a recipe names a folder or a file.

Nothing is downloaded: nodes of a cluster may have no network, and a run must not change with what the hub serves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, NonNegativeInt, Strict, field_validator
from pydantic_core import PydanticCustomError, core_schema

from megatron_rl.errors import InputError

Dtype = Literal["bf16", "fp16", "tf32", "fp32"]
"""tf32: numbers are stored in fp32, and matrices are multiplied with operands rounded to TF32 (NVIDIA GPUs alone)."""
FP32_STORED = ("fp32", "tf32")
"""Those of `Dtype` whose weights and activations lie in memory as fp32."""
MOST = 2**32  # of a number in a recipe, as a seed or a loss scale: more is a slip of the hand, and no clock has it


class Section(BaseModel):
    """A section of a recipe: unknown keys are errors, and defaults are checked like given values.

    Nothing is converted: "1" and true are not numbers, 1 is not a switch, and numbers are finite.
    """

    model_config = ConfigDict(
        extra="forbid", validate_default=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _is_no_slip(cls, value: Any) -> Any:
        if isinstance(value, int | float) and abs(value) > MOST:
            raise PydanticCustomError("slip", f"a number is at most {MOST:,} (2^32)")
        return value


def _nameable(value: Any) -> Any:
    """Return ``value``. Refuses the text of a path that no file can have."""
    if isinstance(value, str):
        sizes = [len(name.encode("utf-8", "replace")) for name in value.split("/")]
        if not value or max(sizes) > 255 or sum(sizes) + len(sizes) > 4096:
            raise PydanticCustomError("no_path", "a path has 1 to 4095 bytes, and each name in it up to 255")
    return value


AnyPath = Annotated[Path, Strict(False), BeforeValidator(_nameable)]
"""A path, written as text."""


@dataclass(frozen=True)
class LookedUp:
    """Mark of a field that names something to read.

    A relative path is looked up in the folder of the recipe that names it, then in the working directory. With
    ``is_function`` the text is ``path/to/file.py:function``. With ``hub``, a text that is not the path of a file may be
    a name of this kind on the Hugging Face hub.
    """

    is_function: bool = False
    hub: Literal["model", "dataset"] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(_nameable, handler(source))


FUNCTION_PATH = r"^.+\.py:[A-Za-z_]\w*$"
"""A function of the user's, as a recipe names it: path/to/file.py:function."""


def is_function_path(value: Any) -> bool:
    return isinstance(value, str) and re.match(FUNCTION_PATH, value) is not None


class _Rewritten:
    """Mark of a field that may be written in another way, too; `expand` gives the full one."""

    @property
    def other(self) -> dict[str, Any]:
        """JSON Schema of the other way."""
        raise NotImplementedError

    def expand(self, value: Any) -> Any:
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler(schema["schema"]), self.other]}


@dataclass(frozen=True)
class Short(_Rewritten):
    """Text stands for a mapping with this text under ``key``; with ``or_null``, null for one with null under it."""

    key: str
    or_null: bool = False

    @property
    def other(self) -> dict[str, Any]:
        return {"type": ["string", "null"]} if self.or_null else {"type": "string"}

    def expand(self, value: Any) -> Any:
        short = isinstance(value, str) or (self.or_null and value is None)
        return {self.key: value} if short else value


@dataclass(frozen=True)
class ShortList(_Rewritten):
    """One item stands for a list of it, text for a mapping with this text under ``key``, null for an empty list."""

    key: str

    def expand(self, value: Any) -> Any:
        if value is None:
            return []
        items = list(value) if isinstance(value, list | tuple) else [value]
        return (
            value
            if isinstance(value, Patch)
            else [{self.key: item} if isinstance(item, str) else item for item in items]
        )

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: Any) -> dict[str, Any]:
        full = handler(schema["schema"])
        item = {"anyOf": [full["items"], {"type": "string"}]}
        return {"anyOf": [{**full, "items": item}, item, {"type": "null"}]}


@dataclass(frozen=True)
class FunctionUnder(_Rewritten):
    """The text ``file.py:function``, alone or under ``key``, stands for a mapping with ``function`` under ``key``, this
    text under ``function``, and every key that ``fields`` does not have under ``parameters``; in a list, for each item.
    """

    key: str
    fields: tuple[str, ...]

    @property
    def other(self) -> dict[str, Any]:
        text = {"type": "string", "pattern": FUNCTION_PATH}
        return {"type": "object", "required": [self.key], "properties": {self.key: text}}

    def expand(self, value: Any) -> Any:
        if isinstance(value, Patch):
            return value
        if isinstance(value, list | tuple):
            return [self._expanded(item) for item in value]
        return self._expanded(value)

    def _expanded(self, value: Any) -> Any:
        if not isinstance(value, dict) or not is_function_path(value.get(self.key)):
            return value
        own = {self.key: "function", "function": value[self.key]}
        rest = {key: item for key, item in value.items() if key != self.key}
        own |= {key: item for key, item in rest.items() if key in self.fields}
        parameters = {key: item for key, item in rest.items() if key not in self.fields}
        given = rest.get("parameters", {})
        if parameters and isinstance(given, dict):
            own["parameters"] = given | parameters
        return own

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: Any) -> dict[str, Any]:
        full = handler(schema["schema"])
        if "items" in full:
            return {**full, "items": {"anyOf": [full["items"], self.other]}}
        return {"anyOf": [full, self.other]}


@dataclass(frozen=True)
class NullIsZero(_Rewritten):
    """null stands for 0, which means off, never or all."""

    @property
    def other(self) -> dict[str, Any]:
        return {"type": "null"}

    def expand(self, value: Any) -> Any:
        return 0 if value is None else value


OffCount = Annotated[NonNegativeInt, NullIsZero()]
"""A count whose 0, which may be written null, means off, never or all."""


class Patch(dict):
    """Items of a list by their numbers, as text: what ``--set data.train.0.path=…`` changes of it."""


Kind = Literal["model", "dataset"]
DATA_FILES = (".parquet", ".jsonl")
_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+))?(/(?P<file>[^@]+))?", re.ASCII
)


def cached(text: str, kind: Kind) -> Path | None:
    """What the cache of the hub holds under ``text``: the folder of a model, or a file of a dataset.

    None where ``text`` is no such name, or is not there. Raises `InputError` where it is there and says too little: a
    dataset of several files, or without that file.
    """
    parsed = _parse(text, kind)
    if parsed is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = Path(
            snapshot_download(parsed["repo"], repo_type=kind, revision=parsed["revision"], local_files_only=True)
        )
    except (LocalEntryNotFoundError, RepositoryNotFoundError, HFValidationError):
        return None
    return folder if kind == "model" else _data_file(text, folder, parsed["file"])


def _parse(text: str, kind: Kind) -> re.Match[str] | None:
    """The parts of OWNER/NAME[@REVISION], for a dataset perhaps with /FILE behind it; None for any other text."""
    match = _NAME.fullmatch(text)
    return match if match is not None and (kind == "dataset" or match["file"] is None) else None


def _data_file(text: str, folder: Path, file: str | None) -> Path:
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in DATA_FILES)
    if file is None and len(files) == 1:
        return folder / files[0]
    if file in files:
        return folder / file
    wanted = f"no file {file}" if file else f"{len(files)} files of data"
    shown = ", ".join(files[:10]) + (f" and {len(files) - 10} more" if len(files) > 10 else "")
    name = text.removesuffix(f"/{file}") if file else text
    raise InputError(
        f"{text}: the dataset in the local cache of the hub has {wanted}; write {name}/FILE, with one of: "
        f"{shown or 'none'}"
    )


def how_to_download(text: str, kind: Kind) -> str:
    """The command that brings ``text`` into the cache; "" where it is no name of the hub."""
    parsed = _parse(text, kind)
    if parsed is None:
        return ""
    repo, file = parsed["repo"], parsed["file"]
    if file is None and Path(repo).suffix in DATA_FILES:  # a path, of which only the file's name can be of the hub
        repo, file = "OWNER/NAME", Path(repo).name
    revision = f" --revision {parsed['revision']}" if parsed["revision"] else ""
    named = f"{repo} {file}" if file else repo
    return f"hf download {named}{' --repo-type dataset' if kind == 'dataset' else ''}{revision}"
