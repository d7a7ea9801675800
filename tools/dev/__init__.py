"""Programs that make, measure and check what the repository ships. From its root: ``python -m tools.dev.NAME``."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
