"""Patches to upstream projects, applied all or nothing: series, targets, states. `megatron-rl patch` drives it.

Standard library only: it runs right after `pip install`, before anything else can be imported.
"""
