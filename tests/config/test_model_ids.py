"""Model ids: a local directory, then the Hugging Face cache, then a hub. The hub is a server of these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.model_ids import ModelId, fetch_model, model_directory, parse_model_id
from tests.config.fake_hub import FakeHub, serve_hub, use_hub

SHARDS = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "tokenizer_config.json": b"{  }",
    "chat_template.jinja": b"x",
    "model.safetensors.index.json": json.dumps(SHARDS).encode(),
    "model-00001-of-00002.safetensors": b"1" * 5000,
    "model-00002-of-00002.safetensors": b"2" * 70_000,
}
UNUSED = {"README.md": b"r", "pytorch_model.bin": b"b", "onnx/model.onnx": b"o", "consolidated.safetensors": b"c"}
UNUSED |= {"original/weights.safetensors": b"w"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub() as hub:
        use_hub(hub, tmp_path / "cache", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield hub


def test_a_text_is_an_id_unless_it_looks_like_a_path(tmp_path: Path) -> None:
    assert parse_model_id("Qwen/Qwen2.5-0.5B") == ModelId("Qwen/Qwen2.5-0.5B")
    assert parse_model_id("org/name@v1.0") == ModelId("org/name", "v1.0")
    assert parse_model_id("org/name@refs/pr/1") == ModelId("org/name", "refs/pr/1")
    (tmp_path / "mine").mkdir()
    for text in ("models/Qwen2.5-0.5B", "/a/b", "../a/b", "a/b/c", "name", "org/name@", "org/name@../x", "mine/model"):
        assert parse_model_id(text, (tmp_path,)) is None, text


def test_only_the_files_of_the_model_are_downloaded_and_only_once(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.commit("org/name", FILES | UNUSED)
    small = fetch_model(ModelId("org/name"), with_weights=False)
    assert hub.downloads() == {name for name in FILES if not name.endswith(".safetensors")}
    folder = fetch_model(ModelId("org/name"))
    assert folder == small == tmp_path / "cache" / "models--org--name" / "snapshots" / commit
    assert hub.downloads() == FILES.keys()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    hub.asked.clear()
    assert fetch_model(ModelId("org/name")) == folder
    assert model_directory("org/name@main", None) == model_directory(f"org/name@{commit}", None) == folder
    assert hub.asked == []


def test_a_download_that_breaks_off_continues_where_it_was(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what is written at once, 10 MB as a rule
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits before it asks again
    hub.commit("org/name", FILES)
    hub.break_after = 60_000
    folder = fetch_model(ModelId("org/name"))
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == FILES["model-00002-of-00002.safetensors"]
    assert hub.ranges == ["bytes=60000-"]


def test_a_local_directory_of_that_name_wins(hub: FakeHub) -> None:
    hub.commit("org/name", FILES)
    Path("org/name").mkdir(parents=True)
    assert model_directory("org/name", None) == Path("org/name")
    assert hub.asked == []


def test_a_model_that_the_hub_does_not_give_says_why(hub: FakeHub) -> None:
    hub.commit("org/name", FILES)
    hub.commit("org/old", {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"b"})
    hub.gated.add("org/secret")
    cases = {
        ModelId("org/nothing"): "has no such model",
        ModelId("org/name", "v9"): "has no branch, tag or commit v9",
        ModelId("org/secret"): "accept them at",
        ModelId("org/old"): r"no weights in \*\.safetensors files",
    }
    for model, words in cases.items():
        with pytest.raises(UserError, match=words):
            fetch_model(model)


def test_without_network_the_error_says_how_to_get_the_model_here(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # a port on which nothing listens
    with pytest.raises(UserError, match=r"the hub at http://127\.0\.0\.1:9 cannot be reached") as unreachable:
        fetch_model(ModelId("org/name", "v1"))
    for words in (
        "hf download org/name --revision v1 --local-dir models/name",
        f"into {tmp_path / 'cache'}",
        "HF_ENDPOINT",
    ):
        assert words in str(unreachable.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE=1 forbids asking the hub"):
        fetch_model(ModelId("org/name"))


def test_a_part_of_a_model_in_the_cache_is_not_taken_for_the_whole(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.commit("org/name", FILES)
    folder = fetch_model(ModelId("org/name"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_model(ModelId("org/name"), with_weights=False) == folder
    with pytest.raises(UserError, match="nor complete in the Hugging Face cache"):
        fetch_model(ModelId("org/name"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert fetch_model(ModelId("org/name")) == folder
    assert (folder / "model-00002-of-00002.safetensors").is_file()


def test_the_variables_of_the_hub_client_are_respected(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.commit("org/name", FILES)
    code = "from burnish.config.model_ids import *; print(fetch_model(ModelId('org/name')))"
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "home" / "hub" / "models--org--name" / "snapshots" / commit), (
        done.stderr
    )
