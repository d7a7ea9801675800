"""Make small what has to travel to a node without a network: wheels, unpacked, with the code of one architecture.

    python -m tools.gpu pack --out DIR [--sm 90] [--without GLOB …] WHEEL …      DIR/load-00.bin … of at most 60 MiB
    cat load-*.bin | tar xJ -C SITE                                                on the node; then PYTHONPATH=SITE

A CUDA library holds each kernel once for each architecture, in containers of its section .nv_fatbin. A container stays
where it is and loses its members for other architectures. The kept ones move to its front, as they are, and zeros
follow, which compress to nothing. A container without a member for this architecture keeps what a driver could
compile for it (PTX), or else its smallest member, so that none is empty. Every library is read again afterwards, and
the bytes of kept members are compared with those of the wheel.
"""

from __future__ import annotations

import argparse
import lzma
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

MAGIC, MEMBER_MIN = 0xBA55ED50, 64
CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all members
MEMBER = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of what follows it
PTX = 1
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
LOAD_MIB = 60
MIB = 1 << 20


class Unreadable(Exception):
    """A library of another form, which travels as it is."""


@dataclass(frozen=True)
class Member:
    kind: int
    sm: int
    start: int  # of its header, in the file
    end: int


@dataclass(frozen=True)
class Container:
    start: int
    members: tuple[Member, ...]
    end: int


def sections(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Start and end of the sections of a 64-bit ELF file that hold containers."""
    if data[:5] != b"\x7fELF\x02":
        return
    (table,), (size, count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        if bytes(data[start : data.index(b"\0", start)]) in SECTIONS:
            yield offset, offset + length


def containers(data: bytes | bytearray) -> Iterator[Container]:
    """All containers of a library. Raises `Unreadable` where members do not fill one."""
    for start, end in sections(data):
        while (start := data.find(struct.pack("<I", MAGIC), start, end)) >= 0:
            _, _, header, length = CONTAINER.unpack_from(data, start)
            place, last, members = start + header, start + header + length, []
            if last > end:
                raise Unreadable(f"a container at {start} goes beyond its section")
            while place < last:
                kind, _, own, size = MEMBER.unpack_from(data, place)
                if own < MEMBER_MIN or place + own + size > last:
                    raise Unreadable(f"a member at {place} does not fit in its container")
                (sm,) = struct.unpack_from("<I", data, place + 28)  # of its header
                members.append(Member(kind, sm, place, place + own + size))
                place += own + size
            yield Container(start, tuple(members), last)
            start = last


def kept(members: tuple[Member, ...], sm: int) -> list[Member]:
    if own := [m for m in members if m.sm == sm and m.kind != PTX]:
        return own
    if compiled := [m for m in members if m.kind == PTX and m.sm <= sm]:
        return [max(compiled, key=lambda m: m.sm)]
    return [min(members, key=lambda m: m.end - m.start)] if members else []


def emptied(data: bytes, sm: int) -> bytearray:
    """The library with other architectures' code replaced by zeros. Raises `Unreadable`."""
    result = bytearray(data)
    for container in containers(data):
        code = b"".join(data[m.start : m.end] for m in kept(container.members, sm))
        *head, _ = CONTAINER.unpack_from(data, container.start)
        CONTAINER.pack_into(result, container.start, *head, len(code))
        place = container.start + head[-1]
        result[place : container.end] = code + bytes(container.end - place - len(code))
    return result


def prove(before: bytes, after: bytes | bytearray, sm: int) -> int:
    """Compare kept members, in order, and all bytes outside of containers. Returns the number of members."""
    number = place = 0
    for old, new in zip(containers(before), containers(after), strict=True):
        assert old.start == new.start, f"a container moved from {old.start} to {new.start}"
        code = [before[m.start : m.end] for m in kept(old.members, sm)]
        assert code == [bytes(after[m.start : m.end]) for m in new.members], f"other code in the one at {old.start}"
        assert before[place : old.start] == bytes(after[place : old.start]), f"other bytes before {old.start}"
        number, place = number + len(code), old.end
    assert before[place:] == bytes(after[place:]), f"other bytes after {place}"
    return number


def unpack(wheel: Path, folder: Path, sm: int, without: list[str]) -> Iterator[str]:
    """Unpack ``wheel``, its libraries emptied and proved. A line for each library with code for GPUs."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith("/") or any(fnmatch(name, pattern) for pattern in without):
                continue
            data = archive.read(name)
            if next(sections(data), None):
                try:
                    small = emptied(data, sm)
                    number = prove(data, small, sm)
                    size = len(lzma.compress(small, preset=1)) / MIB
                    yield f"{name}: {len(data) / MIB:.0f} MiB, packed {size:.1f}; {number} kept members equal"
                    data = bytes(small)
                except Unreadable as problem:
                    yield f"{name}: {len(data) / MIB:.0f} MiB as it is: {problem}"
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


class Loads:
    """A file to write to, in pieces of ``limit`` bytes: ``folder``/load-00.bin and so on."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit, self.sizes = folder, limit, [0]

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            if self.sizes[-1] == self.limit:
                self.sizes.append(0)
            part = view[: self.limit - self.sizes[-1]]
            with (self.folder / f"load-{len(self.sizes) - 1:02}.bin").open("ab") as file:
                file.write(part)
            self.sizes[-1] += len(part)
            view = view[len(part) :]
        return len(data)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu pack", description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist")
    parser.add_argument("--sm", type=int, default=90, help="the architecture that stays (default: 90, Hopper)")
    parser.add_argument("--without", nargs="*", default=[], metavar="GLOB", help="files that stay behind")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True)
    loads = Loads(options.out, LOAD_MIB * MIB)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        site = Path(folder)
        for wheel in options.wheels:
            print(f"{wheel.name}: {wheel.stat().st_size / MIB:.0f} MiB")
            for line in unpack(wheel, site, options.sm, options.without):
                print(f"  {line}", flush=True)
        with tarfile.open(fileobj=loads, mode="w|xz") as archive:
            for path in sorted(path for path in site.rglob("*") if path.is_file()):
                archive.add(path, str(path.relative_to(site)))
    print(f"{len(loads.sizes)} loads: {', '.join(f'{size / MIB:.1f}' for size in loads.sizes)} MiB")
    return 0
