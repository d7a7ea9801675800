"""The learner on the tiny model: fp32 products, attention, marks of expert weights, gradient norm, checkpoints.

A product of matrices has an exact value that TF32 cannot give; every library that multiplies is asked for it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.doctor.checks import Outcome, Setting, failed, not_run, passed, planned, tiny

if TYPE_CHECKING:
    from megatron_rl.learner.learner import Learner
    from megatron_rl.types import Batch


# Where no recipe is named, the packed attention of this one is asked for.
PAPER_RECIPE = "recipes/router_replay/grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml"
# Relative: another order of additions over a million weights; four units of bf16's last place.
NORM_TOLERANCE = {"fp32": 1e-5, "bf16": 2.0**-6}
UNMARKED = (
    "Gradient norm and clipping would leave out experts. Versions of TransformerEngine and Megatron-Core other than "
    "the pinned ones do this: see the check `packages`, and `learner.model.mark_expert_parameters`."
)
SHARED_SEQUENCES = (
    "Attention over shared sequences is wrong here: use learner.parallel.context: 1, and see the checks `packages` and "
    "`attention`."
)
_SEQUENCES, _TOKENS = 16, (3, 98)  # of a batch; the tiny model's tokens that are no special ones


_INDEX = ".metadata"  # of a checkpoint


# -- attention


def attention(setting: Setting) -> Outcome:
    """Which attention TransformerEngine takes for packed rows on this GPU; one that stores every score is refused."""
    from megatron_rl.errors import InputError
    from megatron_rl.layers import attention

    config, heads = attention_config(setting)
    if config is None:
        return not_run("TransformerEngine is not installed; the learner takes torch's attention, sequence by sequence")
    try:
        attention.refuse_unfused_attention(config)
    except InputError as error:
        return failed(str(error), f"pip install --no-build-isolation '{attention.FLASH_ATTN}'", heads=heads)
    chosen = attention.packed_attention(config)
    return passed(f"TransformerEngine takes its {chosen} attention for packed rows ({heads})")


def attention_config(setting: Setting) -> tuple[Any, str]:
    """Megatron's configuration of what will run here, and a word on its heads; None without TransformerEngine."""
    from megatron_rl.config import load_recipe
    from megatron_rl.learner.model import transformer_config, use_transformer_engine
    from megatron_rl.learner.process_groups import resolve_device
    from megatron_rl.model.architecture import shape_of

    device = resolve_device(setting.device)
    if not use_transformer_engine(device):
        return None, ""
    recipe = planned(setting) or load_recipe(PAPER_RECIPE)
    architecture, _ = shape_of(recipe.model.path)
    config = transformer_config(architecture, recipe.learner, device, recipe.precision)
    return config, f"{recipe.learner.dtype}, heads of {architecture.head_dim}"


# -- ranks and batches


def layout(ranks: int) -> dict[str, int]:
    """Tensor and expert parallelism as far as the ranks and the tiny model (2 heads, 8 experts) divide."""
    return {"tensor": math.gcd(ranks, 2), "expert": math.gcd(ranks, 8)}


def overrides(parallel: dict[str, int], dtype: str) -> list[str]:
    sizes = [f"learner.parallel.{name}={size}" for name, size in parallel.items()]
    return [*sizes, f"learner.dtype={dtype}", "learner.optimizer.lr=1e-3", "monitor.gradient_noise=false"]


def named(parallel: dict[str, int], ranks: int) -> str:
    sizes = "·".join(f"{name[0].upper()}P{size}" for name, size in parallel.items())
    return f"{sizes}·DP{ranks // (parallel.get('tensor', 1) * parallel.get('context', 1))}"


def made_up_batch(seed: int) -> Batch:
    """Random sequences of mixed length, the same on every rank."""
    import numpy as np

    from megatron_rl.types import Batch, Rollout

    random, sequences = np.random.default_rng(seed), []
    for i in range(_SEQUENCES):
        prompt, response = int(random.integers(3, 9)), int(random.integers(4, 25))
        sequences.append(
            Rollout(
                id=f"doctor:{i}/0",
                prompt=random.integers(*_TOKENS, prompt),
                tokens=random.integers(*_TOKENS, response),
                inference_logprobs=random.normal(-3.0, 1.0, response).clip(max=-0.01).astype(np.float32),
                advantage=float(random.normal()),
                reward=float(i % 2),
                policy_versions=np.zeros(response, dtype=np.int32),
            )
        )
    return Batch(step=seed, sequences=sequences, minibatches=[list(range(_SEQUENCES))])


_store: object = None  # of the first rank, where all meet again


def rejoin() -> None:
    """Leave the job and its groups, and agree on a store where the ranks meet again for another layout."""
    from megatron_rl.learner.process_groups import shutdown
    from megatron_rl.process.ranks import broadcast_object, store_for_ranks

    global _store
    address = None
    if os.environ["RANK"] == "0":
        _store, address = store_for_ranks(os.environ["MASTER_ADDR"])
    address = broadcast_object(address)
    shutdown()
    os.environ |= address


# -- experts


def experts(setting: Setting) -> Outcome:
    """Every expert weight is marked as this rank's own, and the gradient norm is that of data parallelism alone."""
    from megatron_rl.process.ranks import gather_objects

    split = layout(setting.ranks)
    unmarked: set[str] = set()

    def look(learner: Learner) -> None:
        unmarked.update(*gather_objects(set(without_mark(learner.module.named_parameters()))))

    norms = gradient_norms(
        setting, [split] if setting.ranks == 1 else [{"tensor": 1, "expert": 1}, split], "fp32", look
    )
    if unmarked:
        return failed(
            f"{len(unmarked)} expert weights are not marked, first {min(unmarked)}", UNMARKED, grad_norm=norms
        )
    return judge_norms(norms, "fp32", UNMARKED)


def gradient_norms(
    setting: Setting, layouts: list[dict[str, int]], dtype: str, look: Callable[[Learner], None] = lambda learner: None
) -> dict[str, float]:
    """Layout in words → gradient norm of one update on all ranks. ``look`` is called with each learner. Collective."""
    from megatron_rl.learner.learner import Learner

    norms: dict[str, float] = {}
    for parallel in layouts:
        if norms:
            rejoin()
        learner = Learner(tiny(setting, *overrides(parallel, dtype)))
        look(learner)
        norms[named(parallel, setting.ranks)] = float(learner.update(made_up_batch(0))["actor/grad_norm"])
        learner.close()
    return norms


def without_mark(parameters: Iterable[tuple[str, Any]]) -> list[str]:
    """Expert weights that the gradient norm, or the choice of their optimizer, would take for others' copies."""
    return [
        name
        for name, parameter in parameters
        if ".experts." in name
        and (not getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "allreduce", True))
    ]


def judge_norms(norms: dict[str, float], dtype: str, fix: str) -> Outcome:
    """Each layout's gradient norm is that of the first, to the rounding of ``dtype``."""
    (first, expected), *others = norms.items()
    for name, norm in others:
        if not abs(norm - expected) <= NORM_TOLERANCE[dtype] * expected:
            wrong = f"gradient norm {norm:.6f} under {name}, {expected:.6f} under {first} ({dtype})"
            return failed(wrong, fix, grad_norm=norms)
    alone = "" if others else "; one rank has no other layout"
    return passed(f"the gradient norm is {expected:.6f} under {' and '.join(norms)} ({dtype}){alone}", grad_norm=norms)


# -- context parallelism


def context(setting: Setting) -> Outcome:
    """Two ranks that share each sequence, in attention and in the exchange of keys and values, find the gradient of
    ranks that have whole sequences."""
    from megatron_rl.learner.model import use_transformer_engine
    from megatron_rl.learner.process_groups import resolve_device

    if setting.ranks % 2:
        return not_run(f"context parallelism needs an even number of ranks; here is {setting.ranks}")
    # TransformerEngine has the exchange of keys and values for 16-bit learners only.
    dtype = "bf16" if use_transformer_engine(resolve_device(setting.device)) else "fp32"
    return judge_norms(gradient_norms(setting, [{"context": 1}, {"context": 2}], dtype), dtype, SHARED_SEQUENCES)


# -- checkpoints


def checkpoint(setting: Setting) -> Outcome:
    """Train, save, load, train; a run without interruption is the reference."""
    from megatron_rl.checkpoint.manifest import read_manifest
    from megatron_rl.learner.learner import Learner
    from megatron_rl.process.ranks import broadcast_object

    recipe = tiny(setting, *overrides(layout(setting.ranks), "bf16"))
    folder = Path(broadcast_object(setting.scratch))
    for name in ("first", "again"):
        (folder / name).mkdir(exist_ok=True)

    saving = Learner(recipe)
    saving.update(made_up_batch(0))
    saved = saving.save(folder / "first", {"words": "of the loop"})
    uninterrupted = _train(Learner(recipe), (0, 1))
    loaded = Learner(recipe)
    state = loaded.load(saved)
    again = loaded.save(folder / "again", state)
    digests = {
        "uninterrupted": uninterrupted,
        "saved on the way": _train(saving, (1,)),
        "loaded": _train(loaded, (1,)),
    }
    files = {name: about["sha256"] for name, about in read_manifest(saved).items()}
    # torch's index names each write by a number of its own; what it says of the tensors is read by `load`.
    saved_again = {name: about["sha256"] for name, about in read_manifest(again).items() if name != _INDEX}
    changed = [name for name in saved_again if files.get(name) != saved_again[name]]
    return judge_checkpoint(state == {"words": "of the loop"}, changed, len(files), digests, setting.device)


def _train(learner: Learner, seeds: tuple[int, ...]) -> str:
    """Digest of the weights after an update with each batch. Collective."""
    for seed in seeds:
        learner.update(made_up_batch(seed))
    digest = hashlib.sha256()
    for name, tensor in learner.export_weights():
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def judge_checkpoint(
    state_is_back: bool, changed: list[str], num_files: int, digests: dict[str, str], device: str
) -> Outcome:
    """Judge a checkpoint. ``changed``: its files that differ when it is loaded and saved again."""
    plain, saving, loaded = digests.values()
    figures: dict[str, Any] = {"weights after two updates": digests, "files": num_files}
    fix = "Run it again; if it fails again, report it with this report: a resumed run would be another one."
    if not state_is_back:
        return failed("the loop's state did not come back from the checkpoint", fix, **figures)
    if changed:
        difference = f"loaded and saved again, {len(changed)} of {num_files} files differ, first {changed[0]}"
        return failed(difference, fix, **figures)
    if loaded == plain == saving:
        return passed("a run that is saved and loaded gives the weights of one that is not, bit for bit", **figures)
    if device == "cuda" and plain != saving:
        # Two runs without a load differ already, so the third cannot be held to either.
        return passed(
            f"{num_files} files are the same when loaded and saved again. Two runs without an interruption differ in "
            "their last bits, as kernels on this GPU add in no fixed order, so the next update is not compared",
            **figures,
        )
    what = "saving" if plain != saving else "loading"
    return failed(f"{what} a checkpoint changes the weights after the next update", fix, **figures)


def products(setting: Setting) -> Outcome:
    """Every library that multiplies fp32 matrices for a run does so in full."""
    from megatron_rl.learner.model import use_transformer_engine
    from megatron_rl.learner.process_groups import resolve_device
    from megatron_rl.process.fp32_products import measured_products

    device = resolve_device(setting.device)
    te = use_transformer_engine(device)
    return judge_products(measured_products(device, transformer_engine=te, triton=device.type == "cuda"))


def judge_products(kinds: dict[str, str]) -> Outcome:
    """Judge how each library multiplies fp32 matrices. ``kinds``: library → type of the products."""
    wrong = {name: value for name, value in kinds.items() if value != "fp32"}
    if not wrong:
        return passed(f"{', '.join(kinds)}: products of fp32 matrices have the exact value, which TF32 has not")
    wrong_products = ", ".join(f"{name} ({value})" for name, value in wrong.items())
    return failed(
        f"products of fp32 matrices are not those of fp32: {wrong_products}. What a recipe calls fp32 would be TF32",
        "megatron-rl sets NVIDIA_TF32_OVERRIDE=0 for cuBLAS and TransformerEngine, and TRITON_F32_DEFAULT=ieee for "
        "Triton, before either reads it. Look for what changes them later (a sitecustomize.py, a wrapper of python), "
        "and at `packages`: another version may read other variables. Meanwhile say tf32 in recipes, not fp32.",
        products=kinds,
    )
