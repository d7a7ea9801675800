"""One process of one check: `python -m megatron_rl.doctor.child NAME SETTING OUTCOME`, started by `frame`.

Every process calls the check and leaves its outcome in a file. Whatever it raises is a failure, and ends it with status
1; the other ranks are then ended by `frame`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path

from megatron_rl.doctor.checks import Outcome, Setting, failed, find
from megatron_rl.errors import EXIT_DONE, EXIT_FAULT, Fault, InputError
from megatron_rl.process.fp32_products import set_environment
from megatron_rl.process.host import write_whole


def main(name: str, setting_file: str, outcome_file: str) -> int:
    faulthandler.enable()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    set_environment()
    for module in (r"torch\.", r"megatron\."):
        warnings.filterwarnings("ignore", module=module)
    outcome, raised = attempt(name, Setting.read(Path(setting_file)))
    path = outcome_path(Path(outcome_file), int(os.environ.get("RANK", 0)))
    write_whole(path, json.dumps(asdict(outcome)))
    if not raised and "torch.distributed" in sys.modules:
        _leave_together()
    sys.stdout.flush()
    sys.stderr.flush()
    # Engines leave threads and groups behind whose end may hang; what they could say is in the file.
    os._exit(EXIT_FAULT if raised else EXIT_DONE)


def outcome_path(path: Path, rank: int) -> Path:
    """Of a rank's outcome: ``path`` is the first's."""
    return path.with_name(f"{path.name}.{rank}") if rank else path


def attempt(name: str, setting: Setting) -> tuple[Outcome, bool]:
    """What the check says, or what it raised as a failure, and whether it raised; the stack goes to its log."""
    try:
        return find(name).load()(setting), False
    except (InputError, Fault) as error:
        traceback.print_exc()
        return failed(str(error), "The message names the place; the log has the stack."), True
    except ModuleNotFoundError as error:
        traceback.print_exc()
        fix = "pip install -r requirements.txt (requirements-cpu.txt without a GPU), as its head says"
        return failed(f"the package {error.name} is not installed in {sys.executable}", fix), True
    except Exception as error:  # noqa: BLE001 - a check that breaks has failed, whatever broke it
        traceback.print_exc()
        return failed(f"{type(error).__name__}: {error}", "The log has the stack."), True


def _leave_together() -> None:
    """Wait for the other ranks: one that leaves first takes connections down that its peers still read from."""
    from megatron_rl.process.ranks import any_rank

    any_rank(False)  # over gloo, also between GPUs


if __name__ == "__main__":
    main(*sys.argv[1:])
