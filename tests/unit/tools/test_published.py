"""Published measurements beside the plan: bounds, the page's table, and constants that are the fit's."""

import functools

import pytest

from megatron_rl.instruments.plan import GPUS, hardware
from tests.support.tiny import REPOSITORY
from tools.dev import published

PAGE = REPOSITORY / "docs" / "planning.md"
rows = functools.cache(lambda: tuple(published.rows()))


@pytest.mark.parametrize(("kind", "fewest"), [("step", 10), ("held out", 10), ("phase", 8)])
def test_most_are_within_their_bounds(kind, fewest):
    chosen = [r for r in rows() if kind == ("held out" if r.held_out else "step" if r.what == "step" else "phase")]
    assert sum(row.is_within for row in chosen) >= max(fewest, 0.7 * len(chosen))


def test_what_is_outside_has_a_reason():
    assert [row.run for row in rows() if not row.is_within and not row.note] == []


def test_the_page_has_the_table():
    assert "\n".join(published.lines()) in PAGE.read_text()


@pytest.mark.parametrize(("family", "name"), [("hopper", "h100-80"), ("blackwell", "b200-180")])
def test_constants_of_decoding_are_those_of_the_fit(family, name):
    """To a tenth; the seconds of fp8 and of a sequence are one for both kinds of GPU, and lie between their fits or a
    tenth beside them. A step of fp8 is fitted with few points: it is the lower error of both kinds that counts."""
    fit = published.fitted_law([p for p in published.points() if p.gpu == family and not p.out_of_line])
    gpu = GPUS[name]
    used = [gpu.fitted(hardware.DECODE_LAYER_S), gpu.fitted(hardware.DECODE_EXCHANGE_S), fit[2], hardware.SERVED_S]
    for found, constant in zip(fit, used, strict=True):
        assert abs(found / constant - 1) < 0.1


def test_a_fit_finds_the_law_again():
    """Of points that cost what they hold."""
    made = [
        published.Point("hopper", f > 0, 1e-4 * n + 2e-4 * e + 3e-4 * n * f + 5e-5 * s + r, r, n, e, s, False)
        for n, e, f, s, r in ((10, 0, 0, 8, 1e-3), (20, 20, 0, 64, 2e-3), (30, 0, 1, 9, 3e-3), (5, 5, 0, 300, 1e-4))
    ]
    for found, wanted in zip(published.fitted_law(made), (1e-4, 2e-4, 3e-4, 5e-5), strict=True):
        assert abs(found / wanted - 1) < 1e-9
