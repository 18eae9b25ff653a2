"""The training API by plain HTTP: what the stock client sends and expects, without the client."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.model import Lora
from burnish.config.rollout import Rollout
from burnish.core.engine import Completion
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.policy import PolicyModel
from burnish.serve.tinker.protobuf import bytes_of, double_of, read_fields, text_of
from burnish.serve.tinker.requests import AdamOptions, Sample
from burnish.serve.tinker.responses import JsonResult, SampleOutput
from burnish.serve.tinker.sampler import SampleJob, SamplerPool, SamplerWeights
from burnish.serve.tinker.state import MAX_SNAPSHOTS
from burnish.serve.tinker.training_model import TrainingModel
from burnish.serve.tinker.worker import Task
from tests.serve.tinker.conftest import NAME, TOKEN_BUDGET, Server, Start, next_tokens, training_message

DATA = [next_tokens(list(range(start, start + 12))) for start in (3, 40, 90, 120)]
ADAM = {"learning_rate": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


def step(server: Server, model: str, first: int, lr: float = 0.02) -> dict[str, Any]:
    """Two requests of a model, numbered from `first` on: a gradient and a step."""
    server.ask("forward_backward", training_message(model, first, DATA, "cross_entropy"))
    body = {"model_id": model, "seq_id": first + 1, "adam_params": ADAM | {"learning_rate": lr}, "type": "optim_step"}
    return server.done("optim_step", body)


def logprobs(server: Server, sampler: str, number: int, tokens: list[int]) -> list[float | None]:
    """Log-probs of a prompt, as `compute_logprobs` asks for them."""
    found = server.done("asample", sample_body(sampler, number, tokens, prompt_logprobs=True))
    values: list[float | None] = found["prompt_logprobs"]
    return values


def sample_body(sampler: str, number: int, tokens: list[int], **options: Any) -> dict[str, Any]:
    params = {"max_tokens": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0} | options.pop("params", {})
    prompt = {"chunks": [{"tokens": tokens, "type": "encoded_text"}]}
    where = {"sampling_session_id": sampler, "seq_id": number}
    return {"prompt": prompt, "sampling_params": params, "num_samples": 1, "type": "sample", **where, **options}


def plain_logprobs(model: TrainingModel, tokens: list[int]) -> np.ndarray:
    return model.forward_backward([next_tokens(tokens)], "cross_entropy", {}, forward_only=True).logprobs[0]


@pytest.fixture(scope="module")
def twin(tiny_base: PolicyModel) -> TrainingModel:
    """What `Server.model` makes, in this process."""
    return TrainingModel(tiny_base, Lora(rank=4, alpha=32), seed=7, token_budget=TOKEN_BUDGET)


def test_what_the_client_asks_at_its_start(tinker_server: Server) -> None:
    config = tinker_server.ask("client/config", {"sdk_version": "0.36.0"})
    assert (config["pjwt_auth_enabled"], config["proto_compress_fwdbwd"]) == (False, False)
    tinker_server.ask("client/dynamic_config", {"sdk_version": "0.36.0"})
    assert tinker_server.ask("telemetry", {"events": []}) == {"status": "accepted"}
    (model,) = tinker_server.get("get_server_capabilities")["supported_models"]
    assert model == {"model_name": NAME, "max_context_length": 256, "trainable": True, "sampleable": True}
    session = tinker_server.session()
    assert tinker_server.ask("session_heartbeat", {"session_id": session}) == {"type": "session_heartbeat"}
    info = tinker_server.ask("get_info", {"model_id": tinker_server.model(session)})
    assert (info["is_lora"], info["lora_rank"], info["model_data"]["model_name"]) == (True, 4, NAME)


def test_parts_that_arrive_in_any_order_train_as_one_batch(
    tinker_server: Server, twin: TrainingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tinker_server.model(tinker_server.session())
    second = tinker_server.ask("forward_backward", training_message(model, 2, DATA[2:], "cross_entropy"))
    body = {"model_id": model, "seq_id": 3, "adam_params": ADAM}
    last = tinker_server.ask("optim_step", body)
    monkeypatch.setattr(tinker_server.routes, "poll_s", 0.05)  # nothing runs before the first part has come
    pending = tinker_server.post("retrieve_future", {"request_id": second["request_id"]})
    assert (pending.status, pending.json()["queue_state"]) == (408, "active")
    first = tinker_server.ask("forward_backward", training_message(model, 1, DATA[:2], "cross_entropy"))
    again = tinker_server.ask("optim_step", body)  # its answer was lost: the client sends it again
    assert again == last
    metrics = tinker_server.result(last)["metrics"]
    outputs = [read_training_output(tinker_server.result(part, protobuf=True)) for part in (first, second)]
    expected = twin.forward_backward(DATA, "cross_entropy", {})
    norm = twin.optim_step(AdamOptions(**ADAM))["unclipped_grad_l2:mean"]
    assert metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-9)
    assert sum(metrics["loss:sum"] for _, metrics in outputs) == pytest.approx(expected.metrics["loss:sum"])
    for ours, theirs in zip([one for found, _ in outputs for one in found], expected.logprobs, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    after = tinker_server.done("forward", json_forward(model, 4, [3, 4, 5, 6]))
    np.testing.assert_allclose(
        after["loss_fn_outputs"][0]["logprobs"]["data"], plain_logprobs(twin, [3, 4, 5, 6]), rtol=1e-6
    )


def json_forward(model: str, number: int, tokens: list[int]) -> dict[str, Any]:
    """A request in JSON, as older clients and people send it."""
    inputs = {
        "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [len(tokens) - 1]},
        "weights": {"data": [1.0] * (len(tokens) - 1), "dtype": "float32"},
    }
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]}, "loss_fn_inputs": inputs}
    return {"model_id": model, "seq_id": number, "forward_input": {"data": [datum], "loss_fn": "cross_entropy"}}


def read_training_output(data: bytes) -> tuple[list[np.ndarray], dict[str, float]]:
    """Log-probs of each sequence and metrics of a ForwardBackwardOutput, by its published field numbers."""
    arrays, metrics = list[np.ndarray](), dict[str, float]()
    for number, value in read_fields(data):
        if number == 2:
            record = dict(read_fields(bytes_of(value)))
            entry = dict(read_fields(bytes_of(record[2])))
            assert text_of(entry[1]) == "logprobs"
            tensor = dict(read_fields(bytes_of(entry[2])))
            values, offsets = (
                np.frombuffer(bytes_of(tensor[1]), np.float32),
                np.frombuffer(bytes_of(tensor[2]), np.int64),
            )
            arrays += [values[a // 4 : b // 4] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
            assert record[3] == len(offsets) - 1
        elif number == 3:
            pair = dict(read_fields(bytes_of(value)))
            metrics[text_of(pair[1])] = double_of(pair[2])
    return arrays, metrics


def test_a_request_that_fails_ends_its_future_and_the_next_one_runs(tinker_server: Server) -> None:
    model = tinker_server.model(tinker_server.session())
    image = b"\x1a\x06\x0a\x04\x12\x02\x0a\x00"  # a datum with an image chunk
    bodies = [
        ("forward_backward", training_message(model, 1, DATA, "cross_entropie"), "did you mean 'cross_entropy'"),
        ("forward_backward", training_message(model, 2, [], "cross_entropy") + image, "part of type image"),
        ("optim_step", {"model_id": model, "seq_id": 3, "adam_params": ADAM | {"beta1": 2}}, "adam_params.beta1"),
        ("optim_step", {"model_id": model, "seq_id": 4, "adam_params": ADAM}, "without a gradient"),
        (
            "optim_step",
            {"model_id": model, "seq_id": 5, "optimizer_params": {"type": "dimuon"}},
            "dimuon is not served",
        ),
        ("save_weights", {"model_id": model, "seq_id": 6, "path": "../up"}, "no name of a checkpoint"),
        ("save_weights_external", {"model_id": model, "seq_id": 7, "path": "x"}, "not served here"),
        (
            "load_weights",
            {"model_id": model, "seq_id": 8, "path": "tinker://a/weights/b", "optimizer": True},
            "no checkpoint",
        ),
    ]
    for path, body, text in bodies:
        found = tinker_server.done(path, body)
        assert found["category"] == "user"
        assert text in found["error"]
    found = tinker_server.done("load_weights", {"model_id": model, "seq_id": 9, "optimizer": True})
    assert found == {"error": "path: Field required", "category": "user"}
    assert step(tinker_server, model, 10)["metrics"]
    for path, body, status in (
        ("optim_step", {"model_id": "nothing", "seq_id": 1, "adam_params": ADAM}, 404),
        ("forward_backward", b"\xff\xff", 400),
        ("create_session", {"tags": "none"}, 400),
        ("retrieve_future", {"request_id": "nothing"}, 410),
        ("copy_weights", {}, 404),
    ):
        response = tinker_server.post(path, body)
        assert (response.status, response.json()["category"]) == (status, "user")
    assert tinker_server.post("create_session", "x", headers={"content-type": "text/plain"}).status == 415


def test_a_request_that_never_arrives_fails_those_behind_it(serve_tinker: Start, tmp_path: Path) -> None:
    server = serve_tinker(tmp_path, gap_s=0.1)
    model = server.model(server.session())
    found = server.done("optim_step", {"model_id": model, "seq_id": 2, "adam_params": ADAM})
    assert found["category"] == "server"
    assert f"request 1 of {model} did not arrive" in found["error"]
    assert step(server, model, 3)["metrics"]


def test_a_fault_of_the_server_is_answered_and_logged(tinker_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tinker_server.model(tinker_server.session())

    def fail(*args: Any) -> None:
        raise ZeroDivisionError("a fault in the step")

    with monkeypatch.context() as patch:
        patch.setattr(TrainingModel, "optim_step", fail)
        found = tinker_server.done("optim_step", {"model_id": model, "seq_id": 1, "adam_params": ADAM})
    assert found == {"error": "ZeroDivisionError: a fault in the step", "category": "server"}
    tinker_server.wait_until(lambda: any("Traceback" in line for line in tinker_server.log))
    assert step(tinker_server, model, 2)["metrics"]


# --- sampling --------------------------------------------------------------------------------------------------------------


def snapshot(server: Server, model: str, number: int, sampler: int) -> str:
    """Unnamed sampler weights of a model."""
    body = {"model_id": model, "seq_id": number, "sampling_session_seq_id": sampler}
    found: str = server.done("save_weights_for_sampler", body)["sampling_session_id"]
    return found


def test_several_adapters_and_the_base_are_sampled_from_their_own_weights(
    tinker_server: Server, tiny_base: PolicyModel
) -> None:
    session, tokens = tinker_server.session(), [5, 60, 7, 80, 9, 100]
    models = [tinker_server.model(session, number, {"rank": rank}) for number, rank in enumerate((4, 2, 4))]
    models.append(tinker_server.model(session, 3, full=True))
    samplers = [tinker_server.sampler(session, 0)]
    twins = []
    for number, (model, lora) in enumerate(zip(models, (4, 2, 4, None), strict=True)):
        lr = 0.01 * (number + 1)
        step(tinker_server, model, 1, lr)
        samplers.append(snapshot(tinker_server, model, 3, 1 + number))
        config = None if lora is None else Lora(rank=lora, alpha=32)
        twins.append(TrainingModel(tiny_base, config, seed=7, token_budget=TOKEN_BUDGET))
        twins[-1].forward_backward(DATA, "cross_entropy", {})
        twins[-1].optim_step(AdamOptions(**ADAM | {"learning_rate": lr}))
    step(tinker_server, models[0], 4)  # a snapshot does not follow its model
    plain = TrainingModel(tiny_base, Lora(rank=1), seed=0, token_budget=TOKEN_BUDGET)  # B is 0: the base
    futures = [
        tinker_server.ask("asample", sample_body(name, turn, tokens, prompt_logprobs=True))
        for turn in range(2)
        for name in samplers
    ]
    found = [tinker_server.result(future)["prompt_logprobs"] for future in futures]
    assert found[: len(samplers)] == found[len(samplers) :]
    for values, model in zip(found, [plain, *twins], strict=False):
        assert values[0] is None
        np.testing.assert_allclose(values[1:], plain_logprobs(model, tokens), rtol=1e-5)
    assert len({tuple(values[1:]) for values in found}) == len(samplers)
    info = tinker_server.get(f"samplers/{samplers[0]}")
    assert info == {"sampler_id": samplers[0], "base_model": NAME, "model_path": None}


def test_samples_have_the_log_probs_of_the_model_that_drew_them(tinker_server: Server, twin: TrainingModel) -> None:
    session, prompt = tinker_server.session(), [10, 20, 30]
    sampler = tinker_server.sampler(session, 0)
    params = {"max_tokens": 9, "seed": 3, "stop": []}
    body = sample_body(sampler, 0, prompt, num_samples=3, topk_sample_logprobs=2, params=params)
    future = tinker_server.ask("asample", body)
    assert len(future["sample_sequence_ids"]) == 3
    found = tinker_server.result(future)
    plain = TrainingModel(tinker_server.service.base, Lora(rank=1), seed=0, token_budget=TOKEN_BUDGET)
    for one in found["sequences"]:
        assert (len(one["tokens"]), one["stop_reason"]) == (9, "length")
        expected = plain_logprobs(plain, [*prompt, *one["tokens"]])[len(prompt) - 1 :]
        np.testing.assert_allclose(one["logprobs"], expected, rtol=1e-5)
        assert all(row[0][1] >= row[1][1] for row in one["topk_logprobs"])
    assert len({tuple(one["tokens"]) for one in found["sequences"]}) > 1
    repeated = tinker_server.done("asample", body | {"seq_id": 1})
    assert repeated["sequences"] == found["sequences"]
    greedy = [
        tinker_server.done("asample", sample_body(sampler, n, prompt, params={"max_tokens": 6, "temperature": 0.0}))
        for n in (2, 3)
    ]
    first = greedy[0]["sequences"][0]["tokens"]
    assert greedy[0]["sequences"] == greedy[1]["sequences"]
    stop = {"max_tokens": 6, "temperature": 0.0, "stop": [first[2]]}
    stopped = tinker_server.done("asample", sample_body(sampler, 4, prompt, params=stop))["sequences"][0]
    assert (stopped["tokens"], stopped["stop_reason"]) == (first[: first.index(first[2]) + 1], "stop")


def test_questions_about_a_prompt_are_answered_from_its_own_distributions(
    tinker_server: Server, tiny_base: PolicyModel
) -> None:
    sampler, tokens = tinker_server.sampler(tinker_server.session(), 0), [11, 22, 33, 44, 55]
    with torch.no_grad():
        hidden = tiny_base.module.hidden(torch.tensor(tokens), torch.tensor([0, len(tokens)]))
        logp = (hidden @ tiny_base.module.head_weight.t()).log_softmax(-1)
    dense = {"data": [1, -1, 2, 3, -1, -1, 4, 5], "dtype": "int64", "shape": [4, 2]}
    sparse = {
        "data": [9, 8, 7], "dtype": "int64", "shape": [4, 2],
        "sparse_crow_indices": [0, 1, 1, 3, 3], "sparse_col_indices": [1, 0, 1],
    }  # fmt: skip
    asked: dict[str, Any] = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "prompt_alt_tokens_k": 4}
    body = sample_body(sampler, 0, tokens, target_prompt_logprobs=dense, prompt_logprobs_last_n=2, **asked)
    found = tinker_server.done("asample", body)
    assert found["prompt_logprobs"][:3] == [None] * 3
    assert found["prompt_logprobs"][3:] == pytest.approx([float(logp[2, 44]), float(logp[3, 55])], rel=1e-6)
    assert found["topk_prompt_logprobs"][:3] == [None] * 3
    values, ids = logp[3].topk(3)
    assert [token for token, _ in found["topk_prompt_logprobs"][4]] == ids.tolist()
    assert [value for _, value in found["topk_prompt_logprobs"][4]] == pytest.approx(values.tolist(), rel=1e-6)
    scores = np.array(found["target_prompt_logprobs"]["data"]).reshape(4, 2)
    wanted = [
        [float(logp[0, 1]), 0.0],
        [float(logp[1, 2]), float(logp[1, 3])],
        [0.0, 0.0],
        [float(logp[3, 4]), float(logp[3, 5])],
    ]
    np.testing.assert_allclose(scores, wanted, rtol=1e-6)
    drawn = np.array(found["prompt_alt_tokens"]["tokens"]["data"]).reshape(4, 4)
    drawn_logp = np.array(found["prompt_alt_tokens"]["logprobs"]["data"]).reshape(4, 4)
    np.testing.assert_allclose(drawn_logp, logp[:4].gather(1, torch.tensor(drawn)).numpy(), rtol=1e-6)
    found = tinker_server.done("asample", sample_body(sampler, 1, tokens, target_prompt_logprobs=sparse))
    table = found["target_prompt_logprobs"]
    assert table["sparse_crow_indices"] == sparse["sparse_crow_indices"]
    assert table["data"] == pytest.approx([float(logp[0, 9]), float(logp[2, 8]), float(logp[2, 7])], rel=1e-6)
    refused = {
        "target_prompt_logprobs": ({"target_prompt_logprobs": dense | {"shape": [2, 4]}}, r"[4, K]"),
        "last_n": ({"prompt_logprobs": True, "prompt_logprobs_last_n": 5}, "expected 1 to 4"),
        "stability": ({"record_stability_info": True}, "not served"),
        "length": ({"params": {"max_tokens": 10**6}}, "256 positions"),
    }
    for number, (options, text) in enumerate(refused.values(), 2):
        failed = tinker_server.done("asample", sample_body(sampler, number, tokens, **options))
        assert failed["category"] == "user"
        assert text in failed["error"]


def test_requests_are_cancelled_before_they_run_and_while_they_run(
    tinker_server: Server, tiny_base: PolicyModel
) -> None:
    sampler = tinker_server.sampler(tinker_server.session(), 0)
    release = threading.Event()
    tinker_server.service.worker.put(Task("hold", lambda: JsonResult({"held": release.wait(60)}), lambda result: None))
    futures = [tinker_server.ask("asample", sample_body(sampler, n, [1, 2])) for n in range(2)]
    assert tinker_server.post("cancel_future", {"request_id": futures[0]["request_id"]}).status == 204
    release.set()
    assert tinker_server.result(futures[0]) == {"error": "the request was cancelled", "category": "user"}
    assert "sequences" in tinker_server.result(futures[1])

    results: dict[str, Any] = {}
    weights = SamplerWeights()
    jobs = [
        SampleJob(
            name,
            Sample.model_validate(sample_body("", 0, [1, 2], params=params)),
            weights,
            partial(results.__setitem__, name),
            0,
        )
        for name, params in (("short", {"max_tokens": 2}), ("long", {"max_tokens": 200, "stop": []}))
    ]

    def cancel_the_long_one() -> list[SampleJob]:
        jobs[1].is_cancelled = True
        return []

    pool = SamplerPool(tiny_base, Rollout(max_rows=8), TOKEN_BUDGET)
    pool.run(jobs, cancel_the_long_one)
    assert isinstance(results["short"], SampleOutput)
    assert results["long"].error == "the request was cancelled"


def test_a_cancelled_request_ends_before_any_sample_does(
    tiny_base: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Any] = []
    asked = Sample.model_validate(sample_body("", 0, [1, 2], params={"max_tokens": 200, "stop": []}))
    job = SampleJob("long", asked, SamplerWeights(), results.append, 0)
    pool = SamplerPool(tiny_base, Rollout(max_rows=8), TOKEN_BUDGET)
    engine = pool.slot_with(job.weights).engine
    assert isinstance(engine, DenseEngine)
    decode, steps = engine._decode, list[int]()

    def counted() -> list[Completion]:
        steps.append(1)
        if len(steps) == 3:  # as the event loop does it while the engine runs
            job.is_cancelled = True
            pool.interrupt()
        return decode()

    monkeypatch.setattr(engine, "_decode", counted)
    monkeypatch.setattr(engine, "_steps_at_once", lambda: 1)
    pool.run([job], list)
    assert [result.error for result in results] == ["the request was cancelled"]
    assert len(steps) == 3


def test_the_oldest_unnamed_weights_of_a_model_are_dropped(tinker_server: Server) -> None:
    model = tinker_server.model(tinker_server.session())
    names = [snapshot(tinker_server, model, 1 + n, 1 + n) for n in range(MAX_SNAPSHOTS + 1)]
    gone = tinker_server.post("asample", sample_body(names[0], 0, [1, 2]))
    assert (gone.status, "newer ones" in gone.json()["error"]) == (404, True)
    assert "sequences" in tinker_server.done("asample", sample_body(names[1], 0, [1, 2]))


# --- checkpoints -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(serve_tinker: Start, tmp_path: Path) -> tuple[Server, str, str]:
    """A server, its model after one step, and the path of its saved state."""
    server = serve_tinker(tmp_path)
    model = server.model(server.session())
    step(server, model, 1)
    path = server.done("save_weights", {"model_id": model, "seq_id": 3, "path": "one", "user_metadata": {"a": "b"}})[
        "path"
    ]
    return server, model, path


def test_training_goes_on_after_a_restart_as_if_it_had_not_stopped(
    saved: tuple[Server, str, str], serve_tinker: Start, tmp_path: Path
) -> None:
    server, model, path = saved
    again = serve_tinker(tmp_path)
    session = again.session()
    info = again.ask("weights_info", {"tinker_path": path})
    assert info == {
        "base_model": NAME, "is_lora": True, "lora_rank": 4, "train_unembed": True, "train_mlp": True, "train_attn": True,
    }  # fmt: skip
    resumed = again.model(session, 0, {"seed": 99})
    again.ask("load_weights", {"model_id": resumed, "seq_id": 1, "path": path, "optimizer": True})
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    direct = again.done("load_weights", body)["model_id"]
    weights_only = again.done("load_weights", body | {"model_seq_id": 2, "optimizer": False})["model_id"]
    results = []
    for at, (where, name, first) in enumerate(
        [(server, model, 4), (again, resumed, 2), (again, direct, 1), (again, weights_only, 1)]
    ):
        metrics = step(where, name, first)["metrics"]
        after = where.done("forward", json_forward(name, first + 2, [3, 4, 5, 6]))
        results.append((metrics, after["loss_fn_outputs"][0]["logprobs"]["data"]))
        assert at == 0 or results[at][0] == results[0][0]
    assert results[0] == results[1] == results[2]
    assert results[3][1] != results[0][1]  # without Adam's moments the step is another
    wrong = again.model(session, 3, {"rank": 5})
    failed = again.done("load_weights", {"model_id": wrong, "seq_id": 1, "path": path, "optimizer": False})
    assert "adapters of rank 4" in failed["error"]


def test_checkpoints_are_listed_sampled_from_replaced_and_deleted(saved: tuple[Server, str, str]) -> None:
    server, model, path = saved
    session = model.partition(":")[0]
    body = {"model_id": model, "seq_id": 4, "path": "two", "ttl_seconds": 3600}
    weights = server.done("save_weights_for_sampler", body)["path"]
    assert weights == f"tinker://{model}/sampler_weights/two"
    before = logprobs(server, server.sampler(session, 0, weights), 0, [1, 2, 3])
    assert before == logprobs(server, server.sampler(session, 1, path), 0, [1, 2, 3])
    run = server.get(f"training_runs/{model}")
    assert run["last_checkpoint"]["tinker_path"] == path
    assert run["last_checkpoint"]["user_metadata"] == {"a": "b"}
    listed = server.get(f"training_runs/{model}/checkpoints")["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == ["weights/one", "sampler_weights/two"]
    assert listed[1]["expires_at"] is not None
    assert server.get("checkpoints?limit=1")["cursor"] == {"offset": 0, "limit": 1, "total_count": 2}
    assert server.get(f"sessions/{session}")["training_run_ids"] == [model]
    step(server, model, 5)
    taken = server.done("save_weights", {"model_id": model, "seq_id": 7, "path": "one"})
    assert "exists already" in taken["error"]
    server.done("save_weights", {"model_id": model, "seq_id": 8, "path": "one", "overwrite": True})
    assert logprobs(server, server.sampler(session, 2, path), 0, [1, 2, 3]) != before
    old = server.done("asample", sample_body(f"{session}:sample:1", 1, [1, 2, 3]))
    assert "was replaced or deleted" in old["error"]
    no_state = server.done("load_weights", {"model_id": model, "seq_id": 9, "path": weights, "optimizer": True})
    assert "has no optimizer state" in no_state["error"]
    assert server.request("DELETE", f"training_runs/{model}/checkpoints/weights/one").status == 204
    assert [one["checkpoint_id"] for one in server.get("checkpoints")["checkpoints"]] == ["sampler_weights/two"]


def test_models_end_with_unload_and_with_their_lost_session(serve_tinker: Start, tmp_path: Path) -> None:
    now = [0.0]
    server = serve_tinker(tmp_path, clock=lambda: now[0], session_timeout_s=100.0)
    first, second = server.session(), server.session()
    models = [server.model(first, number) for number in range(2)]
    assert server.done("unload_model", {"model_id": models[0]}) == {"type": "unload_model", "model_id": models[0]}
    assert server.post("get_info", {"model_id": models[0]}).status == 404
    waiting = server.ask("optim_step", {"model_id": models[1], "seq_id": 5, "adam_params": ADAM})
    now[0] = 90.0
    server.ask("session_heartbeat", {"session_id": second})
    now[0] = 150.0
    assert server.on_event_loop(server.service.end_lost_sessions) == [first]
    assert server.post("get_info", {"model_id": models[1]}).status == 404
    assert server.post("retrieve_future", {"request_id": waiting["request_id"]}).status == 410
    assert server.get("sessions")["sessions"] == [second]
    sampler = server.sampler(second, 0)
    now[0] = 240.0
    assert "sequences" in server.done("asample", sample_body(sampler, 0, [1, 2]))
    now[0] = 330.0
    assert server.on_event_loop(server.service.end_lost_sessions) == [], "a client that samples is there"


def test_a_key_is_required_if_the_server_has_one(serve_tinker: Start, tmp_path: Path) -> None:
    server = serve_tinker(tmp_path, api_key="tml-right")
    assert server.post("client/config", {"sdk_version": "1"}).status == 401
    server.headers = {"x-api-key": "tml-right"}
    assert server.session()
