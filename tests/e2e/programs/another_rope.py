"""`train` with a learner whose rotary embedding turns faster than config.json says, and than vLLM's does."""

import sys
from dataclasses import replace

from megatron_rl.__main__ import main
from megatron_rl.learner import learner

_read = learner.read_architecture
learner.read_architecture = lambda path: replace(_read(path), rope_theta=50.0)

if __name__ == "__main__":
    sys.exit(main())
