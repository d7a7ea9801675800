"""The learner's model against transformers' of the same folder, in fp32 on the CPU: a witness that is neither engine.

vLLM and the learner can be wrong together, or can both read a folder otherwise than its authors meant; `check` asks
transformers. `witness` starts `python -m megatron_rl.learner.compare_logits`: JSON in, JSON out.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_rl.checkpoint.hf_folder import HFFolder, experts_in_one, model_shapes
from megatron_rl.config.learner import LearnerConfig
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import Architecture, read_architecture
from megatron_rl.model.families import FAMILIES

FEWEST_TOKENS, MOST_TOKENS = 64, 256
LARGEST_WHOLE = 2**31  # parameters of a model of which all layers are compared: 8 GiB in fp32
# One model in fp32, and the weights as stored while it is filled; Python, logits. Measured for two layers of
# Qwen3-30B-A3B: 13.2 GiB, against 13.5 by these figures.
BYTES_PER_PARAMETER, SPARE_GIB = 6, 3.0
BOUND = 1e-3  # nats; models that are equal differ by some 1e-6, and by more where a router's choice is a near tie
MOST_BEYOND = 0.25  # of the tokens: a near tie changes a few of them, another function nearly all
_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Difference:
    """|log-prob of transformers − log-prob of the learner|, in nats, of the tokens of a prompt. ``beyond``: how many
    are above `BOUND`."""

    largest: float
    beyond: int
    num_tokens: int

    @property
    def is_another_function(self) -> bool:
        return not math.isfinite(self.largest) or self.beyond > MOST_BEYOND * self.num_tokens


def witness(path: Path, a: Architecture, prompt: list[int], free_gib: float) -> str:
    """Compare log-probs of ``prompt`` under transformers and under the learner's model, in a process of its own.

    The whole model is compared where it has at most `LARGEST_WHOLE` parameters, else its first and last layer (with
    embedding, last norm and head). One of the two models is in memory at a time, in fp32. A prompt shorter than
    `FEWEST_TOKENS` is filled up with random tokens, a longer one than `MOST_TOKENS` is cut.

    Returns what was compared, or why nothing was (``free_gib`` do not hold it, the process was killed). Raises
    `InputError` where transformers does not load the folder, or where the two compute different functions.
    """
    layers = [0, a.num_layers - 1] if _numel(a) > LARGEST_WHOLE and a.num_layers > 2 else list(range(a.num_layers))
    part = f"all {a.num_layers} layers" if len(layers) == a.num_layers else f"layers {layers[0]} and {layers[1]}"
    needed = BYTES_PER_PARAMETER * _numel(a.of_layers(layers)) / 2**30 + SPARE_GIB
    if needed > free_gib:
        return f"not compared with transformers: {part} need {needed:.0f} GiB of memory, {free_gib:.0f} are free"
    request = {"path": str(path), "tokens": _filled(prompt, a), "layers": layers}
    environment = {key: value for key, value in os.environ.items() if key not in _JOB}
    command = [sys.executable, "-m", "megatron_rl.learner.compare_logits"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environment)
    answer = next((line for line in reversed(done.stdout.splitlines()) if line.startswith('{"')), None)
    if done.returncode or answer is None:
        last = (done.stderr.strip().splitlines() or [""])[-1][:300]
        return f"not compared with transformers: the process ended with status {done.returncode} ({last})"
    compared = json.loads(answer)
    if "error" in compared:
        raise InputError(f"model.path: transformers does not load {path}: {compared['error'][:500]}")
    difference = Difference(**compared)
    what = (
        f"log-probs of the prompt ({difference.num_tokens} tokens, {part}, fp32) under transformers and the learner "
        f"differ by at most {difference.largest:.1e} nats"
    )
    if difference.is_another_function:
        raise InputError(
            f"model.path: {path}: {what}, {difference.beyond} of them by more than {BOUND:g}: the learner would train "
            "another model than this one. A key of config.json or a tensor says something that it does not follow"
        )
    return what


def logprob_difference(path: Path, tokens: list[int], layers: list[int]) -> Difference:
    """`Difference` of the model in ``path`` cut down to ``layers``. Both models run here, one after the other."""
    a, folder = read_architecture(path), HFFolder(path)
    theirs = _logprobs(_theirs(path, a, folder, layers), tokens)
    ours = _logprobs(_ours(a.of_layers(layers), _renamed(folder, layers)), tokens)
    difference = (ours - theirs).abs()
    return Difference(float(difference.max()), int((~(difference <= BOUND)).sum()), len(difference))


Logits = Callable[[torch.Tensor], torch.Tensor]  # tokens [1, T] → [1, T, V]


@torch.no_grad()
def _logprobs(model: Logits, tokens: list[int]) -> torch.Tensor:
    """[T − 1], fp64: of each token after those before it."""
    row = torch.tensor([tokens])
    logits = model(row)[0, :-1].double()
    return (logits.gather(1, row[0, 1:, None]) - logits.logsumexp(1, keepdim=True))[:, 0]


def _ours(a: Architecture, read: Callable[[str], torch.Tensor]) -> Logits:
    from megatron_rl.checkpoint.shards import WeightMap

    # Megatron takes seconds to import, and the process of `check` only starts another one that needs it.
    from megatron_rl.learner.model import build_model
    from megatron_rl.learner.process_groups import initialize

    config = LearnerConfig(dtype="fp32")
    model = build_model(a, config, initialize(config.parallel, "cpu", seed=0)).eval()
    WeightMap(model, a).fill(read)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens, torch.arange(tokens.shape[1])[None], attention_mask=None)[..., : a.vocab_size]

    return logits


def _theirs(path: Path, a: Architecture, folder: HFFolder, layers: list[int]) -> Logits:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig  # seconds to import: only where asked for

    FAMILIES[a.model_type].register()
    whole = AutoConfig.from_pretrained(path, trust_remote_code=False)
    config = whole.get_text_config()
    source, weights = path, None
    if len(layers) < a.num_layers or config is not whole:
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[i] for i in layers]
        if a.is_moe:
            config.decoder_sparse_step = 1
            config.mlp_only_layers = [place for place, i in enumerate(layers) if not a.moe_layers[i]]
            config.first_k_dense_replace = sum(not a.moe_layers[i] for i in layers)
        read = _renamed(folder, layers)
        names = model_shapes(a.of_layers(layers))
        source, weights = None, dict(experts_in_one((name, read(name)) for name in names))
    model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        source,
        config=config,
        state_dict=weights,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    if lost := sorted(info["missing_keys"]):
        raise ValueError(f"it finds no values for {', '.join(lost[:5])}")
    model.eval()
    return lambda tokens: model(tokens, return_dict=True).logits


def _renamed(folder: HFFolder, layers: list[int]) -> Callable[[str], torch.Tensor]:
    """The tensors of ``folder`` under the names that they have in a model of ``layers`` alone."""
    return lambda name: folder(re.sub(r"(?<=^model\.layers\.)\d+", lambda number: str(layers[int(number[0])]), name))


def _numel(a: Architecture) -> int:
    return sum(math.prod(shape) for shape in model_shapes(a).values())


def _filled(prompt: list[int], a: Architecture) -> list[int]:
    random = torch.Generator().manual_seed(0)
    more = torch.randint(a.vocab_size, (max(FEWEST_TOKENS - len(prompt), 0),), generator=random).tolist()
    return [*prompt, *more][: min(MOST_TOKENS, a.max_position_embeddings)]


def _answer() -> None:
    """Read a request from standard input, write a `Difference` or an error to standard output."""
    request = json.loads(sys.stdin.read())
    try:
        compared = asdict(logprob_difference(Path(request["path"]), request["tokens"], request["layers"]))
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError, OSError, ImportError) as error:
        compared = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    print("\n" + json.dumps(compared))


if __name__ == "__main__":
    _answer()
