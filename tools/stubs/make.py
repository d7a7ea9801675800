"""Makes the wheels of this folder, see README.md: python tools/stubs/make.py"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

VERSIONS = {"torchvision": "0.28.0", "torchaudio": "2.13.0", "torchcodec": "0.14.0", "triton": "3.7.0"}
WHEEL = "Wheel-Version: 1.0\nGenerator: tools/stubs/make.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def contents(name: str, version: str) -> dict[str, str]:
    """Return the files of the wheel of one stub: metadata, and no module."""
    folder = f"{name}-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.10\n"
        f"Summary: Placeholder for {name} on machines without a GPU: satisfies metadata, imports nothing.\n"
    )
    files = {f"{folder}/METADATA": metadata, f"{folder}/WHEEL": WHEEL}
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}\n")
    return files | {f"{folder}/RECORD": "".join([*lines, f"{folder}/RECORD,,\n"])}


def write(folder: Path) -> list[Path]:
    """Write all wheels into ``folder``. Equal calls write equal bytes."""
    paths = []
    for name, release in VERSIONS.items():
        version = f"{release}+stub"
        path = folder / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for inner, text in contents(name, version).items():
                archive.writestr(zipfile.ZipInfo(inner), text)
        paths.append(path)
    return paths


if __name__ == "__main__":
    print(*write(Path(__file__).parent), sep="\n")
