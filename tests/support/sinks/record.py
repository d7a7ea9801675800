"""Record steps with the real `Monitor` and the real client of Weights & Biases. Arguments: FOLDER FIRST LAST."""

import sys
from pathlib import Path

from megatron_rl.config.monitor import MonitorConfig
from megatron_rl.monitor import Monitor, RunDirectory


def numbers(step: int) -> dict[str, float]:
    """Numbers that do not survive a rounding to single precision, and those that are none."""
    odd = {2: float("nan"), 4: float("inf")}.get(step, 1 / 7)
    return {"mismatch/kl": 0.1 + 0.2 * step, "val/aime/avg@32": 1 / (3 + step), "loss": odd}


def main() -> None:
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    keys = {"mode": "offline", "project": "p", "group": "g", "entity": "e"}
    config = MonitorConfig(terminal="off", plots=False, tensorboard=False, sinks={"wandb": keys})
    directory = RunDirectory(folder / "run").create()
    directory.recipe.write_text("name: unit\nlearner: {optimizer: {lr: 1.0e-06}}\n")
    with Monitor(directory, config, {}, True) as monitor:
        monitor.resume_at(first)
        for step in range(first, last):
            monitor.record(step, numbers(step))


if __name__ == "__main__":
    main()
