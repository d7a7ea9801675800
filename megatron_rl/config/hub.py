"""Names of the Hugging Face hub where a recipe names a folder or a file: they stand for what the local cache holds.

Nothing is downloaded: nodes of a cluster may have no network, and a run must not change with what the hub serves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from megatron_rl.errors import InputError

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


_SNAPSHOT = re.compile(
    r".*/(models|datasets)--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)(?P<file>/.+)?"
)


def name_of_cached(path: Path) -> str | None:
    """OWNER/NAME@REVISION[/FILE] of a path in the hub's cache; None for any other."""
    match = _SNAPSHOT.fullmatch(str(path))
    return f"{match['owner']}/{match['name']}@{match['revision']}{match['file'] or ''}" if match else None


def how_to_download(text: str, kind: Kind) -> str:
    """The command that brings ``text`` into the cache; "" where it is no name of the hub."""
    parsed = _parse(text, kind)
    if parsed is None:
        return ""
    revision = f" --revision {parsed['revision']}" if parsed["revision"] else ""
    return f"hf download {parsed['repo']}{' --repo-type dataset' if kind == 'dataset' else ''}{revision}"
