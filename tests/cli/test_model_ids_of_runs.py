"""Commands with a hub id: a run records the commit and keeps it, a dry run fetches no weights, other commands take ids too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from burnish.cli.main import main
from tests.cli.train_recipes import metrics, train, weights
from tests.config.fake_hub import FakeHub, serve_hub, use_hub


@pytest.fixture
def hub(here: Path, model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Iterator[FakeHub]:
    with serve_hub() as hub:
        use_hub(hub, tmp_path_factory.mktemp("cache"), monkeypatch)
        hub.commit("org/tiny", model)
        yield hub


def test_a_run_goes_on_with_the_commit_that_it_began_with(hub: FakeHub, model: Path, capsys) -> None:
    began = hub.refs["org/tiny", "main"]
    assert train("files.yaml", "training.steps=3", "run.name=local") == 0
    assert train("files.yaml", "model.path=org/tiny", "--dry-run") == 0
    assert "model.safetensors" not in hub.downloads()
    assert train("files.yaml", "model.path=org/tiny") == 0
    assert f"model.path=org/tiny: commit {began}" in capsys.readouterr().err
    assert yaml.safe_load(Path("runs/r/config.yaml").read_text())["model"]["path"] == f"org/tiny@{began}"

    files = {path.name: path.read_bytes() for path in model.iterdir()}
    moved = hub.commit("org/tiny", files | {"config.json": files["config.json"] + b"\n"})
    from huggingface_hub import snapshot_download

    assert Path(snapshot_download("org/tiny")).name == moved  # the cache has the new main as well
    assert train("files.yaml", "model.path=org/tiny", "training.steps=3") == 0
    assert f"commit {began}" in capsys.readouterr().err
    assert [row["step"] for row in metrics()] == [0, 1, 2, 3]
    assert weights("runs/r") == weights("runs/local")
    assert train("files.yaml", "model.path=org/tiny@main", "training.steps=3") == 2
    assert f"model.path: 'org/tiny@{began}' there, 'org/tiny@{moved}' now" in capsys.readouterr().err
    assert train("files.yaml", "model.path=org/tiny", "--fresh", "training.steps=1") == 0
    assert f"commit {moved}" in capsys.readouterr().err


def test_commands_that_take_a_model_directory_take_an_id(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "org/tiny", "1+1=", "--max-tokens", "2"]) == 0
    assert f"org/tiny: commit {hub.refs['org/tiny', 'main']}" in capsys.readouterr().err
    assert main(["eval", "org/tiny", "sums.jsonl", "--limit", "2", "--max-tokens", "2", "--reward", "number"]) == 0
    assert main(["merge", "merged", "org/tiny", "org/tiny@main"]) == 0
    assert Path("merged/model.safetensors").is_file()
    capsys.readouterr()
    assert main(["sample", "org/tinny", "1+1="]) == 2
    assert "has no such model" in capsys.readouterr().err
