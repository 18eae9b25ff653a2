"""report.html: right numbers, nothing from a completion becomes markup, nothing from the network, never large."""

from __future__ import annotations

import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.report.curves import axis_range, axis_ticks
from burnish.report.html_report import SCRIPTS, events_section, page_script, static_file, write_report
from burnish.report.mismatch_charts import visible_text
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.checkpoint.snapshot import BytesFile, Snapshot
from burnish.run.metrics import MetricsFile
from burnish.run.samples import EventExamplesFile, WorstTokensFile, write_samples

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "\"'><svg onload=alert(1)>",
    "&lt;b&gt; &amp;",
    "\u2028\x00\x1b[31m",
]


def row(index: int, text: str, **changes: Any) -> dict[str, Any]:
    return {
        "group": f"g{index // 2}",
        "sample": index % 2,
        "data_source": text,
        "prompt": text,
        "completion": text,
        "answer": text,
        "reward": 1.0,
        "accuracy": None,
        "parts": {text: 1.0},
        "advantage": 0.5,
        "truncated": False,
        "length": len(text),
        "pieces": list(text),
        "logp": [-0.5] * len(text),
        "error": text,
    } | changes


def make_run(folder: Path, text: str = "plain", rows: int = 4) -> Path:
    run = folder / "run-1"
    run.mkdir()
    (run / "config.yaml").write_text(f"seed: 0\nname: {json.dumps(text)}\n")
    (run / "log.txt").write_text(f"2026-01-01 10:00:00  note {text}\n2026-01-01 10:00:01  step 1/2  reward 0.5\n")
    metrics = MetricsFile(run / "metrics.jsonl")
    metrics.append(0, {"validation/greedy/accuracy": 0.402, "validation/greedy/accuracy/length=4": 0.8})
    metrics.append(1, {"reward/mean": 0.25, "time/step_s": 30.0, f"odd/{text}": 1.0})
    metrics.append(
        2,
        {
            "reward/mean": 0.5,
            "time/step_s": 60.5,
            "validation/greedy/accuracy": 0.995,
            "validation/greedy/accuracy/length=4": 1.0,
        },
    )
    write_samples(run / "samples", 2, "train", [row(i, text) for i in range(rows)])
    worst = {
        "sample": 0,
        "position": 1,
        "token": 5,
        "behaviour_logp": -1.0,
        "trainer_logp": -1.5,
        "gap": -0.5,
        "weight": None,
    }
    worst |= dict.fromkeys(("group", "before", "text", "after"), text)
    WorstTokensFile(run / "samples" / "worst_tokens.jsonl").append(2, [worst])
    event = dict.fromkeys(("sample", "kind", "what", "message", "traceback"), text)
    EventExamplesFile(run / "samples" / "events.jsonl").append(2, [event])
    return run


class Elements(HTMLParser):
    """Every tag with its attributes' names, every script's text, all other text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.values: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.values += [value or "" for _, value in attrs]
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.text += data


def parse(run: Path) -> Elements:
    return Elements(write_report(run).read_text())


def test_the_headline_shows_before_and_after_steps_and_time(tmp_path: Path) -> None:
    text = parse(make_run(tmp_path)).text
    assert "held-out accuracy, greedy0.402 → 0.995step 0 → step 2" in text
    assert "mean reward0.250 → 0.500" in text
    assert "steps2" in text
    assert "time in steps1m30s" in text
    assert "greedylength=40.800 (step 0)1.000 (step 2)" in text.replace("\n", "")


def test_a_graded_run_is_told_by_its_mean_reward_and_the_metric_of_its_best_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "metrics.jsonl").unlink()
    metrics = MetricsFile(run / "metrics.jsonl")
    name = "validation/greedy/reward_mean"
    for step, value in ((0, 1.0), (1, 6.5), (2, 4.0)):
        metrics.append(step, {name: value, f"{name}/kind=a": value} | ({"reward/mean": value} if step else {}))
    checkpoints = Checkpoints(run / "checkpoints", keep_last=3)
    for step, score in ((1, 6.5), (2, 4.0)):
        checkpoints.write(step, Snapshot([BytesFile("w", "w")]), score, name)
    page = parse(run)
    assert "held-out reward, greedy1.000 → 4.000step 0 → step 2" in page.text
    assert f"best checkpointstep 1by {name} 6.500" in page.text
    assert "greedykind=a1.000 (step 0)4.000 (step 2)" in page.text
    assert "accuracy" not in page.text
    titles = [label for label in page.values if label in ("Held-out reward", "Held-out accuracy", "Reward")]
    assert titles == ["Reward", "Held-out reward"]


def test_the_script_has_more_points_to_zoom_into_than_are_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    rows = [{"step": step, "reward/mean": step % 7, "odd/a": 1.0} for step in range(1, 3001)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = parse(run)
    charts = {next(iter(chart["series"])): chart for chart in json.loads(page.scripts[0])}
    assert 1000 < len(charts["reward/mean"]["series"]["reward/mean"]) <= 2002
    drawn = max((value.split(" ") for value in page.values), key=len)
    assert len(drawn) <= 402


def test_the_parts_that_links_lead_to_and_the_controls_of_the_curves_are_there(tmp_path: Path) -> None:
    page = parse(make_run(tmp_path))
    links = {value[1:] for value in page.values if re.fullmatch("#[a-z]+", value)}
    assert {"overview", "curves", "samples", "notes", "config"} <= links
    assert links <= set(page.values), "each link has the section of its name"
    assert {"smoothing", "log-scale", "zoom-low", "zoom-high", "zoom-in", "zoom-out"} <= set(page.values)
    content = write_report(tmp_path / "run-1").read_text()
    assert '<section id="config"><details>' in content, "what the script unfolds when its link is used"


def test_config_and_notes_are_in_the_page_and_step_lines_are_not(tmp_path: Path) -> None:
    text = parse(make_run(tmp_path)).text
    assert "seed: 0" in text
    assert "note plain" in text
    assert "step 1/2  reward" not in text


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_of_a_run_becomes_markup(tmp_path: Path, hostile: str) -> None:
    plain = parse(make_run(tmp_path))
    (tmp_path / "other").mkdir()
    page = parse(make_run(tmp_path / "other", hostile))
    assert page.tags == plain.tags
    assert len(page.scripts) == 5, "charts, an index, a block of texts and one of tokens, the script"
    assert page.scripts[-1] == page_script()
    for block in page.scripts[1:-1]:
        assert re.fullmatch(r"[A-Za-z0-9+/=]+", block)
    json.loads(page.scripts[0])
    assert page.text.count(visible_text(hostile)) >= 3, "before, in and after the worst token"


def test_the_script_never_parses_text_as_markup_or_code() -> None:
    dangerous = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|setAttribute\(\"on|srcdoc"
    assert not re.search(dangerous, page_script())
    assert "<" not in re.sub(
        r" <=? ", "", page_script()
    )  # `</script` or `<!--` in a string would end or garble the block


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = parse(make_run(tmp_path))
    assert not {name for _, names in page.tags for name in names} & {"src", "srcset", "action", "data", "poster"}
    assert all(tag == "a" for tag, names in page.tags if "href" in names)
    assert re.findall(r'href="(?!#)', write_report(tmp_path / "run-1").read_text()) == []
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "img", "iframe", "object", "embed", "base"})
    content = write_report(tmp_path / "run-1").read_text()
    assert "default-src 'none'" in content
    assert not re.search(r"https?://|url\(|@import", content)


def test_the_policy_names_the_hash_of_the_script(tmp_path: Path) -> None:
    import base64
    import hashlib

    content = write_report(make_run(tmp_path)).read_text()
    script = content[content.rindex("<script>") + 8 : content.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in content


def test_a_run_without_samples_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "samples" / "train-000002.parquet").unlink()
    assert "no samples yet" in parse(run).text


def test_a_folder_that_is_no_run_and_a_run_without_metrics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.yaml"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(UserError, match="has no lines: the run has not finished a step yet"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.0, 150.0, [0.0, 50.0, 100.0, 150.0]),
        (3.0, 3.0, [3.0]),
        (-2.0, 2.0, [-2.0, -1.0, 0.0, 1.0, 2.0]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert axis_ticks(low, high) == pytest.approx(expected)


def test_constant_values_still_have_a_range_to_draw() -> None:
    assert axis_range([2.0, 2.0]) == pytest.approx((1.8, 2.2))
    assert axis_range([0.0]) == (-1.0, 1.0)
    assert axis_range([1.0, 3.0]) == (1.0, 3.0)


def test_the_health_lines_stand_first_with_what_to_try(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "nothing left its healthy range" in parse(run).text
    line = "step 7: a/b is 2 (healthy 0 to 1); likely cause: <b>it broke</b>; try: mend it"
    (run / "log.txt").write_text(f"2026-01-01 10:00:00  {line}\n")
    assert "Health: 1 to look at<b>it broke</b>step 7: a/b is 2 (healthy 0 to 1)Try: mend it" in parse(run).text


def test_the_files_of_the_page_are_there_and_small_and_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["burnish.report"] == ["static/*"]
    for name in (*SCRIPTS, "style.css", "samples.html"):
        assert 20 <= len(static_file(name).splitlines()) <= 300, name


def test_events_are_counted_over_training_and_validation_and_have_their_traceback(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert events_section(path, []) == ""
    example = {"sample": "p#0.1", "kind": "tool_raised", "what": "search", "message": "a<b", "traceback": "line 7"}
    EventExamplesFile(path).append(3, [example])
    rows = [
        {"environment/tool_raised": 2.0, "environment/tool_raised_mean": 9.0},
        {"validation/greedy/environment/tool_raised": 1.0},
    ]
    markup = events_section(path, rows)
    assert "<td>tool_raised</td><td>3</td><td>step 3, p#0.1, search</td><td>a&lt;b<details>" in markup
    assert '<pre class="text">line 7</pre>' in markup
