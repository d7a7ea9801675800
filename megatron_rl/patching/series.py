"""patches/<upstream>/: the pin (UPSTREAM), the order (series) and the patches with their trailers.

The patches to Megatron stand in patches/megatron/<purpose>/, because one file may serve several releases. git reads and
applies patches; the user's settings, and a repository around the files, do not change the result.
"""

from __future__ import annotations

import dataclasses
import email.header
import email.parser
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron_rl.errors import InputError
from megatron_rl.patching import cpu

Files = dict[str, bytes | None]
"""Contents by path; None: the file does not exist."""


class PatchError(InputError):
    """A tree, patch or pin is invalid; the message says what to do."""


class GitMissing(InputError):
    """git is not installed. It is not a PatchError, because the tree and the patches may be valid."""


def run_git(folder: Path, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run `git ARGUMENTS` in ``folder`` with ``given`` as its standard input."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.parent)  # do not search for a repository above the folder
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, input=given, capture_output=True, env=environment)
    except FileNotFoundError:
        raise GitMissing("patches are read and applied by git, which is not installed (apt-get install git)") from None


def apply(change: bytes, files: Files, paths: Sequence[str], source: str, reverse: bool = False) -> Files:
    """Return ``files`` after ``change`` (``reverse``: before it), with changes to ``paths`` only.

    Removed lines and their context must match byte for byte; their position may differ. If a change does not fit,
    PatchError names it, after ``source``.
    """
    with tempfile.TemporaryDirectory(prefix="patches-") as name:
        folder = Path(name).resolve()
        write_files(folder, {path: files[path] for path in paths})
        options = ["--whitespace=nowarn", *(f"--include={path}" for path in paths), *(["--reverse"] if reverse else [])]
        done = run_git(folder, "apply", *options, "-", given=change)
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise PatchError(f"{source}: {'; '.join(line.removeprefix('error: ') for line in lines)}")
        return files | {path: content_of(folder / path) for path in paths}


def write_files(folder: Path, files: Files) -> None:
    """Write those of ``files`` that exist below ``folder``."""
    for path, content in files.items():
        if content is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


def content_of(path: Path) -> bytes | None:
    """The content of a file; None: it does not exist."""
    return path.read_bytes() if path.is_file() else None


def diff(old: Files, new: Files) -> bytes:
    """Return git's diff of two states of files. Its `index` lines have their hashes (`blob`)."""
    changed = [path for path in new if old[path] != new[path]]
    with tempfile.TemporaryDirectory(prefix="patches-") as name:
        for side, files in (("a", old), ("b", new)):
            Path(name, side).mkdir()
            write_files(Path(name, side), {path: files[path] for path in changed})
        options = ("--no-color", "--no-ext-diff", "--no-renames", "--full-index", "--no-prefix", "--no-index")
        done = run_git(Path(name), "diff", *options, "a", "b")
    # A side without the file is named /dev/null only in its own place.
    return re.sub(rb"(?m)^diff --git [ab]/(.*) [ab]/\1$", rb"diff --git a/\1 b/\1", done.stdout)


def blob(content: bytes | None) -> str:
    """The hash by which an `index` line names a file."""
    if content is None:
        return "0" * 40
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


TRAILERS = ("Origin", "Forwarded", "Drop-When", "Test")
FOR_UPSTREAM = "Upstream-Test"
"""The trailer of patches to Megatron that says the smallest test which a pull request would bring."""
PURPOSES = ("routing", "precision", "schedule", "fixes", "cpu")
MEGATRON = "megatron/core"
TEMPORARY_PREFIX = ".patches-new-"
"""Of files that a command writes beside those that they are to replace."""
_POOL = "megatron"
_REQUIRED_PINS = ("Project", "Version", "Source", "Package", "Root", "Tree-Before")
_PINS = (*_REQUIRED_PINS, "Download", "Checkout-Root")


def default_purposes() -> tuple[str, ...]:
    """What is applied if none is named: what runs of this project need in this environment."""
    return ("routing", "precision", "fixes", *(["cpu"] if cpu.is_wanted() else []))


@dataclasses.dataclass(frozen=True)
class Patch:
    """One patch file of a series."""

    name: str
    subject: str
    trailers: dict[str, str]
    diff: bytes
    paths: tuple[str, ...]
    """Files that it changes."""
    created: frozenset[str]
    """Those of them that it creates."""
    purpose: str | None
    """The series that it belongs to; None: it is of no series of Megatron's."""

    @property
    def path(self) -> str:
        """SERIES/NAME, without the release and the ending of the file's name: what `--series` takes."""
        return f"{self.purpose}/{re.sub(r'(-[0-9]+[.][0-9]+)?[.]patch$', '', self.name)}"

    @classmethod
    def read(cls, path: Path) -> Patch:
        """Parse, check and return one patch file."""
        raw = path.read_bytes()
        head, separator, diff = raw.partition(b"\n---\n")
        if not separator:
            raise PatchError(f"{path.name}: no line `---` between message and diff (git format-patch form)")
        message = email.parser.BytesParser().parsebytes(head.split(b"\n", 1)[1])
        subject = " ".join(str(email.header.make_header(email.header.decode_header(message["Subject"] or ""))).split())
        if not subject or re.search(r"\[PATCH[^]]*\d", subject):
            raise PatchError(f"{path.name}: the subject must exist and carry no number: {subject!r}")
        paragraphs = message.get_payload().strip().split("\n\n")
        pairs = [line.partition(": ") for line in paragraphs[-1].splitlines()]
        trailers = {key: value.strip() for key, _, value in pairs}
        purpose = path.parent.name if path.parent.parent.name == _POOL else None
        wanted = TRAILERS if purpose is None or trailers.get("Forwarded") == "not-needed" else (*TRAILERS, FOR_UPSTREAM)
        missing = [key for key in wanted if not trailers.get(key)]
        if missing:
            raise PatchError(f"{path.name}: the last paragraph of the message lacks {', '.join(missing)}")
        if len(paragraphs) < 2:
            raise PatchError(f"{path.name}: the message does not say why the patch is needed")
        if re.search(rb"\n-- \n[\d.]+", raw):
            raise PatchError(f"{path.name}: carries git's version as a signature")
        diff = separator + diff
        if other := re.search(rb"(?m)^(GIT binary patch|Binary files|rename |copy |old mode).*", diff):
            raise PatchError(f"{path.name}: {other[0].decode()}: only changes of text are supported")
        paths = tuple(name.decode() for name in re.findall(rb"(?m)^diff --git a/(.+) b/\1$", diff))
        if not paths:
            raise PatchError(f"{path.name}: changes nothing")
        created = re.findall(rb"(?m)^diff --git a/.+ b/(.+)\nnew file mode", diff)
        subject = subject.removeprefix("[PATCH] ")
        return cls(path.name, subject, trailers, diff, paths, frozenset(map(bytes.decode, created)), purpose)

    def applied_to(self, files: Files, reverse: bool = False) -> Files:
        """Return `files` after (`reverse`: before) this patch."""
        return apply(self.diff, files, self.paths, self.name, reverse)


@dataclasses.dataclass(frozen=True)
class Rules(Patch):
    """The series `cpu`: what it changes, the files that are given say."""

    root: str

    @classmethod
    def below(cls, root: str) -> Rules:
        """The rules for the sources below the folder ``root``."""
        text = repr((cpu.PATTERNS, cpu.PLACES)).encode()
        return cls("rules", "Name the CPU where the source names CUDA", {}, text, (), frozenset(), "cpu", root)

    def applied_to(self, files: Files, reverse: bool = False) -> Files:
        """Return `files` written for CPUs. Not reversible: the tree's record is what leads back."""
        try:
            return cpu.rewrite(files, self.root)
        except InputError as error:
            raise PatchError(f"cpu: {error}") from None


@dataclasses.dataclass(frozen=True)
class Series:
    """A folder below patches/."""

    folder: Path
    pins: dict[str, str]
    archives: dict[str, str]
    """File name of each archive that may be unpacked, with its SHA-256."""
    patches: tuple[Patch, ...]
    files: dict[str, Path]
    """Where each patch stands, by its name."""
    superseded: tuple[str, ...]
    """What UPSTREAM says of patches that it does not list, because upstream has them."""

    @classmethod
    def read(cls, folder: Path) -> Series:
        """Parse, check and return the folder's series. Its list and its patch files must agree."""
        if not (folder / "UPSTREAM").is_file() or not (folder / "series").is_file():
            raise PatchError(f"{folder}: needs the files UPSTREAM and series")
        pins, archives, superseded = _read_pins(folder / "UPSTREAM")
        lines = (line.split("#")[0].strip() for line in (folder / "series").read_text().splitlines())
        names = [line for line in lines if line]
        pool = folder.parent / _POOL
        files = {Path(name).name: (pool if "/" in name else folder) / name for name in names}
        present = {path.name for path in folder.glob("*.patch")}
        own = {name for name in names if "/" not in name}
        lost = {name for name, path in files.items() if not path.is_file()}
        if len(files) != len(names) or own != present or lost:
            odd = sorted((own ^ present) | lost) or sorted({name for name in names if names.count(name) > 1})
            raise PatchError(f"{folder}/series and the patch files disagree about: {', '.join(odd)}")
        patches = tuple(map(Patch.read, files.values()))
        if pins["Root"] == MEGATRON:
            patches += (Rules.below(MEGATRON),)
        tops = tuple(pins[key] + "/" for key in ("Root", "Checkout-Root") if key in pins)
        outside = [path for patch in patches for path in patch.paths if not path.startswith(tops) or "/../" in path]
        if outside:
            raise PatchError(f"{folder.name}: files outside of {' and '.join(tops)}: {', '.join(outside)}")
        return cls(folder, pins, archives, patches, files, superseded)

    @property
    def purposes(self) -> tuple[str, ...]:
        """The series that it holds patches of, in the order in which they are applied."""
        return tuple(dict.fromkeys(patch.purpose for patch in self.patches if patch.purpose))

    def of(self, purposes: Sequence[str] | None) -> list[Patch]:
        """The patches of these series (None: of those that are applied by default).

        SERIES/PATCH is that patch and those before it in its series, which it may build on.
        """
        wanted = set(default_purposes() if purposes is None else purposes)
        paths = [patch.path for patch in self.patches if patch.purpose]
        if unknown := sorted(name for name in wanted if "/" in name and name not in paths):
            raise PatchError(f"{self.name} has no {', '.join(unknown)}; it has {', '.join(paths)}")
        for path in reversed(paths):
            purpose = path.split("/")[0]
            if any(name.startswith(f"{purpose}/") for name in wanted & set(paths[paths.index(path) :])):
                wanted.add(path)
        return [patch for patch in self.patches if patch.purpose is None or {patch.purpose, patch.path} & wanted]

    def reachable(self, patch: Patch, files: Files) -> bool:
        """Whether the tree has what ``patch`` changes. A package has not all of the files of a checkout."""
        return all(files[path] is not None or path in patch.created or self._in_root(path) for path in patch.paths)

    def _in_root(self, path: str) -> bool:
        return path.startswith(self.pins["Root"] + "/")

    @property
    def name(self) -> str:
        """The upstream's name."""
        return self.folder.name

    @property
    def requirement(self) -> str:
        """The requirement by which pip downloads the archive: `Download` if no environment has the patched package."""
        return self.pins.get("Download", self.pins["Package"])

    @property
    def needs_tree(self) -> bool:
        """Whether it is only for a source tree: no package has its files, so it is used only when named."""
        return self.pins["Package"] == "none"

    @property
    def package(self) -> str:
        """The package with its files, without a version."""
        return self.pins["Package"].split("==")[0]

    @property
    def paths(self) -> list[str]:
        """Every file that a patch file touches, sorted."""
        return sorted({path for patch in self.patches for path in patch.paths})

    def load(self, root: Path) -> Files:
        """Return the files that the series may touch, as they are in `root`."""
        paths = set(self.paths)
        if any(isinstance(patch, Rules) for patch in self.patches):
            for folder, _, names in os.walk(root / MEGATRON):
                where = Path(folder).relative_to(root)
                names = [name for name in names if name.endswith(".py") and not name.startswith(TEMPORARY_PREFIX)]
                paths |= {str(where / name) for name in names}
        return {path: content_of(root / path) for path in sorted(paths)}

    def tree_hash(self, files: Files) -> str:
        """The hash of those of `files` that a package holds and a patch file touches."""
        return tree_hash({path: files[path] for path in self.paths if self._in_root(path)})

    def patched(self, pristine: Files, names: Collection[str] | None = None) -> Files:
        """Upstream's files with the patches of these names (None: with those that are applied by default)."""
        chosen = self.of(None) if names is None else [patch for patch in self.patches if patch.name in names]
        files = pristine
        for patch in chosen:
            files = patch.applied_to(files)
        return files


def tree_hash(files: Files) -> str:
    """Return the SHA-256 over paths and contents; a missing file is part of the hash."""
    total = hashlib.sha256()
    for path in sorted(files):
        content = files[path]
        state = "absent" if content is None else hashlib.sha256(content).hexdigest()
        total.update(f"{path}\0{state}\n".encode())
    return total.hexdigest()


def _read_pins(path: Path) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    pins: dict[str, str] = {}
    archives: dict[str, str] = {}
    superseded: list[str] = []
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
        elif key == "Superseded":
            superseded.append(value)
        elif key in pins or key not in _PINS:
            raise PatchError(f"{path}, line {number}: {key}: repeated or unknown; known: {', '.join(_PINS)}")
        else:
            pins[key] = value
    missing = [key for key in _REQUIRED_PINS if key not in pins]
    if missing:
        raise PatchError(f"{path}: lacks {', '.join(missing)}")
    return pins, archives, tuple(superseded)
