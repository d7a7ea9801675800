"""A learner that steps aside while the engine generates: what leaves is gone, and results are the same bit for bit.

On a CPU host memory is the device's, and all else is as on a GPU: storages are copied, freed and made again.
"""

import pytest
import torch

from megatron_rl.instruments.plan.learner import learner_memory
from megatron_rl.model.architecture import read_architecture
from tests.parallel.gloo import run_ranks
from tests.parallel.programs.lora import LORA
from tests.support.families import save_family
from tests.support.slow import asked, slow_but
from tests.support.tiny import MODEL, tiny_recipe

ALL = {"gradients": True, "optimizer": True, "weights": True}
THROUGHOUT = ALL | {"during_passes": True}
# name → (sections, settings of learner.offload that must not change anything)
CASES = {
    "fp32": ({}, ({"gradients": True}, {"optimizer": True}, {"weights": True}, THROUGHOUT)),
    "bf16": ({"learner": {"dtype": "bf16"}}, (ALL, THROUGHOUT)),
    "fp16": ({"learner": {"dtype": "fp16"}}, (THROUGHOUT,)),
    "bf16, masters sent": ({"learner": {"dtype": "bf16"}, "precision": {"export_from": "master"}}, (ALL,)),
    "bf16, minibatches": ({"learner": {"dtype": "bf16"}, "minibatches": 2}, (ALL, THROUGHOUT)),
}
LAYOUTS = {"tp2ep2": {"tensor": 2, "expert": 2}, "ep2": {"expert": 2}}
LAYOUT_CASES = {
    f"{dtype}, {name}": ({"learner": {"dtype": dtype, "parallel": parallel}}, (THROUGHOUT,))
    for dtype, name, parallel in (("bf16", "tp2ep2", LAYOUTS["tp2ep2"]), ("fp32", "ep2", LAYOUTS["ep2"]))
}


def start(world_size: int, jobs: dict) -> list[dict]:
    return run_ranks(
        "tests.parallel.jobs",
        "run_jobs",
        world_size,
        module="tests.parallel.programs.offload",
        jobs=jobs,
    )


def jobs_of(cases: dict, folder) -> tuple[dict, dict]:
    """Jobs that train, and those that resume what they saved: with offload from without, and the other way round."""
    first, second = {}, {}
    for case, (sections, settings) in cases.items():
        for i, offload in enumerate(({}, *settings)):
            first[f"{case} {i}"] = ("train", {"offload": offload, "folder": str(folder / f"{case} {i}"), **sections})
            other = settings[-1] if i == 0 else {}
            path = str(folder / f"{case} {i}" / "step_00000002")
            if i in (0, len(settings)):
                second[f"{case} {i}"] = ("resume", {"offload": other, "path": path, **sections})
    return first, second


QUICK = ("fp32", "bf16", "lora", "bf16, tp2ep2")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, dense) -> dict[str, list[dict]]:
    """``runs[case and number of the setting][rank]``, and those resumed under "resumed …"."""
    delta = str(save_family(tmp_path_factory.mktemp("model"), "qwen3_next"))
    lora = {
        "lora": ({"model": {"path": dense}, "learner": {"dtype": "bf16", "lora": LORA}}, (THROUGHOUT,)),
        "delta nets": ({"model": {"path": delta}, "learner": {"dtype": "bf16"}}, (THROUGHOUT,)),
    }
    wanted, results = {case for (case,) in asked(request, "case")}, {}
    for world_size, every in ((1, CASES | lora), (2, LAYOUT_CASES)):
        cases = {case: about for case, about in every.items() if case in wanted}
        first, second = jobs_of(cases, tmp_path_factory.mktemp(f"checkpoints{world_size}"))
        trained, resumed = start(world_size, first), start(world_size, second)
        results |= {name: [rank[name] for rank in trained] for name in first}
        results |= {f"resumed {name}": [rank[name] for rank in resumed] for name in second}
    return results


SETTINGS = {name: settings for name, (_, settings) in (CASES | LAYOUT_CASES).items()}
SETTINGS |= {"lora": (THROUGHOUT,), "delta nets": (THROUGHOUT,)}
NAMES = [(case, number) for case, settings in SETTINGS.items() for number in range(len(settings))]
QUICK_NAMES = [(case, number) for case, number in NAMES if case in QUICK]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("case", "number"), slow_but(QUICK_NAMES, NAMES))
def test_results_are_the_same_bit_for_bit(runs, case, number):
    for off, on in zip(runs[f"{case} 0"], runs[f"{case} {number + 1}"], strict=True):
        assert on["metrics"] == off["metrics"]
        assert all(same(a, b) for a, b in zip(on["sent"], off["sent"], strict=True))
        assert all((a == b).all() for a, b in zip(on["logprobs"], off["logprobs"], strict=True))
        assert not same(off["sent"][0], off["sent"][1]), "nothing moved: no proof"


@pytest.mark.parametrize(("case", "number"), slow_but(QUICK_NAMES, NAMES))
def test_what_leaves_is_gone_while_the_engine_generates(runs, case, number):
    asked = SETTINGS[case][number]
    own = {"gradients": asked.get("gradients"), "states": asked.get("optimizer"), "weights": asked.get("weights")}
    for rank, off in zip(runs[f"{case} {number + 1}"], runs[f"{case} 0"], strict=True):
        every = [part for part in ("gradients", "states", "weights") if off["after"][part]]
        stays = [part for part in every if not own[part]]
        generating = [held for name, held in rank["calls"] if name == "rollout"]
        assert generating[1:] == [stays] * 3
        assert {tuple(held) for name, held in rank["calls"] if name == "wake"} == {
            tuple(part for part in every if part in (*stays, "weights"))
        }
        assert rank["after"] == off["after"], "back as it was"
        left = sum(off["after"][part] for part, leaves in own.items() if leaves and part != "gradients")
        assert left <= rank["host"] <= left + 512 * 2000 if left else rank["host"] == 0
        if not case.startswith("fp32"):  # masters leave at the start, and room for the moments is reserved with them
            assert rank["host at the start"] == rank["host"]


@pytest.mark.parametrize("case", slow_but(QUICK, SETTINGS))
def test_a_checkpoint_of_a_learner_that_is_aside(runs, case):
    """Written with everything away, and read by a learner that has it all; and the other way round."""
    last = len(SETTINGS[case])
    for name in (f"{case} 0", f"{case} {last}"):
        for resumed, whole in zip(runs[f"resumed {name}"], runs[f"{case} 0"], strict=True):
            assert resumed["metrics"][0] == whole["metrics"][2], name
            assert same(resumed["sent"][0], whole["sent"][2]), name
    saved = [held for call, held in runs[f"{case} {last}"][0]["calls"] if call == "saved"]
    assert saved == [[]], "a checkpoint brings nothing back"


@pytest.mark.parametrize("case", ["bf16", "bf16, tp2ep2"])
def test_the_plan_counts_what_leaves(runs, case):
    """Adam's states to the byte; Megatron's buffers begin every tensor at 64 elements and end in whole 128s."""
    learner = tiny_recipe(**CASES[case][0] if case in CASES else LAYOUT_CASES[case][0]).learner
    (planned,) = learner_memory(read_architecture(MODEL), learner, len(runs[f"{case} 0"]), tokens=64)
    tensors = len(runs[f"{case} 0"][0]["sent"][0])
    for rank in runs[f"{case} 0"]:
        assert rank["after"]["states"] == planned.states
        assert 0 <= rank["after"]["weights"] - planned.weights <= 2 * (64 * tensors + 2 * 128)
        assert 0 <= rank["after"]["gradients"] - planned.gradients <= 4 * (64 * tensors + 2 * 128)
