"""The real TransformerEngine on a CPU: its Python, over the reference extension beside this file.

    from tests.support import te
    te.install()          # before anything imports megatron.core, in a process of its own

Set-up puts TransformerEngine's wheel and what its import needs into `te.FOLDER`, never into the environment, and
applies patches/transformer-engine there: layers then allocate on, and check for, the device that there is. What asks
torch.cuda about the device by a call, the answers below serve. The device they describe is an H100, so that the
Python takes the branches that it takes there.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from tests.support.patience import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / ".cache" / "transformer-engine"
MISSING = None if (FOLDER / ".ready").is_file() else f"{FOLDER} is not there: `make setup` fetches TransformerEngine"
H100 = SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, name="reference of an H100"
)


def install() -> None:
    """Make `import transformer_engine` and Megatron's layers of it work in this process, and the learner use them."""
    if MISSING:
        raise RuntimeError(MISSING)
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core is imported already, and has decided that there is no TransformerEngine")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TransformerEngine's own way to be imported without CUDA's libraries
    sys.path += [str(FOLDER), str(Path(__file__).parent)]
    import torch

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_device_properties = lambda device=None: H100
    torch.cuda.get_device_capability = lambda device=None: (H100.major, H100.minor)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda device=None: torch.cpu.current_stream()
    torch.cuda.synchronize = lambda device=None: None
    torch.compiler.set_stance("force_eager")  # of what Megatron compiles on a GPU
    for module in (
        "transformer_engine_torch",
        "transformer_engine.pytorch",
    ):  # in this order: the second wants the first
        importlib.import_module(module)

    from megatron_rl.learner import model

    model.TRANSFORMER_ENGINE_DEVICES.add("cpu")


def run_interpreted(module: str, *arguments: str) -> str:
    """What `python -m module` prints with Triton's interpreter, in a process of its own: Triton decides at its import
    whether it interprets."""
    return run_with_triton(module, *arguments, interpreted=True)


def run_with_triton(module: str, *arguments: str, interpreted: bool) -> str:
    """What `python -m module` prints beside Triton. The path holds Triton and nothing else of the folder: megatron-core
    would import its TransformerEngine."""
    with tempfile.TemporaryDirectory() as folder:
        for part in FOLDER.glob("triton*"):  # the package, and what names its compilers
            (Path(folder) / part.name).symlink_to(part)
        environment = os.environ | {
            "TRITON_INTERPRET": str(int(interpreted)),
            "TRITON_CACHE_DIR": f"{folder}/cache",
            "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}",
        }
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
