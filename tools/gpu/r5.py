"""R5, one vLLM engine over two ranks: it records the learner's routes, gives memory back, and takes new weights."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any

from tools.gpu.run import Problem, Run

PLANTS = ("shifted_routes", "stale_engine")
AGREE = {"fp32": 0.999, "bf16": 0.9}  # least share of rows that learner and engine send through the same experts
NEARER = 10.0  # log-probs: to the learner's new weights than to its old ones
RATE = 1e-2  # large, so that one update moves log-probs by more than bf16 rounds
GIB = 1 << 30


def main(run: Run) -> None:
    for dtype in ("fp32",) if run.rehearse else ("fp32", "bf16"):
        found: dict[str, Any] = {}
        run.part(f"routes, {dtype}", partial(routes, run, dtype, found))
        run.part(f"new weights, {dtype}", partial(new_weights, run, dtype, found))
        if not run.rehearse:  # on a CPU no engine sleeps
            run.part(f"sleep, {dtype}", partial(asleep, run, dtype, found))


def seen(run: Run, dtype: str, found: dict[str, Any]) -> dict[str, Any]:
    if not found:
        values = {"device": run.device, "folder": str(run.folder), "dtype": dtype}
        found |= run.ranks(2, {"serve": ("tools.gpu.r5.serve", values)}, 180).whole()[0]["serve"]
    return found


def routes(run: Run, dtype: str, found: dict[str, Any]) -> dict[str, Any]:
    agree = seen(run, dtype, found)["agree"]
    if not min(agree) >= AGREE[dtype]:
        raise Problem(f"recorded routes are the learner's in {agree} of rows, before and after an update")
    return {"router/agree_frac": agree, "start_s": found["start_s"]}


def new_weights(run: Run, dtype: str, found: dict[str, Any]) -> dict[str, Any]:
    new, old = seen(run, dtype, found)["|mu - new|"], found["|mu - old|"]
    if not new * NEARER <= old:
        raise Problem(f"after an update mu is {new:.2e} from the learner's new weights, {old:.2e} from its old ones")
    return {name: found[name] for name in ("|mu - new|", "|mu - old|", "refit_s")}


def asleep(run: Run, dtype: str, found: dict[str, Any]) -> dict[str, Any]:
    awake, sleeping = seen(run, dtype, found)["awake_gib"], found["asleep_gib"]
    if not awake - sleeping >= 0.4:  # two ranks' caches of a quarter of a GiB each
        raise Problem(f"awake {awake:.2f} GiB of the GPU are in use, asleep {sleeping:.2f}")
    return {"awake, GiB": awake, "asleep, GiB": sleeping}


def serve(device: str, folder: str, dtype: str) -> dict[str, Any]:
    """What a rank does: sample, sleep, update, hand over, sample again, update again."""
    import torch

    from megatron_rl.doctor.checks import Setting, tiny
    from megatron_rl.doctor.engine import SMALL, distances, start_engine
    from megatron_rl.doctor.learner import layout, overrides
    from megatron_rl.learner.learner import Learner
    from megatron_rl.process.devices import barrier_devices
    from megatron_rl.run.engines import hand_over

    def used() -> float:
        """GiB of the GPU, of all processes."""
        torch.distributed.barrier(device_ids=barrier_devices(torch.device(device)))
        free, total = torch.cuda.mem_get_info() if device == "cuda" else (0, 0)
        return (total - free) / GIB

    values = [*overrides(layout(2), dtype), *SMALL, f"rollout.dtype={dtype}", f"learner.optimizer.lr={RATE}"]
    values += ["rollout.tensor_parallel=2", "rollout.all_reduce=nccl", "rollout.enforce_eager=true"]
    recipe = tiny(Setting(device, 2, folder, scratch=folder), *values, "routing.replay=r3")
    learner, start = Learner(recipe), time.monotonic()
    with closing(start_engine(recipe, learner)) as generator:
        found: dict[str, Any] = {"start_s": time.monotonic() - start, "awake_gib": used()}
        batch = sample(recipe, learner, generator)
        generator.sleep()
        found["asleep_gib"] = used()
        agree = [float(learner.update(batch)["router/agree_frac"])]
        hand_over(learner, generator)
        batch = sample(recipe, learner, generator)
        apart = distances(batch, learner, Learner(recipe))
        found |= {"|mu - new|": apart.mu_po, "|mu - old|": apart.mu_fp32}
        found["refit_s"] = generator.stats()["perf/refit_engine_s"]
        agree.append(float(learner.update(batch)["router/agree_frac"]))
    return found | {"agree": agree}


def sample(recipe: Any, learner: Any, generator: Any) -> Any:
    """A batch in which every other response has a reward, so that an update moves the weights."""
    from megatron_rl.batch import build_batch
    from megatron_rl.data import load_tokenizer, load_train
    from megatron_rl.rollout.requests import everywhere

    prompts = list(load_train(recipe.data, load_tokenizer(str(recipe.model.path))))[:8]
    groups = everywhere(generator.rollout(prompts, 4, policy_version=learner.num_updates, step=0))
    for i, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.reward = float(i % 2)
    return build_batch(0, groups, recipe.batch, recipe.objective)
