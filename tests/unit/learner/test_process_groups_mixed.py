"""A world of gloo beside another backend, as "cpu:gloo,cuda:nccl" is one: torch's fake backend is in NCCL's place."""

import json
import subprocess
import sys

from tests.support.patience import PATIENCE_S
from tests.support.tiny import REPOSITORY

PROGRAM = """
import json
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from megatron.core import parallel_state
from megatron_rl.learner import process_groups

backend = process_groups._backend(torch.device("cuda")).replace("nccl", "fake")
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group(backend, store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()
groups = {"world": None, "data": parallel_state.get_data_parallel_group(), "model": process_groups.replica_group()}
found = {name: {d: type((group or dist.group.WORLD)._get_backend(torch.device(d))).__name__ for d in ("cpu", "cuda")}
         for name, group in groups.items()}
for group in groups.values():
    dist.barrier(group=group)
    held = [None]
    dist.all_gather_object(held, 1, group=group)
    assert held == [1]
print(json.dumps(found))
"""


def test_megatrons_groups_carry_objects_over_gloo():
    """The fake backend carries nothing: objects and barriers that went its way would not come back."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    both = {"cpu": "ProcessGroupGloo", "cuda": "FakeProcessGroup"}
    assert printed == {"world": both, "data": both, "model": both}
