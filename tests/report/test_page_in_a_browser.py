"""The page in a real browser: what a person sees after it opens, after a search, a filter, a colour and a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.core.pictures import Picture
from burnish.report.html_report import write_report
from burnish.run.metrics import MetricsFile
from burnish.run.picture_files import picture_mark
from burnish.run.samples import write_samples
from tests.report.browser import Browser

HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u202egnp.exe \x1b[31m \u05e9\u05dc\u05d5\u05dd 你好 &lt;b&gt;"
STEPS, GROUPS, SAMPLES = (10, 20, 30, 40, 50), 100, 4


def row(step: int, index: int, noise: np.random.Generator) -> dict[str, Any]:
    """Every eighth is right; every hundredth has something to look for; every fifth was cut."""
    pieces = [f"word{k % 7} " for k in range(60)]
    if index % 100 == 7:
        pieces[30] = "Needle "
    if (step, index) == (50, 0):
        pieces[3:3] = [HOSTILE[:9], HOSTILE[9:]]
    reward = float(index % 8 == 0)
    return {
        "group": f"q{index // SAMPLES}#0",
        "sample": index % SAMPLES,
        "data_source": "words",
        "prompt": f"say words, number {index // SAMPLES} of step {step}",
        "completion": "".join(pieces),
        "answer": "word",
        "reward": reward,
        "accuracy": reward,
        "parts": {"task": reward, HOSTILE: 1.0},
        "advantage": 3 * reward - 1,
        "truncated": index % 5 == 0,
        "finish": "length" if index % 5 == 0 else "stop",
        "length": len(pieces),
        "pieces": pieces,
        "logp": (-noise.exponential(1.0, len(pieces))).tolist(),
        "advantages": noise.normal(0, 1, len(pieces)).tolist() if index % 2 else None,
        "gap": noise.normal(0, 0.01, len(pieces)).tolist(),
    } | (EPISODE if (step, index) == (40, 9) else SEEN if (step, index) == (20, 12) else {})


SAID = [
    {"who": "model", "text": "word5", "state": "3-9", "reward": 0.5},
    {"who": "environment", "text": "<b>6-9?</b>"},
    {"who": "model", "text": "word8", "state": "6-9", "reward": 0.0},
    {"who": "environment", "text": "word8 was wrong", "branch": 2, "after": 1},
    {"who": "model", "text": "word7", "state": "# #\n# #", "reward": 1.0},
    {"who": "environment", "text": "begin anew", "branch": 3, "after": None},
]
EVENT = {"kind": "tool_raised", "what": "search", "message": "no <i>index</i>", "traceback": "line 7\nKeyError"}
EPISODE = {"turns": json.dumps(SAID), "role": "white", "last_words": "you lost", "events": json.dumps([EVENT])}

BOARD = Picture(np.arange(2 * 16 * 8 * 3, dtype=np.uint8).reshape(2, 16, 8, 3), (2, 1, 1), 0.5)
SEEN = {
    "prompt": f"before {picture_mark(BOARD.key)} behind {picture_mark(7)}",
    "turns": json.dumps([{"who": "model", "text": "crop"}, {"who": "environment", "text": f"<tool_response>{picture_mark(BOARD.key)}</tool_response>"}]),
    "pictures": [BOARD],
}  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with two thousand samples."""
    run = tmp_path_factory.mktemp("page") / "a-run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "log.txt").write_text("2026-01-01 10:00:00  words\n")
    metrics = MetricsFile(run / "metrics.jsonl")
    lines = [{"step": s, "reward/mean": s / 50, "actor/entropy": 1 / s} for s in range(1, 51)]
    metrics.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    noise = np.random.default_rng(0)
    for step in STEPS:
        rows = [row(step, index, noise) for index in range(GROUPS * SAMPLES)]
        write_samples(run / "samples", step, "validation-greedy" if step == 30 else "train", rows)
    return write_report(run)


def opened(browser: Browser, page: Path, **options: Any) -> None:
    browser.open(page, **options)
    browser.wait("document.body.dataset.loaded === '1' && byId('detail').dataset.sample")


def enter(browser: Browser, **fields: str) -> str:
    """Fill fields in, wait for what they find, and return the line that counts it."""
    before = int(browser.run("document.body.dataset.settled"))
    for name, value in fields.items():
        place = f"byId('{name.replace('_', '-')}')"
        browser.run(
            f"{place}.value = {json.dumps(value)}; {place}.dispatchEvent(new Event('input', {{bubbles: true}}))"
        )
    browser.wait(f"Number(document.body.dataset.settled) > {before}")
    return str(browser.run("byId('count').textContent"))


def is_blank(path: Path) -> bool:
    """Whether a picture is nearly all of one colour."""
    from matplotlib.image import imread

    pixels = (imread(path)[..., :3] * 255).astype(int).reshape(-1, 3)
    _, counts = np.unique(pixels, axis=0, return_counts=True)
    return len(counts) < 50 or counts.max() > 0.97 * len(pixels)


def test_it_opens_with_all_samples_and_draws_only_the_rows_in_sight(
    browser: Browser, page: Path, tmp_path: Path
) -> None:
    opened(browser, page)
    assert browser.run("byId('count').textContent").startswith(
        "2,000 of 2,000 samples · 500 prompts · mean reward 0.125"
    )
    assert 5 <= browser.run("document.querySelectorAll('.row').length") <= 40
    browser.run("byId('list').scrollTop = 1e9")
    browser.wait("document.querySelector('[aria-posinset=\"2000\"]')")
    assert browser.run("document.querySelectorAll('.row').length") <= 40
    browser.wait("[...document.querySelectorAll('.row')].every((row) => row.textContent.includes('word'))")
    browser.screenshot(tmp_path / "page.png")
    assert not is_blank(tmp_path / "page.png")
    assert browser.problems == []


def test_a_search_finds_words_in_any_completion_and_marks_them(browser: Browser, page: Path) -> None:
    opened(browser, page)
    assert enter(browser, search="needle").startswith("20 of 2,000 samples")
    assert browser.run("document.querySelectorAll('.row').length") >= 5
    browser.wait("document.querySelector('.row mark')")
    assert browser.run("document.querySelector('.row mark').textContent") == "Needle"
    browser.wait("document.querySelector('.tokens .hit')")
    assert browser.run("document.querySelector('.tokens .hit').textContent") == "Needle "
    assert enter(browser, search="number 17 of step 40").startswith("4 of 2,000 samples")
    assert enter(browser, search="(.*").startswith("0 of 2,000 samples")
    assert "No sample" in browser.run("byId('detail').textContent")
    assert enter(browser, search="").startswith("2,000 of")
    assert browser.problems == []


def test_filters_by_reward_step_ending_and_stream_work_together(browser: Browser, page: Path) -> None:
    opened(browser, page)
    assert enter(browser, reward_low="0.5").startswith("250 of 2,000 samples · 250 prompts · mean reward 1 ")
    assert enter(browser, step_low="20", step_high="30").startswith("100 of")
    assert enter(browser, right="0").startswith("0 of")
    assert enter(browser, right="1").startswith("100 of")
    assert enter(browser, kind="1").startswith("50 of")
    assert enter(browser, finish="0").startswith("10 of")
    assert enter(browser, search="needle").startswith("0 of")
    browser.run("document.querySelector('#filters button[type=reset]').click()")
    browser.wait("byId('count').textContent.startsWith('2,000 of')")
    enter(browser, order="worst")
    assert browser.run("document.querySelector('.row .chip').textContent") == "0"
    enter(browser, order="best")
    assert browser.run("document.querySelector('.row .chip').textContent") == "1"


def colours(browser: Browser, kind: str) -> list[str]:
    browser.run(f"byId('colour').value = '{kind}'; byId('colour').dispatchEvent(new Event('input'))")
    label = {"logp": "log-prob:", "advantage": "advantage:", "gap": "mismatch:", "none": ""}[kind]
    browser.wait(f"document.querySelector('.scale').textContent.startsWith('{label}')")
    script = "[...document.querySelectorAll('.tokens span')].map((span) => getComputedStyle(span).backgroundColor)"
    found: list[str] = browser.run(script)
    return found


def test_tokens_are_coloured_by_log_prob_advantage_and_mismatch(browser: Browser, page: Path) -> None:
    opened(browser, page)
    enter(browser, search="needle")
    browser.wait("document.querySelectorAll('.tokens span').length === 60")
    logp, advantage, gap = (colours(browser, kind) for kind in ("logp", "advantage", "gap"))
    for seen in (logp, advantage, gap):
        assert len(set(seen)) > 10
    warm = {colour.split("(")[1].split(",")[0] for colour in logp if colour != "rgba(0, 0, 0, 0)"}
    both = {colour.split("(")[1].split(",")[0] for colour in gap if colour != "rgba(0, 0, 0, 0)"}
    assert warm == {"222"}
    assert both == {"222", "38"}
    browser.run("byId('colour').value = 'none'; byId('colour').dispatchEvent(new Event('input'))")
    browser.wait("document.querySelector('.scale').textContent === ''")
    assert browser.run("[...document.querySelectorAll('.tokens span')].every((span) => !span.style.backgroundColor)")


def test_keys_move_through_samples_and_tokens(browser: Browser, page: Path) -> None:
    opened(browser, page)
    browser.run("byId('list').focus()")
    first = int(browser.run("byId('detail').dataset.sample"))
    for _ in range(3):
        browser.key("ArrowDown")
    browser.wait(f"byId('detail').dataset.sample === '{first + 3}'")
    assert browser.run(
        "document.querySelector('[aria-selected=true]').id === byId('list').getAttribute('aria-activedescendant')"
    )
    browser.key("End")
    browser.wait("document.querySelector('[aria-selected=true]').getAttribute('aria-posinset') === '2000'")
    browser.wait("byId('detail').dataset.sample === '399'")
    browser.run("document.querySelector('.tokens').focus()")
    for _ in range(2):
        browser.key("ArrowRight")
    readout = browser.run("document.querySelector('.readout').textContent")
    assert readout.startswith('token 2 · "word1 " · log-prob ≈-')
    assert "trainer less sampler" in readout
    browser.run("document.querySelector('figure.chart').focus()")
    browser.key("End")
    assert browser.run("document.querySelector('figure.chart output').textContent") == "step 50: 1"


OUTPUTS = "[...document.querySelectorAll('#curves output')].map((node) => node.textContent)"


def mouse(browser: Browser, kind: str, share: float, **options: Any) -> None:
    """Move or press the mouse over the first chart, at a share of its width."""
    place = browser.run("document.querySelector('figure.chart svg').getBoundingClientRect().toJSON()")
    x, y = place["left"] + share * place["width"], place["top"] + place["height"] / 2
    browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)


def line(browser: Browser, kind: str) -> list[list[float]]:
    """The corners of a line of the first chart."""
    points = browser.run(f"document.querySelector('figure.chart {kind}').getAttribute('points')")
    return [[float(number) for number in point.split(",")] for point in points.split()]


def test_one_cursor_stands_in_all_charts_of_steps(browser: Browser, page: Path) -> None:
    opened(browser, page)
    mouse(browser, "mouseMoved", 0.5)
    browser.wait(f"{OUTPUTS}.every((text) => text.startsWith('step 2'))")
    steps = browser.run(f"{OUTPUTS}.map((text) => text.split(':')[0])")
    assert len(steps) == 2
    assert len(set(steps)) == 1
    places = browser.run("[...document.querySelectorAll('#curves .cursor')].map((node) => node.getAttribute('x1'))")
    assert len(set(places)) == 1, "both charts have the same steps, so the same place"
    assert float(places[0]) > 62
    assert browser.problems == []


def test_dragging_zooms_all_charts_and_a_double_click_shows_all_steps_again(browser: Browser, page: Path) -> None:
    opened(browser, page)
    button = {"button": "left", "buttons": 1, "clickCount": 1}
    mouse(browser, "mousePressed", 0.5, **button)
    for share in (0.55, 0.6, 0.7, 0.75):
        mouse(browser, "mouseMoved", share, **button)
    browser.wait("document.querySelector('figure.chart rect.selected')")
    mouse(browser, "mouseReleased", 0.75, **button)
    browser.wait("byId('zoom-low').value && byId('zoom-high').value && !document.querySelector('rect.selected')")
    low, high = browser.run("[Number(byId('zoom-low').value), Number(byId('zoom-high').value)]")
    assert 15 < low < 30 < high < 45
    browser.wait("document.querySelectorAll('figure.chart polyline')[0].getAttribute('points').split(' ').length < 30")
    assert browser.run("ofSteps.every((chart) => chart.range[0] === look.low && chart.range[1] === look.high)")
    browser.run("document.querySelector('figure.chart').focus()")
    browser.key("-")
    browser.wait(f"Number(byId('zoom-low').value) < {low}")
    browser.run("document.querySelector('figure.chart svg').dispatchEvent(new MouseEvent('dblclick'))")
    browser.wait("byId('zoom-low').value === '' && look.low === -Infinity")
    browser.wait("document.querySelector('figure.chart polyline').getAttribute('points').split(' ').length === 50")
    assert browser.problems == []


def test_curves_are_smoothed_and_drawn_on_a_logarithmic_scale_and_reset(browser: Browser, page: Path) -> None:
    opened(browser, page)
    before = line(browser, "polyline")
    browser.run("byId('smoothing').value = 0.9; byId('smoothing').dispatchEvent(new Event('input'))")
    browser.wait("document.querySelectorAll('figure.chart')[0].querySelectorAll('polyline').length === 2")
    assert line(browser, "polyline.faint") == before, "the measured line stays, in the background"
    assert line(browser, "polyline:not(.faint)")[-1][1] > before[-1][1], "a rising line lies above its average"
    assert browser.run("byId('smoothing-value').textContent") == "0.9"
    browser.run("byId('log-scale').click()")
    browser.wait("document.querySelector('figure.chart .tick').textContent === '0.02'")
    browser.run("document.querySelector('#controls button[type=reset]').click()")
    browser.wait("document.querySelectorAll('figure.chart')[0].querySelectorAll('polyline').length === 1")
    assert line(browser, "polyline") == before
    assert browser.problems == []


def test_the_link_to_the_config_opens_it(browser: Browser, page: Path) -> None:
    opened(browser, page)
    assert not browser.run("document.querySelector('#config details').open")
    browser.run("document.querySelector('nav a[href=\"#config\"]').click()")
    assert browser.run("document.querySelector('#config details').open")


def test_a_group_is_shown_side_by_side(browser: Browser, page: Path) -> None:
    opened(browser, page)
    browser.run("document.querySelectorAll('.toggle button')[1].click()")
    browser.wait("document.querySelectorAll('.card').length === 4")
    assert browser.run("document.querySelectorAll('.card.chosen').length") == 1
    tops = browser.run("[...document.querySelectorAll('.card')].map((card) => card.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    rewards = browser.run("[...document.querySelectorAll('.card .reward')].map((chip) => chip.textContent)")
    assert rewards == ["reward 1", "reward 0", "reward 0", "reward 0"]
    assert enter(browser, unit="groups").startswith("2,000 of")
    assert browser.run("document.querySelector('.row').querySelectorAll('.dot-reward').length") == 4
    assert browser.run("document.querySelector('.row').getAttribute('aria-setsize')") == "500"


def test_turns_show_who_said_what(browser: Browser, page: Path) -> None:
    opened(browser, page)
    assert enter(browser, search="number 2 of step 40").startswith("4 of 2,000 samples")
    assert browser.run("document.querySelectorAll('.entry').length") == 0
    browser.run("document.querySelectorAll('.toggle button')[1].click()")
    browser.wait("document.querySelectorAll('.entry').length === 6")

    def shown(selector: str) -> Any:
        return browser.run(f"[...document.querySelectorAll('{selector}')].map((node) => node.textContent)")

    assert shown(".spoken .said b") == ["turn 1", "turn 2", "turn 3"]
    assert shown(".spoken > pre") == ["word5", "word8", "word7"]
    assert shown(".spoken .said .dim") == ["state 3-9", "state 6-9"]
    assert shown(".spoken details pre") == ["# #\n# #"]
    assert shown(".spoken .reward") == ["reward 0.5", "reward 0", "reward 1"]
    assert shown(".entry.heard pre") == ["<b>6-9?</b>", "word8 was wrong", "begin anew"]
    assert shown(".branch") == ["branch 2 continues after turn 1", "branch 3: a new conversation"]
    assert shown("pre.heard") == ["you lost"]
    assert shown(".events .said") == ["tool_raisedsearch"]
    assert shown(".events pre") == ["no <i>index</i>", "line 7\nKeyError"]
    assert "role white" in shown(".chip")
    assert browser.problems == []
    assert enter(browser, search="KeyError").startswith("1 of 2,000 samples")


def test_an_episode_looks_like_a_conversation(browser: Browser, page: Path, tmp_path: Path) -> None:
    opened(browser, page)
    enter(browser, search="word8 was wrong")
    browser.wait("document.querySelector('.entry')")
    sides = "[...document.querySelectorAll('.entry')].map((node) => getComputedStyle(node).alignSelf)"
    assert browser.run(sides) == ["flex-start", "flex-end", "flex-start", "flex-end", "flex-start", "flex-end"]
    browser.screenshot(tmp_path / "episode.png")
    assert not is_blank(tmp_path / "episode.png")


def test_images_stand_where_the_model_saw_them(browser: Browser, page: Path) -> None:
    opened(browser, page)
    enter(browser, search=picture_mark(BOARD.key))
    browser.wait("[...document.querySelectorAll('img.picture')].filter((one) => one.naturalWidth).length === 2")
    assert browser.run("[...document.querySelectorAll('img.picture')].map((one) => one.naturalWidth)") == [16, 16]
    assert browser.run("document.querySelector('.call img') !== null")
    around = "[...document.querySelector('.prompt').children].map((one) => one.textContent)"
    assert browser.run(around) == ["prompt", "before ", "", f" behind {picture_mark(7)}"], "an unknown one is text"
    assert browser.problems == []


def test_hostile_text_is_text(browser: Browser, page: Path) -> None:
    opened(browser, page)
    enter(browser, search="onerror=alert")
    browser.wait("document.querySelector('.tokens .hit')")
    shown = browser.run("document.querySelector('.tokens').textContent")
    assert "</script><img src=x onerror=alert(1)><!-- ⟨202E⟩gnp.exe ␛[31m שלום 你好 &lt;b&gt;" in shown
    assert browser.run("document.images.length + document.querySelectorAll('iframe, object, link').length") == 0
    assert browser.problems == []


def test_a_phone_in_the_dark_shows_everything_without_scrolling_sideways(
    browser: Browser, page: Path, tmp_path: Path
) -> None:
    opened(browser, page, width=390, height=844, dark=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(18, 21, 26)"
    assert browser.run("byId('detail').getBoundingClientRect().top >= byId('list').getBoundingClientRect().bottom")
    browser.screenshot(tmp_path / "phone.png")
    assert not is_blank(tmp_path / "phone.png")


def test_every_field_has_a_label(browser: Browser, page: Path) -> None:
    opened(browser, page)
    unnamed = "[...document.querySelectorAll('input, select')].filter((field) => !field.labels.length).map((field) => field.id)"
    assert browser.run(unnamed) == []
    unnamed = (
        "[...document.querySelectorAll('[role=listbox], [role=img], nav, #detail')].filter((node) => !node.ariaLabel)"
    )
    assert browser.run(f"{unnamed}.length") == 0
