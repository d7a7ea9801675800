"""patches/<upstream>/: the pin (UPSTREAM), the order (series) and the patches with their trailers."""

from __future__ import annotations

import dataclasses
import email.header
import email.parser
import hashlib
import re
from pathlib import Path

from megatron_rl.patching import unified
from megatron_rl.patching.errors import PatchError

Files = dict[str, bytes | None]
"""Contents by path; None: the file does not exist."""

TRAILERS = ("Origin", "Forwarded", "Drop-When", "Test")
_REQUIRED_PINS = ("Project", "Version", "Source", "Package", "Root", "Tree-Before", "Tree-After")
_PINS = (*_REQUIRED_PINS, "Download")


@dataclasses.dataclass(frozen=True)
class Patch:
    """One file of the series."""

    name: str
    subject: str
    trailers: dict[str, str]
    changes: tuple[unified.FileChange, ...]

    @classmethod
    def read(cls, path: Path) -> Patch:
        """Parse and check one patch file."""
        raw = path.read_bytes()
        head, separator, _ = raw.partition(b"\n---\n")
        if not separator:
            raise PatchError(f"{path.name}: no line `---` between message and diff (git format-patch form)")
        message = email.parser.BytesParser().parsebytes(head.split(b"\n", 1)[1])
        subject = " ".join(str(email.header.make_header(email.header.decode_header(message["Subject"] or ""))).split())
        if not subject or re.search(r"\[PATCH[^]]*\d", subject):
            raise PatchError(f"{path.name}: the subject must exist and carry no number: {subject!r}")
        paragraphs = message.get_payload().strip().split("\n\n")
        pairs = [line.partition(": ") for line in paragraphs[-1].splitlines()]
        trailers = {key: value.strip() for key, _, value in pairs}
        missing = [key for key in TRAILERS if not trailers.get(key)]
        if missing:
            raise PatchError(f"{path.name}: the last paragraph of the message lacks {', '.join(missing)}")
        if len(paragraphs) < 2:
            raise PatchError(f"{path.name}: the message does not say why the patch is needed")
        if re.search(rb"\n-- \n[\d.]+", raw):
            raise PatchError(f"{path.name}: carries git's version as a signature")
        changes = tuple(unified.parse(raw, path.name))
        if not changes:
            raise PatchError(f"{path.name}: changes nothing")
        return cls(path.name, subject.removeprefix("[PATCH] "), trailers, changes)

    def applied_to(self, files: Files, reverse: bool = False) -> Files:
        """`files` after (`reverse`: before) this patch; only its own files are looked at."""
        result = dict(files)
        for change in self.changes:
            step = change.reversed() if reverse else change
            result[change.path] = unified.apply(result[change.path], step, self.name)
        return result


@dataclasses.dataclass(frozen=True)
class Series:
    """A folder below patches/."""

    folder: Path
    pins: dict[str, str]
    archives: dict[str, str]
    """File name of each archive that may be unpacked, with its SHA-256."""
    patches: tuple[Patch, ...]

    @classmethod
    def read(cls, folder: Path) -> Series:
        """Parse and check the folder; every patch must be listed once, every listed patch must exist."""
        if not (folder / "UPSTREAM").is_file() or not (folder / "series").is_file():
            raise PatchError(f"{folder}: needs the files UPSTREAM and series")
        pins, archives = _read_pins(folder / "UPSTREAM")
        lines = (line.split("#")[0].strip() for line in (folder / "series").read_text().splitlines())
        names = [line for line in lines if line]
        present = {path.name for path in folder.glob("*.patch")}
        if len(set(names)) != len(names) or set(names) != present:
            odd = sorted(set(names) ^ present) or sorted({name for name in names if names.count(name) > 1})
            raise PatchError(f"{folder}/series and the patch files disagree about: {', '.join(odd)}")
        patches = tuple(Patch.read(folder / name) for name in names)
        outside = [c.path for patch in patches for c in patch.changes if not c.path.startswith(pins["Root"] + "/")]
        if outside:
            raise PatchError(f"{folder.name}: files outside of {pins['Root']}/: {', '.join(outside)}")
        return cls(folder, pins, archives, patches)

    @property
    def name(self) -> str:
        """The upstream's name."""
        return self.folder.name

    @property
    def requirement(self) -> str:
        """What pip downloads the archive by: `Download` where no environment holds the package patched."""
        return self.pins.get("Download", self.pins["Package"])

    @property
    def needs_tree(self) -> bool:
        """Whether it is for a source tree alone: no package holds its files, so it is used only when named."""
        return self.pins["Package"] == "none"

    @property
    def package(self) -> str:
        """The package that holds its files, without a version."""
        return self.pins["Package"].split("==")[0]

    @property
    def paths(self) -> list[str]:
        """Every file that the series touches, sorted."""
        return sorted({change.path for patch in self.patches for change in patch.changes})

    def load(self, root: Path) -> Files:
        """The touched files as they are in `root`."""
        return {path: (root / path).read_bytes() if (root / path).exists() else None for path in self.paths}

    def pristine(self, files: Files) -> Files:
        """Upstream's files, whichever part of the series is applied to each of `files`.

        Files are looked at one by one: an interrupted run, or an upgrade that replaced some of them, leaves some
        patched and some not. Raises PatchError if a file is neither.
        """
        return {path: self._undo(path, files[path])[1] for path in self.paths}

    def applied(self, files: Files) -> dict[str, bool]:
        """Whether each patch is in `files`: in all files that it touches, together with those before it."""
        missing: set[str] = set()
        for path in self.paths:
            try:
                count = self._undo(path, files[path])[0]
            except PatchError:
                count = 0
            missing |= {name for name, _ in self._steps(path)[count:]}
        return {patch.name: patch.name not in missing for patch in self.patches}

    def _steps(self, path: str) -> list[tuple[str, unified.FileChange]]:
        return [(patch.name, change) for patch in self.patches for change in patch.changes if change.path == path]

    def _undo(self, path: str, content: bytes | None) -> tuple[int, bytes | None]:
        """How many of the changes to one file it holds, and the file without them."""
        steps = self._steps(path)
        for count in range(len(steps), -1, -1):
            try:
                before = content
                for name, change in reversed(steps[:count]):
                    before = unified.apply(before, change.reversed(), name)
                after = before
                for name, change in steps:
                    after = unified.apply(after, change, name)
            except PatchError:
                continue
            return count, before
        for name, change in steps:  # Find out what does not fit, for the message.
            content = unified.apply(content, change, name)
        raise PatchError(f"{path}: in a state that {self.name}'s series does not know")

    def patched(self, pristine: Files) -> Files:
        """Upstream's files with the whole series."""
        files = pristine
        for patch in self.patches:
            files = patch.applied_to(files)
        return files


def tree_hash(files: Files) -> str:
    """SHA-256 over paths and contents; a missing file counts as missing."""
    total = hashlib.sha256()
    for path in sorted(files):
        content = files[path]
        state = "absent" if content is None else hashlib.sha256(content).hexdigest()
        total.update(f"{path}\0{state}\n".encode())
    return total.hexdigest()


def _read_pins(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    pins: dict[str, str] = {}
    archives: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        key, separator, value = (part.strip() for part in line.partition(":"))
        if not separator or not value:
            raise PatchError(f"{path}, line {number}: expected `Key: value`, found {line!r}")
        if key == "Archive":
            file, _, digest = value.partition(" sha256:")
            if not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise PatchError(f"{path}, line {number}: expected `Archive: FILE sha256:DIGEST`")
            archives[file] = digest
        elif key in pins or key not in _PINS:
            raise PatchError(f"{path}, line {number}: {key}: repeated or unknown; known: {', '.join(_PINS)}")
        else:
            pins[key] = value
    missing = [key for key in _REQUIRED_PINS if key not in pins]
    if missing:
        raise PatchError(f"{path}: lacks {', '.join(missing)}")
    return pins, archives
