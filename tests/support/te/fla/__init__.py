"""Stand-ins for the kernels of flash-linear-attention that Megatron-Core calls: those of `layers.delta_net`, in torch.

With fla's arguments: queries and keys come normalised, and for every head of values.
"""
