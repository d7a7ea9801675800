"""Compile TransformerEngine's torch extension for a node's Python and torch, on a machine without a GPU or nvcc.

    python -m tools.gpu extension --python DIR --objects DIR --out FILE SOURCE WHEEL …

SOURCE is that of transformer-engine-torch. WHEELS are those of the node's torch, of transformer-engine-cu13, and of
nvidia's cuda-runtime, cuda-nvrtc, cuda-profiler-api, cudnn, nccl, cublas, cusparse, cusolver, curand and nvtx.

All of it is C++. Files are compiled several at a time, since most of the time goes into torch's headers. No library is
loaded; the linker looks whether every symbol is Python's, the system's, or in a library of the wheels.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from megatron_rl.patching.upstream import SAFELY

UNITS = 6
FLAGS = "-O1 -g0 -w -fPIC -std=c++17 -fvisibility=hidden -DTORCH_API_INCLUDE_EXTENSION_H"
FLAGS += " -DTORCH_EXTENSION_NAME=transformer_engine_torch"
LOADED = {f"lib{name}.so" for name in ("transformer_engine", "c10", "c10_cuda", "torch")}  # before it, in its process
LOADED |= {f"libtorch_{name}.so" for name in ("cpu", "cuda", "python")}
LOADED |= {"libcudart.so.13", "libcublasLt.so.13", "libcudnn.so.9"}
PYTHON = re.compile("_?Py")


def unpack(files: list[Path], folder: Path) -> None:
    """The source, and of wheels headers and the libraries that it needs."""
    for file in files:
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                wanted = [name for name in wheel.namelist() if "/include/" in name or Path(name).name in LOADED]
                wheel.extractall(folder, wanted)
        else:
            with tarfile.open(file) as source:
                source.extractall(folder, **SAFELY)


def compile_units(folder: Path, python: Path, objects: Path) -> list[Path]:
    """Objects of all sources; those that are in ``objects`` are there already."""
    (source,) = folder.glob("*/csrc")
    common = source.parent / "common_headers"
    places = [source, common, common / "common", common / "common/include", python, folder / "torch/include"]
    places += [folder / "torch/include/torch/csrc/api/include", *folder.glob("nvidia/*/include")]
    bindings = source / "extensions/pybind.cpp"
    files = sorted(set(source.rglob("*.cpp")) - {bindings})
    made = []
    for number, unit in enumerate([[bindings], *(files[start::UNITS] for start in range(UNITS))]):
        text, made = objects / f"unit-{number}.cpp", [*made, objects / f"unit-{number}.o"]
        if not made[-1].exists():
            text.write_text("".join(f'#include "{file}"\n' for file in unit))
            part = made[-1].with_suffix(".part")
            places_of = [word for place in places for word in ("-I", str(place))]
            subprocess.run(["g++", *FLAGS.split(), *places_of, "-c", str(text), "-o", str(part)], check=True)
            part.rename(made[-1])
    return made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu extension", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="SOURCE|WHEEL")
    parser.add_argument("--python", type=Path, required=True, help="the folder with Python.h of the node's version")
    parser.add_argument("--objects", type=Path, required=True, help="a folder; what is compiled there stays")
    parser.add_argument("--out", type=Path, required=True, help="transformer_engine_torch.cpython-….so")
    options = parser.parse_args(arguments)
    options.objects.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        unpack(options.files, folder := Path(name))
        objects = compile_units(folder, options.python, options.objects)
        libraries = sorted(file for file in folder.rglob("lib*.so*") if file.name in LOADED)
        link = ["g++", "-shared", "-s", "-o", options.out, *objects, "-Wl,--no-as-needed", *libraries]
        link += ["-Wl,--allow-shlib-undefined,-z,defs,--warn-unresolved-symbols"]
        said = subprocess.run(link, capture_output=True, text=True, check=True).stderr
    missing = {symbol for symbol in re.findall(r"undefined reference to `([^']*)", said) if not PYTHON.match(symbol)}
    size = options.out.stat().st_size / (1 << 20)
    print(f"{size:.1f} MiB, linked with {len(libraries)} libraries; symbols that are nowhere: {sorted(missing)[:5]}")
    return int(bool(missing) or len(libraries) != len(LOADED))
