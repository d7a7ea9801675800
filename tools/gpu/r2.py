"""R2, what is lost: a killed and a hung rank end the job in time and with a message; weights go to servers by NCCL."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.process.host import write_whole
from tools.gpu.run import Problem, Run

PLANTS = ("patience", "dropped_broadcast", "rounded_weights")
TIMEOUT_S, TIMEOUT_REHEARSED_S = 12.0, 8.0  # learner.parallel.timeout_minutes
MARGIN_S, MARGIN_REHEARSED_S = 60.0, 20.0  # from then on, for the end of ranks
# Of the run, or of the transport: closed, reset or late is the system's choice.
MESSAGE = re.compile(r"(run failed: .*|.*Watchdog caught.*|.*gloo/transport/.*|.*\bDist\w+Error: .*|.*[Tt]imed out.*)")
LOST = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}
STALL_S = 15.0
UPDATES, SERVERS = 3, 2


def main(run: Run) -> None:
    run.part("weights", partial(weights, run))
    run.part("weights, a server is killed", partial(weights, run, killed=True))
    for how in LOST:
        run.part(f"a rank is {how}", partial(lost, run, how))


def lost(run: Run, how: str) -> dict[str, Any]:
    """The second rank is lost in the second step: how, when and with which message did the first one end?"""
    from tools.dev.exact_runs import arguments

    timeout, margin = (TIMEOUT_REHEARSED_S, MARGIN_REHEARSED_S) if run.rehearse else (TIMEOUT_S, MARGIN_S)
    values = arguments(run.folder / how, run.tiny_model(), "ep2", "bf16", steps=20, sequences=8)
    values += ["--set", f"runtime.device={run.device}"]
    values += ["--set", f"learner.parallel.timeout_minutes={timeout / 60}"]
    job = ("tools.gpu.r2.train_until", {"how": how, "arguments": values, "folder": str(run.folder)})
    limit, mark = timeout + margin, run.folder / f"{how}.lost"
    # The killed rank is the first to end, and the other has its time from then on; a hung one never ends.
    ended = run.ranks(2, {"train": job}, limit, grace_s=limit if how == "killed" else 1.0, mark=mark)
    if not mark.exists():
        raise Problem(f"no rank was {how}:\n{ended.logs[0]}")
    took = ended.seconds[0] - (float(mark.read_text()) - ended.began)
    if ended.codes[0] is None or took > limit:
        raise Problem(f"rank 0 was still running {took:.0f} s after rank 1 was {how}:\n{ended.logs[0]}")
    said = MESSAGE.findall(ended.logs[0])
    if ended.codes[0] == 0 or not said:
        raise Problem(f"rank 0 left with status {ended.codes[0]} and no message:\n{ended.logs[0]}")
    return {"status": ended.codes[0], "after_s": round(took, 1), "message": said[-1].strip()}


def train_until(how: str, arguments: list[str], folder: str) -> list[int]:
    """A run of `megatron_rl train`, in which the second rank is lost before its second update."""
    from tests.e2e.programs.exact_runs import train
    from tests.reliability import programs

    def lose(**_: Any) -> None:
        Path(folder, f"{how}.lost").write_text(str(time.monotonic()))
        os.kill(os.getpid(), LOST[how])

    if os.environ["RANK"] == "1":
        programs.FAULTS["lose"] = lose
        programs.arm("phase:forward_backward", "lose", call=2)
    return train([arguments])


def weights(run: Run, killed: bool = False) -> dict[str, Any]:
    """A trainer and two servers: what arrives has the bits that were sent. ``killed``: one server dies in the second
    update, and the trainer hears of it in time."""
    mib = 8 if run.rehearse else 512
    call = {"folder": str(run.folder / f"group-{killed}"), "device": run.device, "mib": mib, "killed": killed}
    ended = run.ranks(1 + SERVERS, {"send": ("tools.gpu.r2.send_weights", call)}, 180, grace_s=3 * STALL_S)
    if killed:
        error = ended.results[0].get("send", {}).get("error")
        if not error or error["after_s"] > 2 * STALL_S:
            raise Problem(f"the trainer did not hear of it in {2 * STALL_S:g} s: {error}:\n{ended.logs[0]}")
        return error
    sender, *takers = (results["send"] for results in ended.whole())
    if any(taker["wrong"] for taker in takers):
        raise Problem(f"other bits arrived in {[taker['wrong'] for taker in takers]} tensors")
    return {"tensors": takers[0]["tensors"], "GB/s": [mib * 2**20 / 1e9 / seconds for seconds in sender["seconds"]]}


def send_weights(folder: str, device: str, mib: int, killed: bool) -> dict[str, Any]:
    """What a rank does: the first one is the trainer."""
    import torch

    from megatron_rl.rollout.servers.weight_broadcast import GroupError, GroupPlace, Receiver, Sender, WeightGroup

    rank, place = int(os.environ["RANK"]), Path(folder, "place.json")
    if rank:
        while not place.exists():
            time.sleep(0.05)
        group = WeightGroup.join(replace(GroupPlace(**json.loads(place.read_text())), rank=rank), rank)
        wrong = count = 0
        for update in range(UPDATES):
            if killed and update and rank == SERVERS:
                os.kill(os.getpid(), signal.SIGKILL)
            receiver, expected = Receiver(group), dict(tensors(device, mib, update))
            for name, tensor in receiver:
                wrong, count = wrong + (not torch.equal(tensor, expected.pop(name))), count + 1
            wrong += len(expected)
            receiver.check()
            group.store.add(f"taken {update}", 1)
        group.close()
        return {"wrong": wrong, "tensors": count}
    backend = "nccl" if device == "cuda" else "gloo"
    group = WeightGroup.open("127.0.0.1", "campaign", 1 + SERVERS, backend, STALL_S)
    place.parent.mkdir()
    write_whole(place, json.dumps(asdict(group.place)))
    group.form()
    sender, seconds, start = Sender(group), [], time.monotonic()
    try:
        for update in range(UPDATES):
            given, start = tensors(device, mib, update), time.monotonic()
            sender.send(given)
            while group.store.add(f"taken {update}", 0) < SERVERS:  # the next update forgets what is said of this one
                if time.monotonic() - start > STALL_S:
                    raise GroupError(f"servers did not take update {update} in {STALL_S:g} s")
                time.sleep(0.001)
            seconds.append(time.monotonic() - start)
    except GroupError as error:
        if not killed:
            raise
        return {"error": {"message": str(error), "after_s": round(time.monotonic() - start, 1)}}
    finally:
        group.close()
    return {"seconds": seconds}


def tensors(device: str, mib: int, seed: int) -> list[tuple[str, Any]]:
    """``mib`` MiB of random numbers in tensors of several sizes and both widths."""
    import torch

    torch.manual_seed(seed)
    sizes = [mib << 17, *[mib << 10] * 128]  # half in one tensor, of 4 bytes an element
    return [(f"tensor {i}", torch.randn(size, device=device)) for i, size in enumerate(sizes)]
