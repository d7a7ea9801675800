"""One process of one check: `python -m megatron_rl.doctor.child NAME SETTING OUTCOME`, started by `frame`.

Every process calls the check; the first rank leaves its outcome in the file OUTCOME. Whatever it raises is a failure.
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

from megatron_rl.doctor.checks import find
from megatron_rl.doctor.outcome import Outcome, failed
from megatron_rl.doctor.setting import Setting
from megatron_rl.errors import Fault, InputError


def main(name: str, setting_file: str, outcome_file: str) -> int:
    faulthandler.enable()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for module in (r"torch\.", r"megatron\."):
        warnings.filterwarnings("ignore", module=module)
    outcome = attempt(name, Setting.read(Path(setting_file)))
    sys.stdout.flush()
    if int(os.environ.get("RANK", 0)) == 0:
        partial = Path(f"{outcome_file}.partial")
        partial.write_text(json.dumps(asdict(outcome)))
        partial.replace(outcome_file)
    # Engines leave threads and groups behind whose end may hang; what they could say is in the file.
    sys.stderr.flush()
    os._exit(0)


def attempt(name: str, setting: Setting) -> Outcome:
    """What the check says, or what it raised as a failure; the stack goes to its log."""
    try:
        return find(name).load()(setting)
    except (InputError, Fault) as error:
        traceback.print_exc()
        return failed(str(error), "The message names the place; the log has the stack.")
    except Exception as error:  # noqa: BLE001 - a check that breaks has failed, whatever broke it
        traceback.print_exc()
        return failed(f"{type(error).__name__}: {error}", "The log has the stack.")


if __name__ == "__main__":
    main(*sys.argv[1:])
