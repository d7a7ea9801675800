"""Length-decay schedule in NeMo-RL: for nemo_rl/models/policy/workers/megatron_policy_worker.py (docs/patches.md)."""


def observe_length(scheduler, global_valid_toks, global_valid_seqs):
    if global_valid_seqs.item() > 0:  # else every response is masked
        scheduler.observe_length(global_valid_toks.item() / global_valid_seqs.item())
