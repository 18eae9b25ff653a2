"""report.html: right numbers, nothing from a completion becomes markup, nothing from the network, never large."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.report.html_report import SCRIPTS, live_document, page_script, static_file, write_report
from burnish.report.page_data import RunData
from burnish.run.metrics import MetricsFile
from burnish.run.samples import EventExamplesFile, WorstTokensFile, write_samples
from tests.report.scaling_folder import CHART, make_scaling

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


def embedded(run: Path) -> dict[str, Any]:
    """The answers inside a report, by path."""
    blocks = re.findall(r'data-path="([^"]+)">([A-Za-z0-9+/=]+)</script>', write_report(run).read_text())
    inflated = {path: zlib.decompress(base64.b64decode(letters)) for path, letters in blocks}
    return {path: json.loads(data) for path, data in inflated.items() if "/tokens/" not in path}


def test_a_report_holds_the_answers_of_the_live_page(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answers, live = embedded(run), RunData("run", run)
    assert list(answers) == [
        "runs",
        "runs/run",
        "runs/run/metrics/main",
        "runs/run/metrics/other",
        "runs/run/config",
        "runs/run/samples",
        "runs/run/texts/0",
    ]
    assert answers["runs/run"] == live.overview()
    assert answers["runs/run/metrics/main"] == live.metrics("main")
    assert answers["runs/run/config"] == live.config()
    assert answers["runs/run/samples"] == live.samples() | {"generation": 0}  # a server's generations begin at random
    assert answers["runs/run/texts/0"] == json.loads(live.block("texts", 0))


def test_a_report_holds_the_measurements_in_the_folder_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert embedded(run)["runs/run"]["scalings"] == []
    make_scaling(run / "scaling-toy")
    (shown,) = embedded(run)["runs/run"]["scalings"]
    assert (shown["data"], shown["chart"], len(shown["rows"])) == ("toy", CHART, 1)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_of_a_run_becomes_markup(tmp_path: Path, hostile: str) -> None:
    plain = parse(make_run(tmp_path))
    (tmp_path / "other").mkdir()
    page = parse(make_run(tmp_path / "other", hostile))
    assert page.tags == plain.tags
    assert page.scripts.count(page_script()) == 1
    for block in page.scripts:
        assert block == page_script() or re.fullmatch(r"[A-Za-z0-9+/=]+", block)
    assert hostile not in write_report(tmp_path / "other" / "run-1").read_text().replace(page_script(), "")


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
    content = write_report(tmp_path / "run-1").read_text().replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in content
    assert "connect-src 'none'" in content
    assert not re.search(r"https?://|url\(|@import", content)


@pytest.mark.parametrize("is_live", [True, False])
def test_the_policy_names_the_hash_of_the_script(tmp_path: Path, is_live: bool) -> None:
    content = live_document()[0] if is_live else write_report(make_run(tmp_path)).read_text()
    start = content.index("<script>") + 8
    script = content[start : content.index("</script>", start)]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'; connect-src {chr(39)}{'self' if is_live else 'none'}{chr(39)}" in content


def test_the_parts_that_links_lead_to_are_there(tmp_path: Path) -> None:
    page = parse(make_run(tmp_path))
    links = {value[1:] for value in page.values if re.fullmatch("#[a-z]+", value)}
    assert links == {"overview", "curves", "mismatch", "events", "scaling", "samples", "notes", "config"}
    assert links <= set(page.values), "each link has the section of its name"


def test_a_folder_that_is_no_run_and_a_run_without_metrics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.yaml"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(UserError, match="has no lines: the run has not finished a step yet"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_the_files_of_the_page_are_there_and_small_and_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["burnish.report"] == ["static/*"]
    for name in (*SCRIPTS, "style.css", "page.html"):
        assert 20 <= len(static_file(name).splitlines()) <= 300, name
