"""Exact mode's forward kernels in Triton: the algorithm of `exact.invariant` for what Triton compiles for.

A row's numbers depend on its own inputs alone [VX], because every kernel has

* tiles of one shape whatever the call's shape is, the last one padded and masked; those of products are larger where
  rows are many, which changes no bit (`gemm.LARGE`);
* one order for every sum over a row: K from its first term on, keys in blocks of `attention.KEY_BLOCK` from the
  first one on, the vocabulary in blocks from its first entry on, experts in their order;
* one program for a sum: no split keys, no split K, no atomics;
* one number of warps, because the reduction of a tile is a tree over them.

Nothing in a launch depends on values on the device, so that a step of generation can be captured in a CUDA graph: grids
come from shapes, and kernels find lengths and experts themselves.

Forward only. Accumulation is fp32. Under ``TRITON_INTERPRET=1`` the kernels run on CPU tensors; products of tiles are
sums of products there (`gemm.dot`). What the interpreter cannot show is the order of summation inside one product of
the tensor cores, races and speed.
"""
