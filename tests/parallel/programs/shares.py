"""What the ranks of test_checkpoint_shares.py run: saves and loads whose bytes are counted."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import filesystem

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint import save as checkpoint
from megatron_rl.checkpoint.shards import CONTENT_METADATA, sharded_state
from megatron_rl.learner.learner import Learner
from megatron_rl.process.ranks import gather_objects, world_rank
from tests.support.tiny import stored_rollouts, tiny_recipe


def save_and_load(folder: str, **sections: Any) -> dict[str, Any]:
    learner, results = Learner(tiny_recipe(**sections)), {}
    learner.update(stored_rollouts(0))
    with _received() as received:
        path = learner.save(Path(folder), {})
    results |= received
    results["written"] = sum(file.stat().st_size for file in path.glob(f"__{world_rank()}_*"))
    shards = [s for s in nested_values(sharded_state(learner.model, learner.optimizer)) if isinstance(s, ShardedTensor)]
    results["payload"] = sum(shard.data.nbytes for shard in shards)
    results["all_pieces"] = sum(gather_objects(len(shards)))
    own = _tensors(learner)
    results["held"] = sum(tensor.nbytes for tensor in own)
    before = [tensor.clone() for tensor in own]
    learner.update(stored_rollouts(1))
    with _read() as read:
        learner.load(path, verify=False)
    results |= read
    assert all(map(torch.equal, before, _tensors(learner)))
    results["megatron_reads"] = _megatron_reads(learner, path, before)
    results["reads_megatron"] = _reads_megatron(learner, Path(folder) / "megatron", path, before)
    return results | _hole(learner, Path(folder))


def _tensors(learner: Learner) -> list[torch.Tensor]:
    """Weights and optimizer states that this rank holds."""
    adams = [chained.optimizer for chained in learner.optimizer.chained_optimizers]
    masters = [p for adam in adams for group in adam.param_groups for p in group["params"]]
    moments = [adam.state[p][name] for adam in adams for p in adam.state for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach() for tensor in (*learner.module.parameters(), *masters, *moments)]


def _megatron_state(learner: Learner, is_loading: bool) -> dict[str, Any]:
    weights = unwrap_model(learner.model).sharded_state_dict(metadata=dict(CONTENT_METADATA))
    metadata = dict(CONTENT_METADATA)
    return {
        "model": weights,
        "optimizer": learner.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata),
    }


def _megatron_reads(learner: Learner, path: Path, expected: list[torch.Tensor]) -> bool:
    learner.update(stored_rollouts(2))
    state = dist_checkpointing.load(_megatron_state(learner, is_loading=True), str(path))
    unwrap_model(learner.model).load_state_dict(state["model"])
    learner.optimizer.load_state_dict(state["optimizer"])
    return all(map(torch.equal, expected, _tensors(learner)))


def _reads_megatron(learner: Learner, folder: Path, like: Path, expected: list[torch.Tensor]) -> bool:
    """A checkpoint as Megatron's own builder and checks of it write it."""
    if world_rank() == 0:
        folder.mkdir()
        (folder / manifest.TRAINER_FILE).write_bytes((like / manifest.TRAINER_FILE).read_bytes())
    dist.barrier()
    strategy = _Here("torch_dist", 1)
    state = copy.copy(_megatron_state(learner, is_loading=False))
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=dict(CONTENT_METADATA))
    learner.update(stored_rollouts(3))
    learner.load(folder, verify=False)
    return all(map(torch.equal, expected, _tensors(learner)))


class _Here(checkpoint._Strategy):
    """Writes in this process."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        writer, index = self.async_save(sharded_state_dict, checkpoint_dir)
        results = gather_objects(checkpoint._write(writer))
        if world_rank() == 0:
            writer.finish(index, results)
        dist.barrier()


def _hole(learner: Learner, folder: Path) -> dict[str, Any]:
    """What is said where rank 1 leaves a part of its share out, and what is left of the checkpoint."""
    own = checkpoint.sharded_state

    def lacking(*arguments: Any) -> dict[str, Any]:
        state = own(*arguments)
        if world_rank() == 1:
            del state["slices"][0]
        return state

    checkpoint.sharded_state, learner.step, said = lacking, 1, ""
    try:
        learner.save(folder, {})
    except checkpoint.SaveError as error:
        said = str(error)
    checkpoint.sharded_state = own
    dist.barrier()
    return {"hole": said, "left": [path.name for path in manifest.list_checkpoints(folder)]}


@contextmanager
def _read() -> Iterator[dict[str, int]]:
    """Bytes and pieces that loading reads from the shards' files."""
    counts, own = {"read": 0, "pieces": 0}, filesystem.FileSystemReader._slice_file

    def counting(reader: Any, file: Any, info: Any) -> Any:
        counts["read"] += info.length
        counts["pieces"] += 1
        return own(reader, file, info)

    filesystem.FileSystemReader._slice_file = counting
    try:
        yield counts
    finally:
        filesystem.FileSystemReader._slice_file = own


@contextmanager
def _received() -> Iterator[dict[str, int]]:
    """Bytes that collectives hand to this rank: of objects, and of tensors beside those that carry objects."""
    received = {"object_bytes_received": 0, "tensor_bytes_received": 0}
    own = {name: getattr(dist, name) for name in ("all_gather_object", "gather_object", "broadcast_object_list")}
    tensors = ("all_gather", "all_gather_into_tensor", "gather", "broadcast", "all_to_all_single", "scatter")
    own |= {name: getattr(dist, name) for name in tensors}

    def objects(name: str) -> Any:
        target = {"gather_object": 1}.get(name, 0)  # which argument is filled
        keyword = {"gather_object": "object_gather_list"}.get(name, "object_list")

        def call(*arguments: Any, **keywords: Any) -> Any:
            result = own[name](*arguments, **keywords)
            filled = arguments[target] if len(arguments) > target else keywords.get(keyword)
            received["object_bytes_received"] += len(pickle.dumps(filled))
            return result

        return call

    def plain(name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            received["tensor_bytes_received"] += 1
            return own[name](*arguments, **keywords)

        return call

    for name in own:
        setattr(dist, name, plain(name) if name in tensors else objects(name))
    try:
        yield received
    finally:
        for name, function in own.items():
            setattr(dist, name, function)
