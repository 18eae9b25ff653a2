"""Servers of vLLM and SGLang as the engines of a run on Ray: their weights, their processes, and what is refused."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.placement import ROLLOUT, RayPlacement
from burnish.distributed.placement import plan_layout
from burnish.distributed.server_process import ServerProcess
from burnish.inference.sglang.sglang_servers import SGLANG
from burnish.models.decoder import Decoder
from tests.distributed.toy_run import Parts, config_of, learn, parts_of, requests, run
from tests.inference.sglang.fake_sglang_server import SglangServer

SERVE = f"{sys.executable} -m tests.inference.sglang.fake_sglang_server {{model}} {{port}}"


def same_weights(server: SglangServer, parts: Parts) -> bool:
    theirs, ours = server.model.state_dict(), parts.trainer.policy.module.state_dict()
    return theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SglangServer]:
    """A server of the toy's model, with weights of another seed."""
    from burnish.distributed.roles import build_policy

    config = config_of(tmp_path)
    module = build_policy(config.model, config.data.train, 99, tmp_path).module
    assert isinstance(module, Decoder)
    started = SglangServer(module).start()
    yield started
    started.stop()


def test_a_server_gets_the_trainers_weights_and_proves_them(tmp_path: Path, server: SglangServer) -> None:
    named = ["rollout.engine=sglang", f"rollout.sglang={{urls: [{server.url}]}}"]
    parts = parts_of(tmp_path, *named, engines=1)
    for version in range(3):
        parts.engine.load(version, ())
        found = run(parts.engine, requests(2))
        assert {told[2] for told in found.values()} == {version}
        assert same_weights(server, parts)
        learn(parts.trainer)
        assert not same_weights(server, parts)
    updates = [body["weight_version"] for path, body in server.calls if path.startswith("/update")]
    assert len(set(updates)) == 3, "one for each version"


@pytest.mark.slow  # a process that imports torch
def test_a_server_is_started_by_a_command_and_ends_with_its_parent(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, "rollout.engine=sglang", f"placement.server='{SERVE}'", engines=1)
    assert len(run(parts.engine, requests(2))) == 4
    worker = parts.backend.workers[0]
    children = [
        int(pid)
        for pid in Path(f"/proc/{worker.server._keeper.pid}/task/{worker.server._keeper.pid}/children")
        .read_text()
        .split()
    ]
    assert len(children) == 1
    worker.server.close()  # closes the pipe, as the end of this process would
    until = time.monotonic() + 10
    while Path(f"/proc/{children[0]}/cmdline").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{children[0]}/cmdline").exists()
    assert worker.server.has_ended()


def test_a_server_that_does_not_come_up_is_an_error_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the SGLang server ended with status 3 before it answered \(sh -c 'exit 3'\)"):
        ServerProcess("sh -c 'exit 3'", tmp_path, SGLANG, timeout_s=20)
    with pytest.raises(UserError, match=r"did not answer in 0\.1 s, which is placement\.timeout_s \(sleep 60\)"):
        ServerProcess("sleep 60", tmp_path, SGLANG, timeout_s=0.1)
    with pytest.raises(UserError, match=r"only \{model\} and \{port\} are filled in"):
        ServerProcess("serve {directory}", tmp_path, SGLANG, timeout_s=1)


def test_a_server_killed_with_its_parent_alive_is_noticed(tmp_path: Path) -> None:
    started = ServerProcess(SERVE_HTTP, tmp_path, SGLANG, timeout_s=20)
    assert not started.has_ended()
    children = Path(f"/proc/{started._keeper.pid}/task/{started._keeper.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert started.has_ended(10.0)


SERVE_HTTP = f"{sys.executable} -m http.server {{port}} --bind 127.0.0.1 --directory {{model}}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.engine=sglang"], "rollout.sglang.urls, or with placement=ray the command"),
        (["placement.server=serve"], "placement.server has no effect with rollout.engine=auto"),
        (["placement.server=serve", "rollout.engine=vllm"], r"placement.server='serve' has no \{port\}"),
        (["placement.server=serve", "rollout.engine=vllm", "rollout.vllm.url=http://a:1"], "remove one of them"),
        (
            ["placement.server=serve", "rollout.engine=vllm", "rollout.vllm.engine.dtype=float16"],
            "write it into placement.server",
        ),
        (
            ["placement.server=serve", "rollout.engine=vllm", "rollout.cache_gib=1"],
            "cache_gib has no effect on a server",
        ),
        (
            ["placement.engines=2", "rollout.engine=vllm", "rollout.vllm.url=http://a:1"],
            "one process speaks to all servers",
        ),
        (["placement.engines=2", "placement.engine_tensor=2", "rollout.engine=vllm"], "divides the native engine"),
        (
            ["placement.pools={a: {}, b: {gpus: 4}}", "placement.roles={actor: a, rollout: b}"],
            "is for servers of placement.server",
        ),
        (
            ["placement.pools={a: {gpus: 2}}", "placement.roles={actor: a, rollout: a}"],
            "only a pool of the rollout alone",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config_of(tmp_path, *overrides)


def test_servers_elsewhere_need_no_gpu_and_parallel_ones_have_several() -> None:
    pools = {"a": {"places": 2}, "b": {"places": 1, "gpus": 4, "cpus": 8}}
    made = plan_layout(RayPlacement(pools=pools, roles={"actor": "a", "rollout": "b"}, server="s"), on_gpu=True)
    assert [slot.resources for slot in made.slots[ROLLOUT]] == [{"CPU": 8.0, "GPU": 4.0}]


def test_a_pool_of_clients_may_be_without_gpus(tmp_path: Path) -> None:
    pools = ["placement.pools={a: {}, b: {gpu: false}}", "placement.roles={actor: a, rollout: b}"]
    with pytest.raises(UserError, match="leaves engines without a GPU"):
        config_of(tmp_path, *pools)
    assert config_of(tmp_path, *pools, "rollout.engine=vllm", "rollout.vllm.url=http://a:1").rollout.vllm is not None
