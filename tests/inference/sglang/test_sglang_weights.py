"""New weights and sleep: the weights and label of a server after a load, and the files left on disk."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config.errors import UserError
from burnish.inference.sglang.sglang_engine import SglangEngine
from burnish.models.decoder import Decoder
from burnish.models.weight_files import hf_tensors, stored_tensors
from tests.inference.sglang.fake_sglang_server import SglangServer

Serve = Callable[..., SglangServer]
Connect = Callable[..., SglangEngine]


def same(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_every_server_has_the_weights_it_was_handed(tools: Any, serve: Serve, connect: Connect, tmp_path: Path) -> None:
    servers = [serve(seed=1), serve(seed=2)]
    engine = connect(*servers, weights_dir=str(tmp_path))
    trained = tools.decoder(seed=3)
    engine.load(7, hf_tensors(trained))
    assert all(same(server.model, trained) for server in servers)
    (folder,) = tmp_path.iterdir()
    paths = [path for path, _ in servers[0].calls if path != "/generate"]
    assert paths == ["/update_weights_from_disk", "/flush_cache"]
    body = dict(servers[0].calls)["/update_weights_from_disk"]
    assert body == {"model_path": str(folder), "weight_version": servers[0].label, "flush_cache": True}
    found = tools.run(engine, tools.requests([(3,)]))
    assert found["0.0"].version == engine.version == 7


def test_only_the_newest_weights_stay_on_disk(tools: Any, serve: Serve, connect: Connect, tmp_path: Path) -> None:
    engine = connect(serve(), weights_dir=str(tmp_path / "made"))
    for version in (1, 2, 2, 3):
        engine.load(version, hf_tensors(tools.decoder(seed=version)))
        assert len(list((tmp_path / "made").iterdir())) == 1
    other = connect(serve())
    other.load(1, hf_tensors(tools.decoder()))
    folder = other._root
    assert len(list(folder.iterdir())) == 1
    del other
    gc.collect()
    assert not folder.exists(), "a folder of its own making goes with the engine"


def test_large_weights_are_several_files_with_an_index(
    tools: Any, serve: Serve, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.inference.server_client.FILE_BYTES", 20_000)
    server, trained = serve(seed=1), tools.decoder(seed=3)
    connect(server, weights_dir=str(tmp_path)).load(1, hf_tensors(trained))
    assert same(server.model, trained)
    (folder,) = tmp_path.iterdir()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert (
        index["weight_map"].keys() == {name for name, _ in stored_tensors(folder)} == dict(hf_tensors(trained)).keys()
    )
    assert len(set(index["weight_map"].values())) == len(list(folder.glob("*.safetensors"))) > 2


def test_the_policys_weights_are_taken_where_none_are_handed_over_and_before_the_first_request(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    server, policy = serve(seed=1), tools.decoder(seed=3)
    engine = connect(server, weights=lambda: hf_tensors(policy))
    assert not same(server.model, policy)
    assert tools.run(engine, tools.requests([(3,)]))["0.0"].version == 0
    assert same(server.model, policy)
    assert tools.run(engine, tools.requests([(3,)]))
    assert [path for path, _ in server.calls].count("/update_weights_from_disk") == 1
    policy.embedding.weight.data += 0.1
    engine.load(1, ())
    assert same(server.model, policy)
    other = tools.decoder(seed=4)
    engine.load(2, hf_tensors(other))
    assert same(server.model, other)


def test_weights_that_do_not_fit_are_refused_in_the_servers_words(
    tools: Any, serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    server = serve()
    engine = connect(server, weights_dir=str(tmp_path))
    words = rf"SGLang server {server.url}, /update_weights_from_disk: status 400: .*tensors are missing.*weights_dir"
    with pytest.raises(UserError, match=words):
        engine.load(1, list(hf_tensors(tools.decoder()))[:-2])
    assert list(tmp_path.iterdir()) == []
    assert engine.version == 0
    with pytest.raises(ValueError, match="without tensors"):
        engine.load(1, ())


def test_a_server_that_keeps_its_old_label_is_caught(
    tools: Any, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    engine = connect(server)
    monkeypatch.setattr("burnish.inference.sglang.sglang_engine.weight_label", lambda url: "default")
    with pytest.raises(UserError, match=r"says that it has weights 'default' after '\w+-1' were sent to it"):
        engine.load(1, hf_tensors(tools.decoder()))


def test_a_server_that_dies_is_left_behind_by_a_load_and_the_last_one_is_an_error(
    tools: Any,
    serve: Serve,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("burnish.inference.sglang.sglang_servers.LOST_AFTER_S", 0.3)
    first, second = serve(), serve()
    engine = connect(first, second)
    first.kill()
    engine.load(1, hf_tensors(tools.decoder(seed=3)))
    assert [facts.url for facts in engine.servers] == [second.url]
    assert f"SGLang server {first.url} is lost" in caplog.text
    assert tools.run(engine, tools.requests([(3,)], 4))
    second.kill()
    with pytest.raises(UserError, match=rf"no SGLang server is left .*{second.url}: no answer \(ConnectionRefused"):
        engine.load(2, hf_tensors(tools.decoder()))
    assert engine.version == 1


def test_neither_new_weights_nor_sleep_while_requests_run(tools: Any, serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)
    server.gate.clear()
    engine.submit(tools.requests([(3,)]))
    with pytest.raises(RuntimeError, match="new weights while 1 rows are running"):
        engine.load(1, hf_tensors(tools.decoder()))
    with pytest.raises(RuntimeError, match="cannot sleep with 1 requests unfinished"):
        engine.sleep()
    server.gate.set()
    assert len(list(engine.stream())) == 1


def test_a_cache_is_emptied_once_the_server_is_idle(
    tools: Any, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.inference.sglang.sglang_engine.FLUSH_POLL_S", 0.01)
    server = serve()
    engine = connect(server)
    server.busy = 2
    engine.load(1, hf_tensors(tools.decoder()))
    assert [path for path, _ in server.calls].count("/flush_cache") == 3


# --- sleep ---------------------------------------------------------------------------------------------------------------


def test_a_sleeping_server_gives_its_cache_back_and_keeps_its_weights(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    server = serve()
    engine = connect(server)
    engine.sleep()
    assert server.asleep == {"kv_cache"}
    engine.load(1, hf_tensors(tools.decoder(seed=3)))
    assert tools.run(engine, tools.requests([(3,)])), "the next request wakes it"
    assert server.asleep == set()
    engine.sleep()
    engine.wake()
    engine.wake()
    assert [path for path, _ in server.calls].count("/resume_memory_occupation") == 2


def test_a_server_without_the_memory_saver_is_let_be(tools: Any, serve: Serve, connect: Connect) -> None:
    server = serve(memory_saver=False)
    engine = connect(server)
    engine.sleep()
    assert tools.run(engine, tools.requests([(3,)]))
    assert not [path for path, _ in server.calls if "memory" in path]
