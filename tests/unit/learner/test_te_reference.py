"""The reference of TransformerEngine's extension against autograd, and that it refuses what it does not know."""

import importlib
import sys
from itertools import pairwise

import pytest
import torch

from tests.support import te
from tests.support.rounding import CLOSED_FORM, assert_as_double, assert_rounded

FOLDER = str(te.REPOSITORY / "tests" / "support" / "te")
KIND = "kFloat32"


@pytest.fixture(scope="module")
def extension():
    sys.path.append(FOLDER)
    yield importlib.import_module("transformer_engine_torch")
    sys.path.remove(FOLDER)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine_torch"]:
        del sys.modules[name]  # Megatron, imported later, must not find it


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


def assert_closed_form(computed, function, inputs) -> None:
    """``computed`` is what ``function`` gives in float64, up to CLOSED_FORM roundings of the largest value."""
    assert_as_double(computed, function, inputs, longest_sum=1, roundings=CLOSED_FORM)


@pytest.mark.parametrize("change", [lambda x: x.half().float(), lambda x: x * (1 + 2**-17), lambda x: x.flip(0)])
def test_another_result_is_no_closed_form(change):
    x = draw(5, 3)
    assert_closed_form([x.detach() * 0.5], lambda x: [x * 0.5], [x])
    with pytest.raises(AssertionError, match="result 0"):
        assert_closed_form([change(x.detach() * 0.5)], lambda x: [x * 0.5], [x])


def product(extension, a, transa, b, transb, out=None, accumulate=False, **options):
    kind = extension.DType.kFloat32
    positional = (a, transa, b, transb, out, None, kind, None, kind, False, None, False, None, 0, accumulate, False)
    return extension.generic_gemm(*positional, **options)[0]


def test_the_three_products_of_a_linear_layer(extension):
    x, w = draw(5, 3), draw(4, 3)
    dy = draw(5, 4).detach()

    def linear(x, w, dy):
        y = torch.nn.functional.linear(x, w)
        dx, dw = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
        return [y, dx, dw, 2 * dw]

    plain = x.detach(), w.detach()
    dw = product(extension, plain[0], False, dy, True)
    twice = dw.clone()
    product(extension, plain[0], False, dy, True, twice, accumulate=True)
    computed = product(extension, plain[1], True, plain[0], False), product(extension, plain[1], False, dy, False)
    assert_closed_form([*computed, dw, twice], linear, [x, w, dy])


def test_rms_norm(extension):
    x, w = draw(6, 8), draw(8)
    dy = draw(6, 8).detach()

    def norm(x, w, dy):
        y = torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
        return [y, *torch.autograd.grad(y, (x, w), dy, retain_graph=True)]

    plain = x.detach(), w.detach()
    y, _, inverse = extension.rmsnorm_fwd(*plain, 1e-6, None, None, extension.DType.kFloat32, 0, False)
    assert_closed_form([y, *extension.rmsnorm_bwd(dy, plain[0], inverse, plain[1], 0, False)], norm, [x, w, dy])


def test_masked_softmax(extension):
    scores = draw(2, 3, 4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1).expand(2, 1, 4, 4).clone()
    mask[1, 0, 0] = True  # a query that sees no key
    grad = draw(2, 3, 4, 4).detach()

    def softmax(scores, grad):
        out = (scores * 0.5).masked_fill(mask, -10000.0).softmax(-1) * ~mask.all(-1, keepdim=True)
        return [out, *torch.autograd.grad(out, scores, grad, retain_graph=True)]

    computed = extension.scaled_masked_softmax_forward(scores.detach(), mask, 0.5)
    assert not computed[1, :, 0].any()
    backward = extension.scaled_masked_softmax_backward(grad, computed.clone(), 0.5)
    assert_closed_form([computed, backward], softmax, [scores, grad])


def test_rotary_embedding_of_packed_rows_is_megatrons(extension):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    x, freqs = draw(7, 2, 8), torch.rand(5, 1, 1, 8).chunk(2, -1)[0].repeat(1, 1, 1, 2)
    grad = draw(7, 2, 8).detach()

    def rotated(x, freqs, grad):
        pieces = [
            _apply_rotary_pos_emb_bshd(x[start:end, None], freqs[: end - start])[:, 0]
            for start, end in pairwise(cu_seqlens.tolist())
        ]
        out = torch.cat(pieces)
        return [out, *torch.autograd.grad(out, x, grad, retain_graph=True)]

    options = (freqs, None, extension.NVTE_QKV_Format.NVTE_THD, False, cu_seqlens, 1, 0)
    computed = [extension.fused_rope_forward(x.detach(), *options), extension.fused_rope_backward(grad, *options)]
    assert_closed_form(computed, rotated, [x, freqs, grad])


def test_rotary_embedding_of_parts_of_sequences(extension):
    """Each of two context-parallel ranks has the first and last, or the inner, quarters of every sequence."""
    cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32)
    x, freqs = draw(12, 2, 8).detach(), torch.rand(8, 1, 1, 4).repeat(1, 1, 1, 2)
    thd = extension.NVTE_QKV_Format.NVTE_THD
    whole = extension.fused_rope_forward(x, freqs, None, thd, False, cu_seqlens, 1, 0)
    for rank, rows in enumerate(([0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9])):
        options = (freqs, None, thd, False, cu_seqlens, 2, rank)
        computed = extension.fused_rope_forward(x[rows], *options)
        assert (computed == whole[rows]).all()
        back = extension.fused_rope_backward(computed, *options)
        assert_rounded(back, x[rows], CLOSED_FORM, 1.0, torch.float32)


@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_of_packed_rows(extension, causal):
    """Grouped heads; sequences of unequal length, and as many keys as queries only under a causal mask."""
    queries, keys = [3, 5], [3, 5] if causal else [4, 2]
    q, k, v = draw(8, 4, 6), draw(sum(keys), 2, 6), draw(sum(keys), 2, 6)
    grad = draw(8, 4, 6).detach()

    def attention(q, k, v, grad):
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in qkv), is_causal=causal, scale=0.3, enable_gqa=True
            )[0].transpose(0, 1)
            for qkv in zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
        ]
        out = torch.cat(parts)
        return [out, *torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)]

    name = "NVTE_PADDING_CAUSAL_MASK" if causal else "NVTE_PADDING_MASK"
    mask, thd = getattr(extension.NVTE_Mask_Type, name), extension.NVTE_QKV_Format.NVTE_THD
    plain = [x.detach() for x in (q, k, v)]
    offsets = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (queries, keys)]
    kinds = (None, mask, None, (-1, -1), False)
    out, lse, _ = extension.fused_attn_fwd(
        5, 5, True, 0.3, 0.0, False, None, thd, None, *kinds, *offsets, *plain, torch.float32, None, None
    )
    (dq, dk, dv, _) = extension.fused_attn_bwd(
        5, 5, 0.3, 0.0, False, None, thd, thd, None, None, None, *kinds, True, *offsets, *plain, out, grad,
        torch.float32, [lse], None, None,
    )  # fmt: skip
    assert_closed_form([out, dq, dk, dv], attention, [q, k, v, grad])


def test_adam_is_torchs(extension):
    weight, grad = draw(9).detach(), draw(9).detach()
    ours, mean, square = weight.clone(), torch.zeros(9), torch.zeros(9)
    theirs = torch.nn.Parameter(weight.clone())
    adam = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in (1, 2):
        theirs.grad = grad * step
        adam.step()
        lists = [[grad * step], [ours], [mean], [square]]
        extension.multi_tensor_adam(0, None, lists, 1e-2, 0.9, 0.95, 1e-8, step, 1, 1, 0.1)
    assert_rounded(ours, theirs.detach(), scale=float(weight.abs().max()), dtype=torch.float32)
    with pytest.raises(TypeError, match=r"step 2\.0 is no int"):
        extension.multi_tensor_adam(0, None, lists, 1e-2, 0.9, 0.95, 1e-8, 2.0, 1, 1, 0.1)


def test_the_unknown_is_refused(extension):
    x = torch.zeros(2, 2)
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.fp8_transpose is not in the reference"):
        extension.fp8_transpose(x)
    with pytest.raises(NotImplementedError, match="generic_gemm: comm_overlap is not in the reference"):
        product(extension, x, True, x, False, comm_overlap=object())
    with pytest.raises(NotImplementedError, match=r"alpha 2\.0"):
        product(extension, x, True, x, False, alpha=2.0)
    with pytest.raises(NotImplementedError, match="kFloat8E4M3 is not in the reference"):
        extension.rmsnorm_fwd(x, x[0], 1e-6, None, None, extension.DType.kFloat8E4M3, 0, False)
