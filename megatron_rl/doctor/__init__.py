"""`megatron-rl doctor`: does this node, and do these nodes together, do what a run relies on?

`checks` lists the checks; each is a function of a `Setting` that returns an `Outcome`. `frame` runs every check in
processes of its own, with a deadline, so that one which hangs, crashes or breaks CUDA leaves the others alone. `report`
shows what was found. Nothing here imports torch or an engine before a check needs it.
"""
