"""What a rank of the campaign runs: `python -m tools.gpu.rank FOLDER`. `run.Run.ranks` starts it.

Each job's result is written when the job has ended: a run that is cut off keeps what it had.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import warnings
from pathlib import Path

from tools.gpu.run import PLANT


def main(folder: Path) -> None:
    jobs, device, libraries = pickle.loads((folder / "jobs.pkl").read_bytes())
    from megatron_rl.process.devices import barrier_devices
    from megatron_rl.process.fp32_products import set_environment

    set_environment()
    for module in (r"torch\.", r"megatron\."):
        warnings.filterwarnings("ignore", module=module)
    if libraries == "te" and device == "cpu":
        from tests.support import te

        te.install()
    import torch
    from torch.utils._pytree import tree_map_only

    from tests.support.layouts import leave_layout
    from tools.gpu import faults

    torch.set_num_threads(1)
    if fault := getattr(faults, os.environ[PLANT], None):  # some are of the script itself
        fault()
    rank = os.environ["RANK"]
    for number, (name, (function, arguments)) in enumerate(jobs.items()):
        module, _, attribute = function.rpartition(".")
        result = getattr(importlib.import_module(module), attribute)(**arguments)
        result = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), result)
        part = folder / f"rank{rank}-{number}.part"
        part.write_bytes(pickle.dumps((name, result)))
        part.rename(part.with_suffix(".pkl"))
        leave_layout()
    if torch.distributed.is_initialized():
        where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        torch.distributed.barrier(
            device_ids=barrier_devices(where)
        )  # one that leaves first takes connections down that its peers still use
    os._exit(0)  # engines leave threads behind; the results are in the files


if __name__ == "__main__":
    main(Path(sys.argv[1]))
