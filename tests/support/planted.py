"""The faults of docs/doctor.md, which tests plant, and what the doctor is to say of each."""

from __future__ import annotations

from tests.support.tiny import REPOSITORY


def rows() -> dict[tuple[str, str], str]:
    """Check and fault → message."""
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in (REPOSITORY / "docs" / "doctor.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    return {(check.strip("`"), fault): message for check, fault, message in cells}
