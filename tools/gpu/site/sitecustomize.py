"""On the path of every process that the campaign starts: Python runs it before anything else.

NCCL compares a hash of the host first. With another one in each process, several ranks may use one GPU.
"""

import os

os.environ["NCCL_HOSTID"] = f"pid{os.getpid()}"
