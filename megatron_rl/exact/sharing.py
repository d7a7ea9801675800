"""What ranks exchange in a step of generation, in shapes that no value decides.

Megatron's dispatcher sends a row to the ranks of its experts, and so has to know how many rows each of them gets. Here
every rank of an expert group gets all rows, and returns a place for each result that there can be. That moves more
bytes, a few megabytes a layer, and waits for nothing. Sums over tensor-parallel ranks are those of
`learner.layers.rank_sums`.

Shapes: n rows of a replica; t tensor-parallel ranks, which share them out among themselves; g ranks of an expert group;
K experts of a token, E experts of a rank, H hidden size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.learner.layers import rank_sums

Group = dist.ProcessGroup


class RowsOfRanks:
    """The groups of this rank, and what goes through them. All methods are collective."""

    def __init__(self) -> None:
        self.tensor_group: Group = parallel_state.get_tensor_model_parallel_group()
        self.expert_group: Group = parallel_state.get_expert_model_parallel_group()

    def sum_of_parts(self, x: torch.Tensor) -> torch.Tensor:
        """[n, …] of every tensor-parallel rank → their sum, added from the first rank on; ``x`` may be changed."""
        if self.tensor_group.size() > 1:
            rank_sums.all_reduce(x, group=self.tensor_group)
        return x

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """[n, …] → [n/t, …], this tensor-parallel rank's."""
        return x.chunk(self.tensor_group.size())[self.tensor_group.rank()]

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """[n/t, …] → [n, …], of all tensor-parallel ranks."""
        return _gathered(own, self.tensor_group)

    def of_expert_group(self, own: torch.Tensor) -> torch.Tensor:
        """[n/t, …] → [g · n/t, …], of all ranks whose rows this rank's experts may get."""
        return _gathered(own, self.expert_group)

    def own_of_expert_group(self, rows: torch.Tensor) -> torch.Tensor:
        """[g · n/t, …] → [n/t, …]."""
        return rows.chunk(self.expert_group.size())[self.expert_group.rank()]

    def results(
        self, results: torch.Tensor, places: torch.Tensor, chosen: torch.Tensor, num_local: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of all experts for this rank's own rows.

        Args:
            results: [M, H], of this rank's experts.
            places: [g · n/t, K], where in them those of every row lie.
            chosen: [n/t, K], the experts of this rank's own rows.
            num_local: E.

        Returns:
            results [g · n/t · K, H], and the places [n/t, K] in them of the own rows' experts.
        """
        if self.expert_group.size() == 1:
            return results, places
        sent = results[places.flatten()]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=self.expert_group)
        numbers = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen)
        return received, torch.add(numbers, chosen // num_local, alpha=chosen.numel())


def _gathered(own: torch.Tensor, group: Group) -> torch.Tensor:
    if group.size() == 1:
        return own
    found = own.new_empty(group.size() * own.size(0), *own.shape[1:])
    dist.all_gather_into_tensor(found.view(-1), own.contiguous().view(-1), group=group)
    return found
