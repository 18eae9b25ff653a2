"""Whole runs of GRPO through SGLang servers: the policy that samples is the one that is trained, step after step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.distributed.roles import build_policy
from burnish.models.decoder import Decoder, initialise
from burnish.models.weight_files import file_tensors
from burnish.run.metrics import read_metrics
from tests.inference.sglang.fake_sglang_server import SglangServer
from tests.trainers.tiny import TINY, WARM, run_of

Serve = Callable[..., SglangServer]


def other_model(text: str, tmp_path: Path) -> Decoder:
    """The recipe's model with other weights, as of a server that was started from another directory."""
    (tmp_path / "other.yaml").write_text(text)
    config = load(TrainConfig, tmp_path / "other.yaml", []).config
    module = build_policy(config.model, config.data.train, seed=0, base=None).module
    assert isinstance(module, Decoder)
    initialise(module, seed=99, std=0.5)
    return module


def through(*servers: SglangServer) -> list[str]:
    urls = ", ".join(server.url for server in servers)
    return [
        "rollout.engine=sglang",
        f"rollout.sglang={{urls: [{urls}]}}",
        "rollout.temperature=0.8",
        "reward.workers=1",
    ]


def test_a_run_learns_from_servers_that_always_have_its_weights(serve: Serve, tmp_path: Path) -> None:
    servers = [serve(model=other_model(TINY, tmp_path)) for _ in range(2)]
    updates = [server.label for server in servers]
    run = run_of(tmp_path, TINY + WARM, [*through(*servers), "warm_start.updates=40"])
    steps = [row for row in read_metrics(run / "metrics.jsonl") if "reward/mean" in row]
    assert len(steps) == 4
    for row in steps:
        assert row["mismatch/mean"] <= 1e-5
        assert row["mismatch/max"] <= 1e-3
    assert any(row["actor/grad_norm"] > 0 for row in steps)
    sent = [[body["weight_version"] for path, body in s.calls if path.startswith("/update")] for s in servers]
    assert [len(labels) for labels in sent] == [5, 5], "before the first request, and after each step"
    assert [server.label for server in servers] == [labels[-1] for labels in sent] != updates
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    stored = {name: tensor.whole() for file in last.glob("model*.safetensors") for name, tensor in file_tensors(file)}
    assert (stored["model.embed_tokens.weight"] == servers[0].model.embedding.weight).all()


def test_a_server_killed_in_a_run_ends_it_by_name_and_the_run_resumes(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.inference.sglang.sglang_servers.LOST_AFTER_S", 0.3)
    first = serve(model=other_model(TINY, tmp_path))
    overrides = ["run.save_every=1", "training.steps=6"]

    def kill() -> None:
        while sum(path.startswith("/update") for path, _ in first.calls) < 3:
            time.sleep(0.002)
        first.kill()

    Thread(target=kill, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"no SGLang server is left \({first.url}: "):
        run_of(tmp_path, TINY, [*through(first), *overrides])
    assert time.monotonic() - started < 30
    done = len(read_metrics(tmp_path / "it" / "metrics.jsonl"))
    assert 1 <= done < 6
    second = serve(model=other_model(TINY, tmp_path), port=first.port)
    run = run_of(tmp_path, TINY, [*through(second), *overrides])
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["mismatch/max"] for row in rows) <= 1e-3


def test_what_servers_cannot_sample_is_refused_before_a_run_is_made(serve: Serve, tmp_path: Path) -> None:
    server = serve(model=other_model(TINY, tmp_path), mask=False)
    with pytest.raises(UserError, match="rollout: top_p, top_k or min_p is on, and SGLang server"):
        run_of(tmp_path, TINY, [*through(server), "rollout.top_p=0.9"])
    assert not (tmp_path / "it").exists()
