"""The page in a real browser: drawn, read with keys, followed while a run goes on, safe from what a model writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from megatron_rl.instruments.watch import server as serving
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.instruments.watch.server import WatchServer
from megatron_rl.run.recorded_batches import delete_batch, recorded_steps
from tests.support import debian
from tests.support.browser import PACKAGE, Browser, browser_program
from tests.support.written_run import BANDS, EVIL, LAYERS, WrittenRun

STEPS = 600  # more than a curve has points


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if browser_program() is None:
        debian.install((PACKAGE,))
    if browser_program() is None:
        pytest.skip(f"no Chromium: Debian's {PACKAGE} could not be installed")
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[WrittenRun, WrittenRun]:
    root = tmp_path_factory.mktemp("runs")
    full, bare = WrittenRun(root / "full", num_steps=2 * STEPS), WrittenRun(root / "<b>bare", num_steps=100)
    for step in range(STEPS):
        full.step(step, alarm=step == 300, **({"actor/pg_loss": float("nan") if step == 50 else 1.0}))
    for step in (0, 1):
        full.sample(step, EVIL)
        full.batch(step)
    bare.directory.metrics.write_text('{"step": 0, "time": 1.0, "critic/rewards/mean": 0.25}\n')
    bare.directory.recipe.unlink()
    return full, bare


@pytest.fixture(scope="module")
def address(runs) -> Iterator[str]:
    serving.REFRESH_S = 0.05
    server = WatchServer([WatchedRun(run.directory.root.name, run.directory.root) for run in runs], 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://localhost:{server.server_address[1]}{server.path}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def page(browser, address, request) -> Iterator[Browser]:
    """The page at the view that the test names."""
    browser.errors.clear()
    browser.resize(1280, 900)
    browser.open("about:blank")
    browser.open(f"{address}#{request.param}")
    browser.wait("document.querySelector('#connection')?.textContent === 'live'")
    yield browser
    assert browser.errors == []


def view(name: str):
    return pytest.mark.parametrize("page", [name], indirect=True)


def text(page: Browser, selector: str) -> str:
    return page.run(f"document.querySelector({selector!r}).innerText")


@view("curves")
def test_curves_of_both_runs(page):
    titles = page.wait("[...document.querySelectorAll('figcaption')].map(node => node.firstChild.textContent)")
    assert {"reward", "mismatch: std of rho", "gradient norm", "entropy"} <= set(titles)
    assert "PPO KL" in text(page, "main > p:last-child")
    reward = "document.querySelectorAll('figure')[0]"
    assert (
        page.run(f"[...{reward}.querySelectorAll('path')].map(path => path.getAttribute('d').length > 3)").count(True)
        >= 2
    )
    readout = page.run(f"{reward}.querySelector('.readout').innerText")
    assert "full 1" in readout
    assert "<b>bare 0.25" in readout
    assert page.run("document.querySelectorAll('svg .alarm').length") >= len(titles) - 1
    assert page.run("document.querySelectorAll('#runs article').length") == 2
    assert "no step yet" not in text(page, "#runs")


@view("curves?metric=actor/pg_loss")
def test_any_metric_can_be_added_and_its_holes_are_seen(page):
    page.wait("document.querySelector('figcaption')?.firstChild.textContent === 'actor/pg_loss'")
    assert "1 not finite" in text(page, "figure .readout")
    page.run("document.querySelector('figcaption button[aria-label]').click()")
    page.wait("document.querySelector('figcaption').firstChild.textContent === 'reward'")
    assert page.run("location.hash") == "#curves"


@view("curves")
def test_keys_read_a_curve(page):
    page.wait("document.querySelector('figure svg')")
    page.run("document.querySelector('figure svg').focus()")
    page.press("End")
    assert f"step {STEPS - 1}" in text(page, "figure .readout")
    page.press("Home")
    first = text(page, "figure .readout")
    page.press("ArrowRight")
    assert text(page, "figure .readout") != first
    assert page.run("document.querySelector('figure .readout').getAttribute('aria-live')") == "polite"
    page.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    page.press("ArrowRight")
    page.wait("document.activeElement.id === 'tab-mismatch' && document.querySelector('.bands')")


@view("mismatch")
def test_rho_by_band(page):
    page.wait("document.querySelectorAll('.bands circle').length === 5")
    assert set(BANDS) <= set(page.run("[...document.querySelectorAll('.bands text')].map(node => node.textContent)"))
    rows = page.run(
        "[...document.querySelectorAll('details tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[2] for row in rows] == list(BANDS)
    assert [float(row[4]) for row in rows] == [0.98, 0.99, 1, 1.01, 1.02]
    page.run("document.querySelector('input[type=range]').value = 17")
    page.run("document.querySelector('input[type=range]').dispatchEvent(new Event('change'))")
    page.wait("document.querySelector('details tbody td:nth-child(2)')?.textContent === '17'")


@view("routes")
def test_routes_by_layer(page):
    canvas = page.wait("(node => node && [node.width, node.height])(document.querySelector('canvas'))")
    assert canvas == [200, LAYERS]
    assert "routing.telemetry: true" in text(page, "main")
    page.run("document.querySelector('canvas').focus()")
    page.press("ArrowLeft")
    assert "layer 3, step 594 to 596: 3% of rows" in text(page, "main")
    colours = page.run("[...document.querySelector('canvas').getContext('2d').getImageData(0, 0, 1, 4).data]")
    assert len({tuple(colours[i : i + 3]) for i in range(0, 16, 4)}) == LAYERS


@view("samples")
def test_tokens_are_coloured_by_rho_and_responses_stay_text(page, runs):
    full, _ = runs
    page.wait("document.querySelectorAll('.token').length && document.querySelectorAll('.sample').length === 2")
    about = page.run("document.querySelector('.list button[aria-current=true]').dataset.sequence")
    sequence = full.batch(1).sequences[int(about)]
    gaps = (sequence.old_logprobs - sequence.inference_logprobs).tolist()
    colours = page.run("[...document.querySelectorAll('.token')].map(node => node.style.backgroundColor)")
    assert len(colours) == len(gaps)
    for gap, colour in zip(gaps, colours, strict=True):
        assert ("--above" in colour) == (gap > 0), (gap, colour)
        strength = float(colour.rpartition("/")[2].strip(" )"))
        assert strength == pytest.approx(0.75 * abs(gap) / max(map(abs, gaps)), abs=1e-3)
    page.run("document.querySelector('.text-box[tabindex]').focus()")
    page.press("ArrowRight")
    assert "token 1:" in text(page, "main")
    assert "rho " in text(page, ".split .readout")
    assert page.run("document.title") == "megatron-rl watch"
    assert page.run("document.querySelectorAll('.sample img, .sample script, #runs b').length") == 0
    assert EVIL.partition("\x1b")[0] in text(page, ".sample")


@view("samples")
def test_a_batch_that_goes_away_is_said_and_a_new_one_is_offered(page, runs):
    full, _ = runs
    page.wait("document.querySelectorAll('.token').length")
    full.batch(2)
    for step in recorded_steps(full.directory.batches)[:-1]:
        delete_batch(full.directory.batches, step)
    page.wait("[...document.querySelectorAll('button')].some(node => node.textContent === 'newest batch: step 2')")
    assert page.run("document.querySelectorAll('.token').length") > 0, "what a reader looks at stays"
    page.run("document.querySelectorAll('.list button')[1].click()")
    page.wait("document.querySelector('.split .empty')?.textContent.includes('there are: 2')")
    page.errors[:] = [text for text in page.errors if "404" not in text]
    page.run("[...document.querySelectorAll('button')].find(node => node.textContent.startsWith('newest')).click()")
    page.wait("document.querySelectorAll('.token').length")


@view("alarms")
def test_alarms_and_their_rules(page):
    page.wait("document.querySelector('main table')")
    assert "mismatch/rho_std = 1.02 > 0.5" in text(page, "main table")
    assert "monitor.alarms" in text(page, "main > .empty")
    assert text(page, "#tab-alarms") == "Alarms1"


@view("why")
def test_the_page_of_why_of_both_runs(page):
    page.wait("document.querySelectorAll('main pre').length === 2")
    assert "What was seen, in order:" in text(page, "main pre")
    assert text(page, "main h2:nth-of-type(2)") == "<b>bare"


@view("curves")
def test_a_run_that_goes_on_and_one_that_starts_again(page, runs):
    full, _ = runs
    page.wait("document.querySelector('#runs').innerText.includes('step 599 of 1200')")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=200, y=400)  # and left there, over a chart
    page.wait("document.querySelector('figure svg:hover')")
    page.run("document.querySelectorAll('figure > svg')[1].focus()")
    full.step(STEPS, reward=0.0625)
    page.wait("document.querySelector('figure .readout').innerText.includes('0.0625')")
    assert page.run("[...document.querySelectorAll('figure > svg')].indexOf(document.activeElement)") == 1
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    with full.directory.metrics.open("a") as file:
        file.write('{"step": 601, "time": 1.0, "critic/re')
    full.resume_at(STEPS - 100)
    full.step(STEPS - 100, reward=0.5)
    page.wait("document.querySelector('#runs').innerText.includes('step 500 of 1200')")
    page.wait("document.querySelector('figure .readout').innerText.includes('full 0.5')")
    full.resume_at(0)
    for step in range(STEPS):
        full.step(step, alarm=step == 300)


@pytest.mark.parametrize("page", ["curves", "mismatch", "routes", "samples", "alarms", "log"], indirect=True)
def test_a_narrow_window_needs_no_sideways_scrolling(page):
    page.resize(360, 800)
    page.wait("document.querySelector('main').children.length")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


@view("curves")
def test_dark_and_light(page):
    grounds = []
    for scheme in ("dark", "light"):
        page.prefer(scheme)
        grounds.append(page.run("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(20, 23, 27)", "rgb(255, 255, 255)"]


@view("curves")
def test_the_page_says_when_nobody_answers(page):
    page.run("window.fetch = () => Promise.reject(new TypeError('gone')); console.error = () => null")
    page.wait("document.querySelector('#connection.lost')")
    assert "tunnel" in text(page, "#connection")
