"""The server of the live page: it answers this machine alone, reads no file by name, and says what is wrong with a request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from burnish.config.errors import UserError
from burnish.report.live_server import make_app
from burnish.report.run_list import RunList
from burnish.run.metrics import MetricsFile
from burnish.run.samples import write_samples
from tests.report.scaling_folder import CHART, make_scaling


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    run = tmp_path / "group" / "it"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "secret.txt").write_text("secret")
    MetricsFile(run / "metrics.jsonl").append(1, {"reward/mean": 0.5})
    row = {"group": "g", "sample": 0, "prompt": "p", "completion": "needle", "reward": 1.0, "length": 1}
    write_samples(run / "samples", 1, "train", [row])
    with TestClient(make_app(RunList([tmp_path])), base_url="http://127.0.0.1:8100") as found:
        yield found


def test_every_path_of_the_interface_answers(client: TestClient) -> None:
    (run,) = client.get("/api/runs").json()["runs"]
    assert run["id"] == "group/it"
    base = "/api/runs/group/it"
    assert client.get(base).json()["name"] == "it"
    assert client.get(f"{base}/metrics/main").json()["series"] == {"reward/mean": [[1, 0.5]]}
    assert client.get(f"{base}/metrics/main?since=1&generation=0").json()["series"] == {}
    assert client.get(f"{base}/config").json()["keys"] == {"seed": "0"}
    assert client.get(f"{base}/samples").json()["num_groups"] == 1
    assert json.loads(client.get(f"{base}/texts/0").content)["text"] == ["needle"]
    assert len(client.get(f"{base}/tokens/0").content) == 24
    assert client.get(f"{base}/search?words=NEEDLE&first=0&last=1").json()["found"] == [0]
    assert client.get(f"{base}/scored").json() == {"rollouts": []}
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in page.headers["content-security-policy"]


@pytest.mark.parametrize("host", ["example.com", "example.com:8100", "127.0.0.1.example.com", "", "10.0.0.7:8100"])
def test_other_names_are_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/api/runs"):
        answer = client.get(path, headers={"Host": host})
        assert (answer.status_code, "answers only to localhost" in answer.text) == (403, True)


def test_a_run_whose_folder_is_removed_meanwhile_is_not_there(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "group" / "it" / "config.yaml").unlink()
    answer = client.get("/api/runs/group/it/config")
    assert (answer.status_code, answer.text.startswith("no such run")) == (404, True)


def test_a_page_of_an_earlier_server_gets_no_block_by_its_old_numbers(client: TestClient, tmp_path: Path) -> None:
    base = "/api/runs/group/it"
    now = client.get(f"{base}/samples").json()["generation"]
    with TestClient(make_app(RunList([tmp_path])), base_url="http://127.0.0.1:8100") as later:
        assert later.get(f"{base}/samples?since=1&generation={now}").json()["since"] == 0
        assert later.get(f"{base}/texts/0?generation={now}").status_code == 409
    assert client.get(f"{base}/texts/0?generation={now}").status_code == 200


@pytest.mark.parametrize("host", ["localhost:8100", "[::1]:8100", "run.localhost"])
def test_names_of_this_machine_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_web_sites_cannot_read_data(client: TestClient, site: str) -> None:
    assert client.get("/api/runs", headers={"Sec-Fetch-Site": site}).status_code == 403
    answer = client.get("/api/runs", headers={"Origin": "https://example.com", "Sec-Fetch-Site": "same-origin"})
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/api/runs/none", "/api/runs/../secret.txt", "/api/runs/%2e%2e/secret.txt/config"])
def test_a_path_is_never_a_file_name(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("metrics/all", "main, other"),
        ("metrics/main?since=-1", "since='-1': expected a whole number"),
        ("metrics/main?since=1e9", "whole number"),
        ("samples?generation=x", "generation='x'"),
        ("texts/7", "no block 7 of texts"),
        ("files/0", "no block 0 of files"),
        ("search?first=0&last=1", "words: expected 1 to 1000 characters"),
    ],
)
def test_a_request_that_makes_no_sense_is_told(client: TestClient, path: str, said: str) -> None:
    client.get("/api/runs/group/it/samples")
    answer = client.get(f"/api/runs/group/it/{path}")
    assert (answer.status_code, said in answer.text) == (400, True)


def test_nothing_but_reading_is_allowed(client: TestClient) -> None:
    for method in ("post", "put", "delete"):
        assert getattr(client, method)("/api/runs").status_code == 405


def test_a_table_that_changed_since_it_was_indexed_is_a_conflict(client: TestClient, tmp_path: Path) -> None:
    client.get("/api/runs/group/it/samples")
    (tmp_path / "group" / "it" / "samples" / "train-000001.parquet").unlink()
    assert client.get("/api/runs/group/it/texts/0").status_code == 409


def test_measurements_are_listed_and_their_pages_served(client: TestClient, tmp_path: Path) -> None:
    stamp = client.get("/api/runs").json()["runs"][0]["stamps"]["scalings"]
    inside = make_scaling(tmp_path / "group" / "it" / "scaling gsm8k")
    make_scaling(tmp_path / "deep" / "down" / "other", "other")
    make_scaling(tmp_path / "group" / "it" / "checkpoints" / "inside")
    make_scaling(tmp_path / ".hidden")
    answer = client.get("/api/runs").json()
    assert answer["scalings"] == ["deep/down/other", "group/it/scaling gsm8k"]
    assert answer["runs"][0]["stamps"]["scalings"] != stamp == ""
    page = client.get("/scaling/group/it/scaling%20gsm8k")
    assert (page.status_code, page.text) == (200, "<p>page of toy")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "script-src" not in page.headers["content-security-policy"]
    for path in ("none", "../secret.txt", "group/it"):
        assert (client.get(f"/scaling/{path}").status_code) == 404
    assert client.get("/scaling/deep/down/other", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    (inside / "scaling.html").unlink()
    gone = client.get("/scaling/group/it/scaling gsm8k")
    assert (gone.status_code, "burnish view FOLDER --report" in gone.text) == (404, True)
    (inside / "scaling.json").unlink()
    assert client.get("/api/runs").json()["scalings"] == ["deep/down/other"]


def test_a_run_shows_the_measurements_in_its_folder_and_says_which_cannot_be_read(
    client: TestClient, tmp_path: Path
) -> None:
    run = tmp_path / "group" / "it"
    make_scaling(run / "a")
    (make_scaling(run / "b") / "scaling.json").write_text("{}")
    found = client.get("/api/runs/group/it").json()
    (shown,) = found["scalings"]
    assert (shown["name"], shown["data"], shown["model"], shown["questions"]) == ("a", "toy", "<m>", 5)
    assert shown["chart"] == CHART
    (row,) = shown["rows"]
    assert dict(zip(shown["columns"], row, strict=True))["accuracy"] == "0.500 (best at its cost)"
    assert [f"{run / 'b' / 'scaling.json'} is no result" in text for text in found["damaged"]] == [True]


def test_a_folder_with_measurements_alone_opens_with_them(tmp_path: Path) -> None:
    one = make_scaling(tmp_path / "scaling-a b")
    with TestClient(make_app(RunList([one])), base_url="http://127.0.0.1:8100") as client:
        assert client.get("/").text == "<p>page of toy"
    make_scaling(tmp_path / "scaling-c", "second")
    with TestClient(make_app(RunList([tmp_path])), base_url="http://127.0.0.1:8100") as client:
        page = client.get("/").text
        links = re.findall('<a href="([^"]+)">', page)
        assert [client.get(f"/{link}").text for link in links] == ["<p>page of toy", "<p>page of second"]
    (tmp_path / "pool").mkdir()
    with pytest.raises(UserError, match=r"burnish eval --scaling writes scaling\.json"):
        RunList([tmp_path / "pool"])
