"""Checkpoints in Hugging Face layout: which files count, what they hold, which tokens end a response, and writing one.

Learner, rollout engine and converter read a folder through `HFFolder`, so that all of them see the same tensors. They
compare it with the model that config.json describes through `check_weights`. A checkpoint is written from a stream of
tensors, one file's worth in memory at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from megatron_rl.errors import InputError
from megatron_rl.model.architecture import Architecture, read_architecture, read_object, text_part
from megatron_rl.model.families import FAMILIES
from megatron_rl.model.families.form import Family
from megatron_rl.model.names import stored_tensors
from megatron_rl.process.ranks import together, world_rank

if TYPE_CHECKING:
    import torch  # `check --offline` reads headers without it

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
WEIGHT_DTYPES = ("F32", "F16", "BF16")  # safetensors' names
SHOWN = 5  # names in a message that could list thousands
_TIED_HEAD = "lm_head.weight"
_COMPARED_ROWS = 4096  # of the embedding, in memory at a time
# Buffers that early releases of transformers stored; every reader computes them anew.
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OF_ALL_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.([a-z]\w*)")
_OF_AN_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.([a-z]\w*)")
_DOWN_OF_ONE = ("mlp.experts.{e}.down_proj.weight",)
_EXPERT_PARTS = {  # of a tensor of all experts, whose gate has the first rows: name of a part → which half of the rows
    "gate_up_proj": {"gate_proj.weight": 0, "up_proj.weight": 1},
    "down_proj": {"down_proj.weight": None},
}
_STORED_BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
# Files that vLLM or transformers obey beside config.json and the weights, and the learner does not.
_OBEYED_FILES = {
    "consolidated*.safetensors": "vLLM would load it instead of the other weights; move it away",
    "hf_quant_config.json": "vLLM takes the weights for quantized ones; use the unquantized checkpoint",
    "adapter_config.json": "transformers would add this adapter to the weights; merge it into them",
}


class HFFolder:
    """Tensors by name from the safetensors files of ``path``, opened once, read on demand.

    A tensor that holds a matrix of all experts of a layer (``…mlp.experts.NAME``) is shown as one for each expert
    (``…mlp.experts.3.NAME``); `write_hf_checkpoint` puts them together again. A family that reads experts one by one
    (``…mlp.experts.3.gate_proj.weight``) gets their rows. Tensors of a wrapper's text model have that model's names.

    With an index only the files that it names count, and of these every tensor: vLLM and transformers load them whole.
    Without one, ``model.safetensors`` must be the only safetensors file. Raises `InputError` where a file is missing,
    damaged or ambiguous.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        index = self.path / INDEX_FILE
        stored = self._read_index(index) if index.is_file() else self._read_single()
        self._place_of: dict[
            str, tuple[Any, ...]
        ] = {}  # name → that in the file, an expert's number, which of its halves
        self._file_of: dict[str, str] = {}
        family = _family_in(self.path)
        one_by_one = family is not None and any(weight.hf == _DOWN_OF_ONE for weight in family.layer)
        for name, file in stored.items():
            shown = name
            if family is not None and family.wrapper is not None and name.startswith(family.wrapper.prefix):
                shown = "model." + name.removeprefix(family.wrapper.prefix)
            match = _OF_ALL_EXPERTS.fullmatch(shown)
            experts = self._handles[file].get_slice(name).get_shape()[:1] if match else []
            places: dict[str, tuple[Any, ...]] = {} if shown == name else {shown: (name,)}
            if experts:
                parts = _EXPERT_PARTS.get(match[2]) if one_by_one else None
                places = {
                    f"{match[1]}.{e}.{part}": (name, e) if half is None else (name, e, half)
                    for e in range(*experts)
                    for part, half in (parts or {match[2]: None}).items()
                }
            self._place_of |= places
            self._file_of |= dict.fromkeys(places or [name], file)

    def _read_index(self, index: Path) -> dict[str, str]:
        weight_map = read_object(index).get("weight_map")
        is_map = isinstance(weight_map, dict) and weight_map
        if not is_map or not all(isinstance(n, str) and Path(n).name == n for n in weight_map.values()):
            raise InputError(
                f"model.path: {index} is not an index of safetensors files; expected an object weight_map, from names "
                "of tensors to names of files in this folder"
            )
        self._handles = {name: _open(self.path / name) for name in sorted(set(weight_map.values()))}
        held = {name: set(handle.keys()) for name, handle in self._handles.items()}
        lost = [tensor for tensor, name in weight_map.items() if tensor not in held[name]]
        if lost:
            raise InputError(f"model.path: {index} names {weight_map[lost[0]]} for {lost[0]}, which is not in it")
        if twice := [name for name, n in Counter(name for names in held.values() for name in names).items() if n > 1]:
            files = " and ".join(file for file, names in held.items() if twice[0] in names)
            raise InputError(
                f"model.path: {self.path}: {files} both hold {twice[0]}; vLLM loads the later file's, the index names "
                f"{weight_map.get(twice[0], 'neither')}. Write the checkpoint anew"
            )
        return {tensor: file for file, names in held.items() for tensor in sorted(names)}

    def _read_single(self) -> dict[str, str]:
        names = sorted(file.name for file in self.path.glob("*.safetensors"))
        if SINGLE_FILE not in names:
            raise InputError(f"model.path: {self.path} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        if others := [name for name in names if name != SINGLE_FILE]:
            raise InputError(
                f"model.path: {self.path} holds {SINGLE_FILE} and also {', '.join(others)}, and no {INDEX_FILE} says "
                "which of them count; move the others away"
            )
        self._handles = {SINGLE_FILE: _open(self.path / SINGLE_FILE)}
        return dict.fromkeys(self._handles[SINGLE_FILE].keys(), SINGLE_FILE)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    @property
    def files(self) -> list[Path]:
        """The safetensors files that count."""
        return [self.path / name for name in self._handles]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor ``name``, read now. Raises `InputError` where there is none."""
        handle = self._handle(name)
        stored, *place = self._place_of.get(name, (name,))
        if not place:
            return handle.get_tensor(stored)
        if len(place) == 1:
            return handle.get_slice(stored)[place[0]]
        rows = self.shape(name)[0]
        return handle.get_slice(stored)[place[0], place[1] * rows : (place[1] + 1) * rows]

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header of its file; the tensor is not read."""
        shape, (_, *place) = tuple(self._slice(name).get_shape()), self._place_of.get(name, (name,))
        shape = shape[1:] if place else shape
        return (shape[0] // 2, *shape[1:]) if len(place) == 2 else shape

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor; none is read."""
        return {name: self.shape(name) for name in self._file_of}

    def dtype(self, name: str) -> torch.dtype:
        return self._slice(name)[:0].dtype

    def stored_dtype(self, name: str) -> str:
        """safetensors' name of the dtype, from the header: F32, BF16, F8_E4M3, I8 …"""
        return self._slice(name).get_dtype()

    def same(self, first: str, second: str) -> bool:
        """Whether two matrices hold the same bytes; `_COMPARED_ROWS` of each are in memory."""
        import torch

        if (self.shape(first), self.stored_dtype(first)) != (self.shape(second), self.stored_dtype(second)):
            return False
        left, right = self._slice(first), self._slice(second)
        starts = range(0, self.shape(first)[0], _COMPARED_ROWS)
        return all(torch.equal(left[i : i + _COMPARED_ROWS], right[i : i + _COMPARED_ROWS]) for i in starts)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, one at a time, file by file."""
        for name in sorted(self._file_of, key=lambda name: self._file_of[name]):
            yield name, self(name)

    def _slice(self, name: str) -> Any:
        """safetensors' view of the tensor ``name``, or of the one that holds it."""
        return self._handle(name).get_slice(self._place_of.get(name, (name,))[0])

    def _handle(self, name: str) -> safe_open:
        if name not in self._file_of:
            raise InputError(f"model.path: the checkpoint in {self.path} has no tensor {name}; is it complete?")
        return self._handles[self._file_of[name]]


def _family_in(path: Path) -> Family | None:
    """The family of the model in ``path``; None where its config.json does not say."""
    file = path / "config.json"
    return FAMILIES.get(str(text_part(read_object(file)).get("model_type"))) if file.is_file() else None


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt" if find_spec("torch") else "numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(f"model.path: {file} cannot be read ({error}); {_advice(file)}") from error


def _advice(file: Path) -> str:
    if file.is_file():
        with file.open("rb") as stream:
            if stream.read(40).startswith(b"version https://git-lfs"):
                return "it is a pointer of Git LFS; `git lfs pull` gets the file itself"
    return "is the download complete?"


# -- the tensors of a model


def model_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every tensor that the learner has, and sends to a rollout engine."""
    entries = stored_tensors(a)
    return {name: shape for e in entries for name, shape in zip(e.hf_names, e.hf_shapes, strict=True)}


def model_weights(folder: HFFolder, a: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `model_shapes`, one at a time, file by file: ``folder`` without what `check_weights` lets pass."""
    wanted = model_shapes(a)
    return ((name, folder(name)) for name in sorted(wanted, key=lambda name: folder._file_of[name]))


def check_weights(folder: HFFolder, a: Architecture) -> list[str]:
    """Compare ``folder`` with the learner's table of tensors: names, shapes and dtypes, from the files' headers.

    Returns what to say of tensors that change nothing: stored buffers of the rotary embedding, and a tied head that is
    stored beside the embedding, whose bytes are compared. Raises `InputError` for any other difference, and for files
    beside the weights that make vLLM or transformers load something else.
    """
    problems, notes, family = [], [], FAMILIES[a.model_type]
    embedding = family.embedding.hf[0]
    for pattern, reason in _OBEYED_FILES.items():
        problems += [f"holds {file.name}: {reason}" for file in sorted(folder.path.glob(pattern))]
    expected, others, unused = model_shapes(a), [], []
    ignored: dict[str, list[str]] = {}
    for name in folder.names:
        if name in expected:
            continue
        if name == _TIED_HEAD and a.tie_embeddings and embedding in folder:
            if folder.same(name, embedding):
                notes.append(f"{name} is stored beside the embedding that it is tied to, with the same values")
            else:
                problems.append(f"config.json ties {name} to the embedding, but the two differ")
        elif beginning := next((b for b in family.ignored if name.startswith(b)), None):
            ignored.setdefault(beginning, []).append(name)
        elif _is_of_unused_layer(name, a):
            unused.append(name)
        elif not _STORED_BUFFERS.fullmatch(name):
            others.append(name)
    if missing := [name for name in expected if name not in folder]:
        hint = " (config.json says tie_word_embeddings false)" if missing == [_TIED_HEAD] else ""
        problems.append(f"lacks {some(missing)}{hint}")
    if others:
        problems.append(f"holds tensors that this architecture has no place for: {some(others)}")
    if buffers := [name for name in folder.names if _STORED_BUFFERS.fullmatch(name)]:
        notes.append(f"{some(buffers)}: stored, and computed anew by every engine")
    if unused:
        notes.append(f"{some(unused)}: layers for guesses of later tokens; neither loaded nor trained")
    notes += [f"{some(names)}: {family.ignored[beginning]}" for beginning, names in ignored.items()]
    odd: dict[str, list[str]] = {}
    for name, shape in expected.items():
        if name in folder and folder.shape(name) != shape:
            problems.append(f"{name} has shape {folder.shape(name)}, config.json says {shape}")
        if name in folder and (dtype := folder.stored_dtype(name)) not in WEIGHT_DTYPES:
            odd.setdefault(dtype, []).append(name)
    for dtype, names in odd.items():
        allowed = ", ".join(WEIGHT_DTYPES)
        problems.append(f"holds {dtype} ({some(names)}); allowed: {allowed}. Use the unquantized checkpoint")
    if problems:
        raise InputError(
            f"model.path: {folder.path}: not a whole {a.model_type} checkpoint: {'; '.join(problems[:SHOWN])}"
        )
    return notes


def _is_of_unused_layer(name: str, a: Architecture) -> bool:
    match = _LAYER.match(name)
    return match is not None and a.num_layers <= int(match[1]) < a.num_layers + a.unused_layers


def some(names: list[str]) -> str:
    """The first `SHOWN` names, and how many more there are."""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


# -- what ends a response


def read_stop_token_ids(folder: Path) -> list[int]:
    """Return ``eos_token_id`` of generation_config.json, else of config.json, as a list.

    Raises `InputError` where neither has one, where a file is broken, or where it is not the number of a token (below
    config.json's vocab_size, where that is there) or a list of them.
    """
    config = text_part(read_object(folder / "config.json")) if (folder / "config.json").is_file() else {}
    size = config.get("vocab_size")
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        eos = (config if name == "config.json" else read_object(file)).get("eos_token_id") if file.is_file() else None
        if eos is None:
            continue
        ids = eos if type(eos) is list else [eos]
        if not ids or any(type(t) is not int or t < 0 or (type(size) is int and t >= size) for t in ids):
            limit = f" below vocab_size ({size})" if type(size) is int else ""
            shown = repr(eos) if len(repr(eos)) <= 80 else f"{eos!r:.80} …"
            raise InputError(
                f"model.path: {file}: eos_token_id: {shown}; allowed: the number of a token{limit}, or a list of at "
                "least one. Or give rollout.stop_token_ids"
            )
        return ids
    raise InputError(f"model.path: {folder} names no eos_token_id; give rollout.stop_token_ids")


def resolve_stop_token_ids(wanted: list[int] | None, folder: Path) -> list[int]:
    """What ends a response: ``wanted`` (`rollout.stop_token_ids`), or where that is None, what the checkpoint names."""
    return read_stop_token_ids(folder) if wanted is None else wanted


FILE_BYTES = 4 * 2**30  # largest file, as the hub's tools write them
CHAT_TEMPLATE, NAMED_TEMPLATES = "chat_template.jinja", "additional_chat_templates"  # transformers' names
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt")


@dataclass(frozen=True)
class Sampling:
    """How a run made prompts and ended responses, where that is not as its model's folder says."""

    chat_template: Path | None = None
    stop_token_ids: list[int] | None = None

    @classmethod
    def of(cls, chat_template: str, stop_token_ids: list[int] | None) -> Sampling:
        """Return what a folder can serve: of `data.prompt.chat_template` only a path."""
        return cls(None if chat_template in ("auto", "none") else Path(chat_template), stop_token_ids)

    def state(self, folder: Path) -> None:
        """Make ``folder`` serve what the run sampled."""
        if self.chat_template is not None:
            shutil.copyfile(self.chat_template, folder / CHAT_TEMPLATE)
        if self.stop_token_ids is not None:
            file = folder / "generation_config.json"
            config = read_object(file) if file.is_file() else {}
            _write_object(file, config | {"eos_token_id": self.stop_token_ids})


def write_hf_checkpoint(
    folder: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    file_bytes: int = FILE_BYTES,
    sampling: Sampling | None = None,
) -> None:
    """Write ``weights`` to ``folder`` beside the configuration and tokenizer files of ``source``, as ``sampling`` says.

    Every rank calls it, because streaming the weights is collective; rank 0 writes, and needs memory for three times
    ``file_bytes``, the largest file. Raises `Fault` on every rank where rank 0 could not write.
    """
    stream = iter(weights)

    def write() -> None:
        try:
            if world_rank() == 0:
                _write(folder, stream, source, file_bytes)
                (sampling or Sampling()).state(folder)
        finally:
            for _ in stream:  # the other ranks are in the middle of the stream, even if rank 0's disk is full
                pass

    together(f"the Hugging Face checkpoint {folder} could not be written", write)


def _write(folder: Path, weights: Iterator[tuple[str, torch.Tensor]], source: Path, file_bytes: int) -> None:
    from safetensors.torch import save_file

    copy_companions(source, folder, leave_out=("README.md",))  # a model card speaks of other weights
    weight_map: dict[str, str] = {}
    total_size = 0
    dtypes: set[torch.dtype] = set()  # of weights that do not have one of their own
    in_fp32 = {name for entry in stored_tensors(read_architecture(source)) if entry.in_fp32 for name in entry.hf_names}
    for number, tensors in enumerate(_in_files(experts_in_one(weights), file_bytes), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(_usual_mode())  # safetensors makes files that their owner alone can read
        weight_map |= dict.fromkeys(tensors, file)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        dtypes |= {tensor.dtype for name, tensor in tensors.items() if name not in in_fp32}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    if len(dtypes) == 1:
        _state_dtype(folder / "config.json", dtypes.pop())


def experts_in_one(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """``weights`` with the parts of all experts that `HFFolder` takes apart put together; a layer's are held."""
    block, held = None, {}
    for name, tensor in weights:
        match = _OF_AN_EXPERT.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        if match[1] != block:
            yield from _stacks(held)
            block, held = match[1], {}
        held.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    yield from _stacks(held)


def _stacks(held: dict[str, dict[int, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for name, parts in held.items():
        yield name, torch.stack([parts[expert] for expert in range(len(parts))])


def _usual_mode() -> int:
    """The mode that new files get here."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _state_dtype(file: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the weights into config.json: readers that follow it would silently round them otherwise."""
    config = json.loads(file.read_text())
    # transformers 5 writes `dtype`, earlier releases `torch_dtype`; both read the latter.
    for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]:
        config[key] = str(dtype).removeprefix("torch.")
    _write_object(file, config)


def _write_object(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def copy_companions(source: Path, folder: Path, leave_out: Collection[str] = ()) -> None:
    """Copy what belongs to a checkpoint besides its weights: configuration, tokenizer, licence."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in Path(source).iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and file.name not in leave_out:
            shutil.copy2(file, folder / file.name)
    if (file := folder / "config.json").is_file() and (config := read_object(file)) != (text := text_part(config)):
        _write_object(file, text)
    if (templates := Path(source) / NAMED_TEMPLATES).is_dir():
        shutil.copytree(templates, folder / NAMED_TEMPLATES, dirs_exist_ok=True)


def _in_files(weights: Iterable[tuple[str, torch.Tensor]], file_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        if tensors and num_bytes + tensor.nbytes > file_bytes:
            yield tensors
            tensors, num_bytes = {}, 0
        tensors[name] = tensor.detach().cpu().clone()  # a copy: exported tensors may share memory with the model
        num_bytes += tensor.nbytes
    if tensors:
        yield tensors
