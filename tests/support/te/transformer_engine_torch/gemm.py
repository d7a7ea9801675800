"""Matrix products. cuBLAS stores by columns: what it calls op(A) · op(B) is op(B) · op(A) of row-major tensors."""

from typing import Any

import torch

from .enums import refuse, torch_dtype

Tensor = torch.Tensor


def _product(a: Tensor, transa: bool, b: Tensor, transb: bool) -> Tensor:
    """op(B) · op(A) in fp32, [rows of op(B), columns of op(A)]. ``transa`` and ``transb`` are as cuBLAS sees them."""
    for name, tensor in (("A", a), ("B", b)):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise NotImplementedError(
                f"product: {name} is a {type(tensor).__name__}; the reference knows tensors alone"
            )
    left, right = b.reshape(-1, b.shape[-1]).float(), a.reshape(-1, a.shape[-1]).float()
    return (left.t() if transb else left) @ (right.t() if transa else right)


def _store(result: Tensor, out: Tensor, accumulate: bool) -> None:
    result = result.reshape(out.shape)
    out.copy_(out.float() + result if accumulate else result)


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: int | None,
    bias: Tensor | None,
    bias_type: int,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, None, None]:
    """(D, gradient of the bias, -, -) with D = alpha · op(B) · op(A), plus D with ``accumulate``, plus the bias.

    With ``grad`` a bias asks for its gradient, the sum of B's rows.
    """
    refuse("generic_gemm", quantizer=quantizer, gelu=gelu, gelu_in=gelu_in)
    refuse("generic_gemm", comm_overlap=comm_overlap, extra_output=extra_output, bulk_overlap=bulk_overlap)
    if alpha != 1.0 or beta not in (None, 1.0 if accumulate else 0.0):
        raise NotImplementedError(f"generic_gemm: alpha {alpha}, beta {beta} is not in the reference")
    result, bias_grad = _product(A, transa, B, transb), None
    if bias is not None and grad:
        bias_grad = B.reshape(-1, B.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None:
        result = result + bias.float()
    if D is None:
        shape = (result.shape[0],) if transb else B.shape[:-1]
        dtype = B.dtype if output_dtype is None else torch_dtype(output_dtype)
        return result.reshape(*shape, -1).to(dtype), bias_grad, None, None
    _store(result, D, accumulate)
    return D, bias_grad, None, None


def te_general_grouped_gemm(
    A: list[Tensor],
    transa: bool,
    B: list[Tensor],
    transb: bool,
    D: list[Tensor],
    D_type: int,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: int,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    """One product per group into ``D``, or into ``m_splits`` rows each of the one tensor in it; returns ``bias``."""
    refuse("te_general_grouped_gemm", bias=any(b.numel() for b in bias))
    refuse("te_general_grouped_gemm", gelu=any(p.numel() for p in pre_gelu_out))
    outputs = list(D[0].split(list(m_splits))) if single_output else D
    for a, b, out in zip(A, B, outputs, strict=True):
        if a.numel() and b.numel():
            _store(_product(a, transa, b, transb), out, accumulate)
        elif not accumulate:
            out.zero_()
    return bias
