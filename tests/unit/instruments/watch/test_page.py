"""The pages: what they hold of a run, tokens coloured by rho, and a model's text that stays text."""

from __future__ import annotations

import html
import math
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_rl.errors import InputError
from megatron_rl.instruments.watch import page
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.run.recorded_batches import delete_batch, record_batch
from tests.support.tiny import MODEL, stored_rollouts
from tests.support.written_run import BANDS, EVIL, WrittenRun


@pytest.fixture
def written(tmp_path) -> WrittenRun:
    written = WrittenRun(tmp_path / "<b>run")
    for step in range(12):
        written.step(step, alarm=step == 7)
        written.sample(step, EVIL)
    return written


@pytest.fixture
def run(written) -> WatchedRun:
    run = WatchedRun(written.directory.root.name, written.directory.root)
    run.refresh()
    return run


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def test_the_overview_has_state_alarms_curves_mismatch_routes_and_texts(written, run):
    written.batch(11)
    markup = page.overview([run])
    said = text_of(markup)
    assert "step 7: mismatch mismatch/rho_std = 1.02 > 0.5 for 1 steps; then: warn" in said
    assert "11 of 30" in said
    for title in ("reward", "mismatch: std of rho", "gradient norm", "mean rho by po"):
        assert title in said
    for band, label in enumerate(BANDS):
        assert f"<td>{label}</td><td>10</td><td>{1 + 0.01 * (band - 2):.4g}</td>" in markup
    assert "would route otherwise" in said
    assert said.count("response: ") == page.SAMPLES
    assert '<a href="batch?run=0&amp;step=11">11</a>' in markup
    assert "million response tokens" in text_of(page.overview([run], "tokens"))
    with pytest.raises(InputError, match="x='miles': one of step, time, tokens"):
        page.overview([run], "miles")


def test_text_of_files_stays_text(written, run):
    written.batch(11)
    for markup in (page.overview([run]), page.batch_page(run, 11, None), page.why_page(run)):
        assert not re.search(r"<script|<img|<b>|onerror=\"|\x1b|\u202e|(src|href)=[\"'](/|http)", markup)


def test_figures_are_drawn_again_for_a_new_record_alone(written, run, monkeypatch):
    drawn = []
    monkeypatch.setattr(page, "curves_html", lambda groups, view: f"{drawn.append(view)}")
    page.overview([run]), page.overview([run])
    assert len(drawn) == 1
    written.step(12)
    run.refresh()
    page.overview([run])
    assert len(drawn) == 2


def test_runs_that_have_not_begun(tmp_path):
    run = WatchedRun("run", tmp_path)
    run.refresh()
    said = text_of(page.overview([run]))
    for hint in ("waiting", "mismatch/rho_count", "routing.telemetry", "monitor.samples.every", "no batch is on disk"):
        assert hint in said
    assert "metrics.jsonl: no such file" in text_of(page.why_page(run))
    (tmp_path / "metrics.jsonl").write_text("no json\n{}\n")
    assert "line 1: not valid JSON" in text_of(page.why_page(run))


def test_the_page_of_why(run):
    said = text_of(page.why_page(run))
    assert "12 steps" in said
    assert "step     4  mismatch-contract" in said


def test_tokens_are_coloured_by_rho(written, run):
    sequence = written.batch(3).sequences[5]
    gaps = (sequence.old_logprobs.astype(np.float64) - sequence.inference_logprobs).tolist()
    spans = re.findall(r'<span class="token" title="(.*?)" style="(.*?)">(.*?)</span>', page.batch_page(run, 3, 5))
    tokens = sequence.tokens
    assert [html.unescape(text) for *_, text in spans] == [
        Tokenizer.from_file(str(MODEL / "tokenizer.json")).id_to_token(int(token)) for token in tokens
    ]
    for (told, style, _), gap, mu in zip(spans, gaps, sequence.inference_logprobs, strict=True):
        assert f"mu {math.exp(mu):.4g}, rho {math.exp(gap):.4g}, " in told
        assert ("214 96 0" in style) == (gap > 0)
        assert f"/ {0.75 * abs(gap) / max(map(abs, gaps)):.3f})" in style


def test_the_response_with_the_largest_gap_comes_first(written, run):
    largest = [float(np.abs(s.old_logprobs - s.inference_logprobs).max()) for s in written.batch(3).sequences]
    markup = page.batch_page(run, 3, None)
    order = sorted(range(24), key=lambda i: -largest[i])
    assert [int(number) for number in re.findall(r"sequence=(\d+)", markup)] == order
    first = page.batch_page(run, 3, order[0])
    assert markup == first


def test_a_batch_without_the_learners_log_probs_and_without_a_tokenizer(written, run):
    batch = stored_rollouts(0)
    record_batch(run.directory.batches, batch, 0)
    run.directory.recipe.write_text("model: {path: /nowhere}\n")
    said = text_of(page.batch_page(run, 0, 0))
    assert "no log-probs of the learner" in said
    assert "shown as numbers" in said
    assert f" {batch.sequences[0].tokens[-1]}" in said


def test_a_probability_of_none_is_as_far_as_the_furthest(written, run):
    batch = written.batch(1)
    batch.sequences[0].old_logprobs[0] = -np.inf
    record_batch(run.directory.batches, batch, 1)
    assert "rho 0, " in page.batch_page(run, 1, 0)


def test_a_batch_that_is_deleted_or_recorded_again(written, run):
    written.batch(2)
    written.batch(1)
    page.batch_page(run, 1, 0)
    assert delete_batch(run.directory.batches, 1)
    with pytest.raises(InputError, match="step 1: no recorded batch; there are: 2"):
        page.batch_page(run, 1, 0)
    with pytest.raises(InputError, match="sequence 24; it has 24"):
        page.batch_page(run, 2, 24)


def byte_level() -> Tokenizer:
    """A token for each byte."""
    tokenizer = Tokenizer(
        models.BPE({symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_character_of_several_tokens_is_whole_and_controls_nothing():
    tokenizer = byte_level()
    assert page.texts(tokenizer, np.array(tokenizer.encode("a é  b").ids)) == ["a", " ", "", "é", " ", " ", "b"]
    shown = "".join(page.texts(tokenizer, np.array(tokenizer.encode(EVIL).ids)))
    assert "\\x1b[31m" in shown
    assert not set("\x1b\u202e") & set(shown)
