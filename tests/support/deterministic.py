"""A plugin of pytest (``-p tests.support.deterministic``): torch refuses kernels whose result may differ from run to
run, and takes another where there is one. Processes that support.zygote forks import it too, for its variable."""

import os

import torch

os.environ["DETERMINISTIC_KERNELS"] = "1"
torch.use_deterministic_algorithms(True)
