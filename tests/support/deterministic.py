"""A plugin of pytest (PYTEST_PLUGINS=tests.support.deterministic): torch refuses kernels whose result may differ from
run to run, and takes another where there is one."""

import torch

torch.use_deterministic_algorithms(True)
