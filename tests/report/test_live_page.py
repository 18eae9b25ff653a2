"""The live page in a real browser: it follows a run that is being written, and shows several together."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.gateway.http_guards import bind_socket
from burnish.report.live_server import PageServer, page_url
from burnish.report.run_list import RunList
from burnish.run.metrics import MetricsFile
from burnish.run.samples import write_samples
from burnish.run.supervisor.liveness import HEARTBEAT_FILE, Heartbeat
from tests.report.browser import Browser
from tests.report.scaling_folder import make_scaling

HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"
TOOL = '<tool_call>\n{"name": "search"}\n</tool_call> well'


def sample_row(index: int, **changes: Any) -> dict[str, Any]:
    texts = {"prompt": f"sort {index // 4}", "completion": f"answer {index}", "answer": "12", "parts": {"task": 1.0}}
    values = {"pieces": ["answer", f" {index}"], "logp": [-0.5, -2.0], "entropy": [0.2, 2.0], "mask": [1.0, 0.0]}
    numbers = {"reward": float(index % 2), "advantage": 0.5, "length": 2}
    return {"group": f"g{index // 4}", "sample": index % 4, "data_source": "x"} | texts | values | numbers | changes


class TrainingRun:
    """A run that a test writes, step by step."""

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        self.path, self.step = folder / name, 0
        self.path.mkdir()
        (self.path / "config.yaml").write_text(f"seed: {seed}\ntraining: {{steps: 300}}\n")
        self.beat = Heartbeat(self.path / HEARTBEAT_FILE)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step += 1
            values = {"reward/mean": self.step / 100, "time/step_s": 2.0, "odd/thing": 1.0}
            MetricsFile(self.path / "metrics.jsonl").append(self.step, dict(values))
        with open(self.path / "log.txt", "a") as log:
            log.write(f"2026-01-01 10:00:00  step {self.step}/300  reward 1\n")

    def say(self, line: str) -> None:
        with open(self.path / "log.txt", "a") as log:
            log.write(f"2026-01-01 10:00:00  {line}\n")

    def samples(self, rows: list[dict[str, Any]]) -> None:
        write_samples(self.path / "samples", self.step, "train", rows)


@pytest.fixture
def runs(tmp_path: Path) -> list[TrainingRun]:
    """Two runs that train; the first has four prompts of four samples."""
    (tmp_path / "runs").mkdir()
    made = [TrainingRun(tmp_path / "runs", name, seed) for seed, name in enumerate(("first", "second"))]
    for run in made:
        run.steps(10)
    made[0].samples([sample_row(k) for k in range(16)])
    return made


@pytest.fixture
def address(runs: list[TrainingRun]) -> Iterator[str]:
    bound = bind_socket("127.0.0.1", 0)
    server = PageServer(RunList([runs[0].path.parent]), lambda text: None, "ready")
    thread = threading.Thread(target=lambda: server.run([bound]))
    thread.start()
    yield page_url(bound)
    server.stop()
    thread.join()
    bound.close()


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.run(f"[...document.querySelectorAll('{selector}')].map((node) => node.textContent)")
    return found


def opened(browser: Browser, address: str, fragment: str = "#run=first") -> None:
    browser.open(address + fragment)
    browser.run("page.pollMs = 100")
    browser.wait("Number(document.body.dataset.loaded) >= 1")


def test_a_run_is_followed_while_it_is_written(browser: Browser, address: str, runs: list[TrainingRun]) -> None:
    opened(browser, address)
    browser.wait("byId('count').textContent.startsWith('16 of 16 samples')")
    first = runs[0]
    first.beat.beat(11, "rollout 3/8")
    first.steps(5)
    first.samples([sample_row(k, completion="later") for k in range(4)])
    first.say("step 15: a is 2; likely cause: it broke; try: mend it")
    browser.wait("byId('status').textContent.includes('step 15 of 300')")
    browser.wait("byId('status').textContent.includes('now: rollout 3/8')")
    assert "2 s a step" in browser.run("byId('status').textContent")
    assert "9m30s left" in browser.run("byId('status').textContent")
    browser.wait("byId('health').textContent.includes('it brokestep 15: a is 2Try: mend it')")
    browser.wait("page.boards.main.charts.get('Reward').lines[0].points.length === 15")
    browser.wait("byId('count').textContent.startsWith('20 of 20 samples')")
    browser.wait("document.querySelector('.row').textContent.endsWith('step 15 · trainanswer 0')")
    assert browser.run("page.boards.main.charts.get('Reward').svg.querySelectorAll('circle').length") == 15
    assert browser.problems == []


def test_what_a_reader_looks_at_stays_when_samples_come(
    browser: Browser, address: str, runs: list[TrainingRun]
) -> None:
    opened(browser, address)
    browser.wait("byId('count').textContent.startsWith('16 of 16 samples')")
    browser.run("byId('list').scrollTop = 5 * ROW; page.explorer.choose(5)")
    browser.wait("byId('detail').dataset.sample === '5'")
    top = "Math.floor(page.explorer.list.box.scrollTop / ROW)"
    before = browser.run(f"page.explorer.list.items[{top}]")
    runs[0].steps(1)
    runs[0].samples([sample_row(k) for k in range(8)])
    browser.wait("byId('count').textContent.startsWith('24 of 24 samples')")
    assert browser.run(f"page.explorer.list.items[{top}]") == before
    assert browser.run("byId('detail').dataset.sample") == "5"


def test_a_resumed_run_is_shown_as_it_is_now(browser: Browser, address: str, runs: list[TrainingRun]) -> None:
    opened(browser, address)
    browser.wait("page.boards.main.charts.get('Reward').lines[0].points.length === 10")
    MetricsFile(runs[0].path / "metrics.jsonl").truncate_after(4)
    runs[0].step = 4
    runs[0].steps(1)
    write_samples(runs[0].path / "samples", 10, "train", [sample_row(0, completion="repeated")])
    browser.wait("page.boards.main.charts.get('Reward').lines[0].points.length === 5")
    browser.wait("byId('count').textContent.startsWith('1 of 1 samples')")
    assert browser.problems == []


def test_runs_are_drawn_together_and_their_configs_compared(
    browser: Browser, address: str, runs: list[TrainingRun]
) -> None:
    opened(browser, address)
    assert texts(browser, "#run-list button") == ["first", "second"]
    assert texts(browser, "#run-list div") == ["running · 10/300 · reward 0.1"] * 2
    browser.run("document.querySelectorAll('#run-list input')[1].click()")
    browser.wait("page.boards.main.charts.get('Reward').lines.length === 2")
    assert browser.run("[...page.boards.main.charts.get('Reward').lines].map((line) => line.label)") == [
        "first",
        "second",
    ]
    assert texts(browser, "#run-legend span") == ["first", "second"]
    browser.wait("byId('config-diff').querySelector('table')")
    assert texts(browser, "#config-diff td") == ["seed", "0", "1"]
    assert browser.run("location.hash") == "#run=first&with=second"
    browser.run("document.querySelectorAll('#run-list button')[1].click()")
    browser.wait("byId('name').textContent === 'second' && byId('count').textContent.includes('no samples yet')")
    assert browser.run("page.compared") == ["first", "second"], "colours stay when another run is shown"
    browser.run("document.querySelectorAll('#run-list input')[0].click()")
    browser.wait("page.boards.main.charts.get('Reward').lines.length === 1")
    assert browser.problems == []


def test_a_new_run_joins_the_list_and_a_name_filters_it(
    browser: Browser, address: str, runs: list[TrainingRun]
) -> None:
    opened(browser, address)
    TrainingRun(runs[0].path.parent, "third", 3).steps(1)
    browser.wait("document.querySelectorAll('#run-list li').length === 3")
    browser.run("byId('runs-filter').value = 'TH'; byId('runs-filter').dispatchEvent(new Event('input'))")
    assert browser.run("[...document.querySelectorAll('#run-list li')].map((row) => row.hidden)") == [True, True, False]


def test_a_phone_shows_the_list_of_runs_without_scrolling_sideways(browser: Browser, address: str) -> None:
    browser.open(address + "#run=first&with=second", width=390, height=844, dark=True)
    browser.wait("Number(document.body.dataset.loaded) >= 1")
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.run("byId('runs').getBoundingClientRect().bottom <= byId('name').getBoundingClientRect().top")


def test_every_control_can_be_reached_and_has_a_name(browser: Browser, address: str) -> None:
    opened(browser, address)
    fields = "[...document.querySelectorAll('input, select, button, progress')]"
    named = "(node) => node.labels?.length || node.ariaLabel || node.textContent.trim()"
    assert browser.run(f"{fields}.filter((node) => !({named})(node)).map((node) => node.outerHTML)") == []
    browser.run("document.querySelector('#run-list button').focus()")
    browser.key("Tab")
    assert browser.run("document.activeElement.closest('#run-list') !== null"), "the next run's box"


def test_other_metrics_are_loaded_when_they_are_opened(browser: Browser, address: str) -> None:
    opened(browser, address)
    assert browser.run("page.boards.other.charts.size") == 0
    browser.run("byId('other').open = true; byId('other').scrollIntoView()")
    browser.wait("document.querySelectorAll('#other-charts polyline').length === 2")
    assert texts(browser, "#other-charts figcaption") == ["odd/thing", "time/step_s"]


def test_rollouts_are_shown_as_they_are_scored(browser: Browser, address: str, runs: list[TrainingRun]) -> None:
    opened(browser, address)
    assert browser.run("byId('scored').hidden")
    row = {"step": 11, "group": "p#0", "prompt": HOSTILE, "turns": None, "finish": "stop", "length": 3, "error": None}
    rollouts = [row | {"sample": k, "reward": k, "completion": f"try {k} {HOSTILE}"} for k in range(2)]
    said = [{"who": "model", "text": TOOL, "reward": 1.0}, {"who": "environment", "text": "found"}]
    rollouts.append(row | {"sample": 0, "group": "q#0", "reward": None, "completion": "", "turns": said})
    (runs[0].path / "scored.json").write_text(json.dumps({"rollouts": rollouts}))
    browser.wait("!byId('scored').hidden && document.querySelectorAll('.scored details').length === 2")
    assert texts(browser, ".scored-title") == ["Scored just now3 rollouts of step 11, newest first"]
    assert texts(browser, ".scored summary b") == ["none", "0.5"]
    browser.run("for (const row of document.querySelectorAll('.scored summary')) row.click()")
    browser.wait("document.querySelectorAll('.scored .card').length === 3")
    assert texts(browser, ".scored .call") == ['tool call{"name": "search"}']
    assert f"try 0 {HOSTILE}" in texts(browser, ".scored .card pre")
    rollouts[0]["completion"] = "newer"
    (runs[0].path / "scored.json").write_text(json.dumps({"rollouts": rollouts}))
    browser.wait("[...document.querySelectorAll('.scored .card pre')].some((node) => node.textContent === 'newer')")
    assert browser.run("window.broken === undefined && document.images.length === 0")
    assert browser.problems == []


def test_measurements_of_scaling_are_drawn_with_their_run_and_linked(
    browser: Browser, address: str, runs: list[TrainingRun]
) -> None:
    opened(browser, address)
    assert browser.run("byId('scaling').hidden && byId('scaling-links').hidden")
    make_scaling(runs[0].path / "scaling-toy", HOSTILE)
    make_scaling(runs[0].path.parent / "scaling-other")
    browser.wait("!byId('scaling').hidden && document.querySelectorAll('#scaling-list a').length === 2")
    assert texts(browser, "#scaling-list a") == ["first/scaling-toy", "scaling-other"]
    assert texts(browser, "#scaling-parts figcaption") == [f"{HOSTILE}, 5 questions, <m>"]
    assert "majority" in texts(browser, "#scaling-parts td")
    browser.wait("document.querySelector('#scaling-parts img').naturalWidth === 40")
    assert browser.run("window.broken === undefined")
    assert browser.problems == []


def test_a_config_that_comes_late_is_drawn_when_it_comes(browser: Browser, address: str) -> None:
    opened(browser, address)
    browser.run(
        "page.late = new Promise((resolve) => (page.release = resolve)); page.now = page.source.json.bind(page.source); 0"
    )
    browser.run(
        "page.source.json = async (path) => { if (path === 'runs/second/config') await page.late; return page.now(path); }; 0"
    )
    browser.run("document.querySelectorAll('#run-list input')[1].click()")
    loaded = browser.run("Number(document.body.dataset.loaded)")
    browser.run("page.load(); 0")  # as a look at the list of runs does, while the config is on its way
    browser.wait(f"Number(document.body.dataset.loaded) > {loaded}")
    browser.run("page.release(); 0")
    browser.wait("byId('config-diff').querySelector('table')")


def test_text_of_a_model_is_never_markup(browser: Browser, address: str, runs: list[TrainingRun]) -> None:
    hostile = sample_row(0, completion=HOSTILE, pieces=[HOSTILE[:9], HOSTILE[9:]], prompt=HOSTILE, group=HOSTILE)
    runs[1].samples([hostile | {"error": HOSTILE, "answer": HOSTILE, "parts": {HOSTILE: 1.0}, "finish": HOSTILE}])
    runs[1].say(f"step 1: {HOSTILE}; likely cause: {HOSTILE}; try: {HOSTILE}")
    (runs[1].path / "config.yaml").write_text(f"seed: {json.dumps(HOSTILE)}\n")
    MetricsFile(runs[1].path / "metrics.jsonl").append(11, {f"reward/{HOSTILE}": 1.0, HOSTILE: 1.0})
    opened(browser, address, "#run=second&with=first")
    browser.wait("document.querySelector('.tokens span')")
    browser.wait(
        "byId('health').textContent.includes('onerror') && byId('config-diff').textContent.includes('onerror')"
    )
    assert browser.run("document.querySelector('.tokens').textContent") == HOSTILE
    assert browser.run("window.broken === undefined && document.images.length === 0")
    assert browser.run("document.scripts.length") == 1
    assert browser.problems == []


def test_a_search_finds_what_the_server_finds_and_new_samples_too(
    browser: Browser, address: str, runs: list[TrainingRun]
) -> None:
    opened(browser, address)
    browser.wait("byId('count').textContent.startsWith('16 of 16 samples')")
    browser.run("byId('search').value = 'ANSWER 1'; byId('search').dispatchEvent(new Event('input'))")
    browser.wait("byId('count').textContent.startsWith('7 of 16 samples')")
    assert texts(browser, ".row mark") == ["answer 1"] * 7
    runs[0].steps(1)
    runs[0].samples([sample_row(1), sample_row(2)])
    browser.wait("byId('count').textContent.startsWith('8 of 18 samples')")


def test_tokens_are_coloured_by_entropy_and_mask(browser: Browser, address: str) -> None:
    opened(browser, address)
    browser.wait("document.querySelectorAll('.tokens span').length === 2")
    colours = "[...document.querySelectorAll('.tokens span')].map((span) => getComputedStyle(span).backgroundColor)"
    for kind, label in (("entropy", "entropy:"), ("mask", "loss mask:")):
        browser.run(f"byId('colour').value = '{kind}'; byId('colour').dispatchEvent(new Event('input'))")
        browser.wait(f"document.querySelector('.scale').textContent.startsWith('{label}')")
        first, second = browser.run(colours)
        assert first != second
    assert first.startswith("rgba(38, 110, 214")
    assert second.startswith("rgba(222, 84, 36")
    browser.run("document.querySelector('.tokens').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert "entropy ≈2" in browser.run("document.querySelector('.readout').textContent")
    assert browser.run("document.querySelector('.readout').textContent").endswith("not in the loss")


def test_a_page_whose_server_has_ended_says_so(browser: Browser, runs: list[TrainingRun]) -> None:
    bound = bind_socket("127.0.0.1", 0)
    server = PageServer(RunList([runs[0].path.parent]), lambda text: None, "ready")
    thread = threading.Thread(target=lambda: server.run([bound]))
    thread.start()
    opened(browser, page_url(bound))
    server.stop()
    thread.join()
    bound.close()
    browser.wait("byId('connection').textContent === 'no answer: has burnish view ended?'")
    assert texts(browser, "#name") == ["first"], "what was shown stays"
