"""One side of `tools.bench.compare`: a process with one commit's package, which runs rounds as it is told to.

    PYTHONPATH=TREE python side.py CASES.py

Reads the name of a case a line, writes a line of JSON for each: processor seconds of a round, a count, or an error.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
import warnings
from typing import Any


def main(path: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    warnings.simplefilter("ignore")
    spec = importlib.util.spec_from_file_location("cases", path)
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    ready: dict[str, Any] = {}
    for line in sys.stdin:
        name = line.strip()
        try:
            if name not in ready:
                ready[name] = cases.CASES[name]()
            gc.collect()
            start = time.process_time()
            count = ready[name]()
            answer = {"seconds": time.process_time() - start} if count is None else {"count": count}
        except Exception as error:  # noqa: BLE001 - a commit may lack what a case calls; the others go on
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
