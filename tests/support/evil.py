"""A pickle that does something when it is read."""

import os
from pathlib import Path


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)
