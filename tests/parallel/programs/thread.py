"""A module that must not be imported before a fork (test_zygote.py)."""

from __future__ import annotations

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
