"""Fat binaries without the code of other architectures: what is kept is kept byte for byte, a change shows."""

import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.gpu import pack
from tools.gpu.pack import CONTAINER, MAGIC, containers, emptied, prove

ELF, PTX, SM = 2, 1, 90
member = st.tuples(st.sampled_from([PTX, ELF]), st.sampled_from([75, 80, 90, 100, 120]), st.binary(min_size=1))


def member_bytes(kind: int, sm: int, code: bytes) -> bytes:
    code += bytes(-len(code) % 8)
    header = struct.pack("<HHIQIIHHI", kind, 1, 64, len(code), 0, 0, 0, 0, sm)
    return header + bytes(64 - len(header)) + code


def library(filled: list[list[tuple[int, int, bytes]]], section: bytes = b".nv_fatbin") -> bytes:
    """A 64-bit ELF file with one section of containers between other bytes."""
    body = b""
    for members in filled:
        code = b"".join(member_bytes(*one) for one in members)
        body += CONTAINER.pack(MAGIC, 1, 16, len(code)) + code
    names = b"\0" + section + b"\0.shstrtab\0"
    start = 64
    table = start + len(body) + len(names)
    headers = bytes(64)
    headers += struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, start, len(body), 0, 0, 8, 0)
    headers += struct.pack("<IIQQQQIIQQ", 2 + len(section), 3, 0, 0, start + len(body), len(names), 0, 0, 1, 0)
    head = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    )
    return head + body + names + headers


@given(st.lists(st.lists(member, max_size=6), max_size=4))
def test_members_of_one_architecture_stay_as_they_are_and_nothing_else(filled):
    before = library(filled)
    after = emptied(before, SM)
    assert len(after) == len(before)
    found = list(containers(after))
    assert prove(before, after, SM) == sum(len(container.members) for container in found)
    for members, container in zip(filled, found, strict=True):
        own = [one for one in members if one[:2] == (ELF, SM)]
        compiled = [one for one in members if one[0] == PTX and one[1] <= SM]
        left = [(m.kind, m.sm) for m in container.members]
        assert (left == []) == (members == [])
        if own:
            assert left == [(ELF, SM)] * len(own)
            assert b"".join(bytes(after[m.start : m.end]) for m in container.members) == b"".join(
                member_bytes(*one) for one in own
            )
        elif compiled:
            assert left == [(PTX, max(sm for _, sm, _ in compiled))]


FILLED = [[(ELF, 80, b"a" * 9), (ELF, 90, b"b" * 20), (PTX, 90, b"c" * 30)], [(ELF, 90, b"d" * 40), (ELF, 100, b"e")]]


@pytest.mark.parametrize("what", ["kept code", "a container's place", "bytes behind the section"])
def test_a_change_is_seen(what):
    before, after = library(FILLED), emptied(library(FILLED), SM)
    place = {
        "kept code": after.index(b"d" * 40),
        "a container's place": list(containers(after))[1].start,
        "bytes behind the section": after.index(b".shstrtab"),
    }[what]
    after[place] ^= 1
    with pytest.raises((AssertionError, ValueError)):
        prove(before, after, SM)


def test_a_wheel_is_unpacked_with_small_libraries(tmp_path, capsys):
    wheel, out = tmp_path / "a-1-py3-none-any.whl", tmp_path / "out"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/lib.so", library(FILLED))
        archive.writestr("a/big.a", b"left behind")
        archive.writestr("a/__init__.py", "x = 1\n")
    assert pack.main([str(wheel), "--out", str(out), "--without", "*.a"]) == 0
    assert "2 kept members equal" in capsys.readouterr().out
    import io
    import tarfile

    packed = b"".join(file.read_bytes() for file in sorted(out.glob("load-*.bin")))
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as archive:
        assert archive.getnames() == ["a/__init__.py", "a/lib.so"]
        assert archive.extractfile("a/lib.so").read() == emptied(library(FILLED), SM)
