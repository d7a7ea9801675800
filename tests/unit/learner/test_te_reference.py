"""The reference of TransformerEngine's extension against autograd, and that it refuses what it does not know."""

import importlib
import sys
from itertools import pairwise

import pytest
import torch

from tests.support import te

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


def product(extension, a, transa, b, transb, out=None, accumulate=False, **options):
    kind = extension.DType.kFloat32
    positional = (a, transa, b, transb, out, None, kind, None, kind, False, None, False, None, 0, accumulate, False)
    return extension.generic_gemm(*positional, **options)[0]


def test_the_three_products_of_a_linear_layer(extension):
    x, w = draw(5, 3), draw(4, 3)
    y = torch.nn.functional.linear(x, w)
    dy = draw(5, 4).detach()
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w = x.detach(), w.detach()
    torch.testing.assert_close(product(extension, w, True, x, False), y.detach())
    torch.testing.assert_close(product(extension, w, False, dy, False), dx)
    torch.testing.assert_close(product(extension, x, False, dy, True), dw)
    out = dw.clone()
    product(extension, x, False, dy, True, out, accumulate=True)
    torch.testing.assert_close(out, 2 * dw)


def test_rms_norm(extension):
    x, w = draw(6, 8), draw(8)
    y = torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
    dy = draw(6, 8).detach()
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w = x.detach(), w.detach()
    found, _, inverse = extension.rmsnorm_fwd(x, w, 1e-6, None, None, extension.DType.kFloat32, 0, False)
    torch.testing.assert_close(found, y.detach())
    for got, want in zip(extension.rmsnorm_bwd(dy, x, inverse, w, 0, False), (dx, dw), strict=True):
        torch.testing.assert_close(got, want)


def test_masked_softmax(extension):
    scores = draw(2, 3, 4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1).expand(2, 1, 4, 4).clone()
    mask[1, 0, 0] = True  # a query that sees no key
    wanted = (scores * 0.5).masked_fill(mask, -10000.0).softmax(-1) * ~mask.all(-1, keepdim=True)
    grad = draw(2, 3, 4, 4).detach()
    found = extension.scaled_masked_softmax_forward(scores.detach(), mask, 0.5)
    torch.testing.assert_close(found, wanted.detach())
    assert not found[1, :, 0].any()
    dscores = torch.autograd.grad(wanted, scores, grad)[0]
    torch.testing.assert_close(extension.scaled_masked_softmax_backward(grad, found, 0.5), dscores)


def test_rotary_embedding_of_packed_rows_is_megatrons(extension):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    x, freqs = draw(7, 2, 8), torch.rand(5, 1, 1, 8).chunk(2, -1)[0].repeat(1, 1, 1, 2)
    pieces = [
        _apply_rotary_pos_emb_bshd(x[start:end, None], freqs[: end - start])[:, 0]
        for start, end in pairwise(cu_seqlens.tolist())
    ]
    wanted = torch.cat(pieces)
    options = (freqs, None, extension.NVTE_QKV_Format.NVTE_THD, False, cu_seqlens, 1, 0)
    torch.testing.assert_close(extension.fused_rope_forward(x.detach(), *options), wanted.detach())
    grad = draw(7, 2, 8).detach()
    torch.testing.assert_close(extension.fused_rope_backward(grad, *options), torch.autograd.grad(wanted, x, grad)[0])


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
    torch.testing.assert_close(ours, theirs.detach())
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
