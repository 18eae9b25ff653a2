"""A teacher behind a server: log-probs and a run are those of the same model in this process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.algorithms.batch_columns import TEACHER_IDS
from burnish.algorithms.terms.spec import TeachersReference
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.model import Model
from burnish.config.requirements import model_directories
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.core.trajectory import Trajectory, chain_nodes, pack
from burnish.distributed.roles import build_policy, build_reference
from burnish.distributed.server_teacher import ServerTeacher
from burnish.gateway.http_guards import bind_socket
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.decoder import initialise
from burnish.models.policy import load_policy
from burnish.run.metrics import read_metrics
from burnish.serve.app import Api
from burnish.serve.async_engine import AsyncEngine
from burnish.serve.engine_worker import EngineThread
from burnish.serve.http_server import ApiServer, server_url
from burnish.serve.request_to_engine import ServedModel, TokenScorer
from burnish.training.reference import make_reference
from tests.reused_reward_workers import end_all, reused_reward_workers
from tests.trainers.tiny import TINY, run_of

NEW = ["model.new={hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 32}"]


@pytest.fixture(scope="module", autouse=True)
def shared_reward_workers() -> Iterator[None]:
    """One scoring process for all runs of this file."""
    with reused_reward_workers():
        yield
    end_all()


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """The address of a server of a model."""
    command = [sys.executable, "-m", "burnish.cli.main", "serve", str(directory), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield process.stderr.readline().split()[3].removesuffix("/v1")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@contextlib.contextmanager
def serving_in_thread(directory: Path) -> Iterator[str]:
    """The address of the same server in a thread of this process, which starts at once."""
    policy = load_policy(Model.model_validate({"path": str(directory), "dtype": "float32"}), directory, None, 0)
    model, decode = policy.module, policy.tokenizer.decode
    engine = EngineThread(lambda listener: DenseEngine(model, 4, decode, listener))
    served = ServedModel("teacher", policy.tokenizer, model.arch.vocab_size, model.arch.max_positions, None, None)
    bound, listens = bind_socket("127.0.0.1", 0), threading.Event()
    server = ApiServer(
        Api(served, AsyncEngine(engine, 8), 2**20, TokenScorer(model)),
        None,
        5,
        log=lambda text: listens.set(),
        ready="ready",
    )
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        assert listens.wait(60)
        yield server_url(bound).removesuffix("/v1")
    finally:
        server.stop()
        thread.join()


@contextlib.contextmanager
def counting(factor: float, models: int = 1) -> Iterator[str]:
    """The address of a server in this process, to which a token's log-prob is `factor` times its number."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: Any) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self) -> None:
            self.answer({"data": [{"id": f"model-{k}"} for k in range(models)]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["temperature"] == 1
            logp = [None, *(factor * token for token in asked["prompt"][1:])]
            self.answer({"choices": [{"logprobs": {"token_logprobs": logp}}]})

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_each_row_asks_its_own_teacher_which_may_be_a_server(tmp_path: Path) -> None:
    batch = pack([t for k in range(3) for t in _answers(k)]).with_sequence(**{TEACHER_IDS: torch.tensor([0, 1, 2])})
    with counting(-0.1) as one, counting(-0.2) as other, counting(-0.3, models=2) as full:
        taught = ["algorithm=mopd", f"algorithm.kl.reference.paths={{a: '{one}', b: null, c: '{other}/'}}"]
        config = load(TrainConfig, None, ["data.train.task=sort_digits", *NEW, *taught]).config
        policy = build_policy(config.model, config.data.train, 0, tmp_path)
        reference = build_reference(config, policy, tmp_path)
        assert reference is not None
        found = reference.logprobs(batch)
        own = make_reference("frozen", policy.module, 1000, 1.0).logprobs(batch)
        with pytest.raises(UserError, match="give each of several teachers a server with one model"):
            ServerTeacher(full, key="algorithm.kl.reference.paths.d")
        assert len(_gaps(tmp_path / "run", f"{{name: teachers, paths: {{sort_digits: '{other}'}}}}")) == 2
    factor = torch.tensor([-0.1, 0, -0.2])[batch.sequence_ids]
    served = torch.where(batch.action_mask, factor * batch.tokens, torch.zeros(()))
    torch.testing.assert_close(found, torch.where(batch.sequence_ids == 1, own, served))
    assert (found[batch.action_mask] < 0).all()
    assert (dict(model_directories(config)), config.algorithm.kl.reference.is_served) == ({}, False)


def test_addresses_of_teachers_are_told_from_directories() -> None:
    slot = TeachersReference(paths={"a": "HTTP://x:1", "b": "models/a:b", "c": None})
    assert (slot.servers, slot.directories) == (["HTTP://x:1"], {"b": "models/a:b"})


def _answers(number: int) -> list[Trajectory]:
    mask = np.array([False, False, True, True, True])
    nodes = chain_nodes(np.arange(2, 7) + number, mask, np.zeros(5, np.float32), np.where(mask, 0, -1))
    return [Trajectory(f"p{number}", 0, 0, nodes, "stop", "", reward=0.0)]


@pytest.mark.parametrize("serve", [serving_in_thread, pytest.param(serving, marks=pytest.mark.slow)])
def test_a_served_teacher_judges_as_one_of_this_process(tmp_path: Path, serve: Any) -> None:
    config = load(TrainConfig, None, ["data.train.task=sort_digits", *NEW]).config
    policy = build_policy(config.model, config.data.train, 0, tmp_path)
    initialise(policy.module, seed=5, std=0.5)
    policy.save(tmp_path / "teacher")
    lengths = [6, 4, 5]
    batch = Batch(
        tokens=torch.tensor([3, 4, 11, 2, 3, 1, 5, 11, 5, 1, 2, 2, 11, 4, 4]),
        offsets=offsets_from_lengths(torch.tensor(lengths)),
        token={"action_mask": torch.tensor([i >= 3 for n in lengths for i in range(n)])},
    )
    expected = make_reference("frozen", policy.module, 1000, 1.0).logprobs(batch)
    with serve(tmp_path / "teacher") as url:
        torch.testing.assert_close(ServerTeacher(url).logprobs(batch), expected, atol=1e-4, rtol=1e-4)
        with pytest.raises(UserError, match=r"teacher server .*wrong"):
            ServerTeacher(url, "wrong").logprobs(batch)
        places = {
            "url": f"{{name: teacher, url: '{url}'}}",
            "path": f"{{name: teacher, path: '{tmp_path / 'teacher'}'}}",
            "several": f"{{name: teachers, paths: {{sort_digits: '{url}'}}}}",
        }
        served, here, several = (_gaps(tmp_path / name, place) for name, place in places.items())
    assert served == several == pytest.approx(here, rel=1e-3)
    assert len(served) == 2
    assert min(map(abs, served)) > 0.1


def _gaps(folder: Path, teacher: str) -> list[float]:
    """The KL to the teacher at each step of a run."""
    taught = ["algorithm=on_policy_distillation", f"algorithm.kl.reference={teacher}", "training.steps=2"]
    return [row["actor/kl_reward"] for row in read_metrics(run_of(folder, TINY, taught) / "metrics.jsonl")]


@pytest.mark.parametrize("teacher", ["url=http://localhost:1", "paths={a: x, b: 'https://localhost:1'}"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temperature=0.7", "log-probs are those at temperature 1"),
        ("algorithm.kl={loss: {estimator: full, coef: 1}, reward: {coef: 0}}", "not distributions"),
    ],
)
def test_what_a_server_cannot_give_is_refused(override: str, message: str, teacher: str) -> None:
    preset = "on_policy_distillation" if teacher.startswith("url") else "mopd"
    taught = [f"algorithm={preset}", f"algorithm.kl.reference.{teacher}"]
    with pytest.raises(UserError, match=message):
        load(TrainConfig, None, ["data.train.task=sort_digits", *NEW, *taught, override])


def test_a_teacher_has_one_place() -> None:
    taught = ["algorithm=on_policy_distillation", "algorithm.kl.reference={name: teacher, url: 'http://a', path: b}"]
    with pytest.raises(UserError, match="has a path or a url"):
        load(TrainConfig, None, ["data.train.task=sort_digits", *NEW, *taught])
