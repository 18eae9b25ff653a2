"""A server with SGLang's native endpoints, written from their documented schema, around a decoder of ours.

What it samples is real: tokens from the native engine, log-probs from a forward over prompt and completion, in the form and
under the distribution that SGLang reports. It behaves like SGLang where a client could trip over it: unknown fields are
ignored, `ignore_eos` also silences `stop_token_ids`, `length` wins over `stop`, an abort matches every id that begins alike
and one for an unknown id does nothing, a prompt with a token past the vocabulary ends the server, a cache is not emptied
while requests run. Faults come on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.model import Model
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.gateway.http_guards import bind_socket
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.decoder import Decoder
from burnish.models.policy import load_policy
from burnish.models.weight_files import load_tensors, stored_tensors
from burnish.serve.async_engine import AsyncEngine, Generation
from burnish.serve.engine_worker import EngineThread, Listener

SHAPES = (
    ("temperature", 1.0), ("top_p", 1.0), ("top_k", -1), ("min_p", 0.0), ("frequency_penalty", 0.0),
    ("presence_penalty", 0.0), ("repetition_penalty", 1.0), ("min_new_tokens", 0),
)  # fmt: skip
"""Parameters that shape a distribution, with the server's defaults."""


@dataclass
class Behaviour:
    """Version of the server."""

    version: str = "0.5.10"
    labels_weights: bool = True
    original_logprobs: bool = False
    """SGLANG_RETURN_ORIGINAL_LOGPROB."""
    logprobs: bool = True
    mask: bool = True
    """It supports `return_sampling_mask`."""
    mask_tokens: int = 4096
    """Most top-k with `return_sampling_mask`."""
    renamed: bool = False
    """The info endpoints have only their newer names."""
    memory_saver: bool = True
    context: int = 512
    longest: int | None = None
    """Tokens that fit into its cache, if less than its context minus two. Longer requests are cut silently."""
    eos: tuple[int, ...] = ()
    """End tokens of the model's own generation_config."""
    preferred: dict[str, Any] = field(default_factory=dict)
    """--preferred-sampling-params."""
    delay_s: float = 0.0
    """Seconds for each token."""
    delay_from: int = 0
    """Least tokens of the requests that are slowed down."""


class BadRequestError(Exception):
    """Answered with status 400."""


def all_logits(model: Decoder, tokens: list[int]) -> Tensor:
    """[len, vocab] of a forward over all tokens at once."""
    with torch.no_grad():
        return model.logits(model.hidden(torch.tensor(tokens), torch.tensor([0, len(tokens)]))).double()


class SglangServer:
    """Serves `model` (its tensors are overwritten by updates) at `url` between `start` and `stop`."""

    def __init__(
        self, model: Decoder, behaviour: Behaviour | None = None, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        self.model, self.behaviour, self.decode = model, behaviour or Behaviour(), decode
        self.label, self.path = "default", "/models/first"
        self.calls: list[tuple[str, Any]] = []
        self.faults: deque[str] = deque()
        """One for each of the next calls of /generate: 500, 503, 400, hang, cut (the body breaks off), bare (no log-probs),
        abort (someone else's), fine."""
        self.gate = threading.Event()
        """While it is cleared, no token is drawn after the first `free` of a request."""
        self.gate.set()
        self.free = 0
        self.busy = 0
        """How often it refuses to empty its cache, as if a request ran."""
        self.asleep: set[str] = set()
        self.running: dict[str, Generation] = {}
        self.loop = AsyncEngine(EngineThread(self._make_engine), max_unfinished=10_000)
        self._drawn: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self._server: uvicorn.Server | None = None

    # --- its life ----------------------------------------------------------------------------------------------------

    def start(self, port: int = 0) -> SglangServer:
        bound = bind_socket("127.0.0.1", port)
        self.port = bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        names = ("model_info", "server_info") if self.behaviour.renamed else ("get_model_info", "get_server_info")
        routes = [
            Route(f"/{names[0]}", self._model_info),
            Route(f"/{names[1]}", self._server_info),
            Route("/v1/models", self._models),
            Route("/generate", self._generate, methods=["POST"]),
            Route("/abort_request", self._abort, methods=["POST"]),
            Route("/flush_cache", self._flush, methods=["POST"]),
            Route("/update_weights_from_disk", self._update, methods=["POST"]),
            Route("/release_memory_occupation", self._release, methods=["POST"]),
            Route("/resume_memory_occupation", self._resume, methods=["POST"]),
        ]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([bound],), daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.002)
        return self

    def stop(self) -> None:
        """Its thread ends when it notices."""
        assert self._server is not None
        self.gate.set()
        self._server.should_exit = True

    def kill(self) -> None:
        """Act like a killed process: connections are reset and refused."""
        assert self._server is not None
        server = self._server

        def cut() -> None:
            for listening in server.servers:
                listening.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            self._event_loop.call_later(0.01, cut)  # again: a connection that was just accepted is not in the list yet

        self._event_loop.call_soon_threadsafe(cut)
        server.force_exit = True
        self.stop()
        self._thread.join(20)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> Any:
        self._event_loop = asyncio.get_running_loop()
        self.loop.start()
        yield
        self.loop.stop()

    def _make_engine(self, listener: Listener) -> DenseEngine:
        def hear(name: str, token: int) -> None:
            self._drawn[name] = self._drawn.get(name, 0) + 1
            if self.behaviour.delay_s and self._wanted[name] >= self.behaviour.delay_from:
                time.sleep(self.behaviour.delay_s)
            if self._drawn[name] >= self.free:
                assert self.gate.wait(300), "a test left the gate closed"
            listener(name, token)

        return DenseEngine(self.model, max_rows=64, decode=self.decode, listener=hear)

    # --- what it says of itself ----------------------------------------------------------------------------------------

    async def _model_info(self, request: HttpRequest) -> Response:
        info = {"model_path": self.path, "tokenizer_path": self.path, "is_generation": True}
        info["preferred_sampling_params"] = self.behaviour.preferred or None
        return JSONResponse(info | ({"weight_version": self.label} if self.behaviour.labels_weights else {}))

    async def _server_info(self, request: HttpRequest) -> Response:
        behaviour = self.behaviour
        info = {"version": behaviour.version, "enable_memory_saver": behaviour.memory_saver, "internal_states": [{}]}
        info |= {"max_total_num_tokens": 65_536, "max_req_input_len": behaviour.context - 6}
        return JSONResponse(info | ({"sampling_mask_max_tokens": behaviour.mask_tokens} if behaviour.mask else {}))

    async def _models(self, request: HttpRequest) -> Response:
        card = {"id": self.path, "object": "model", "max_model_len": self.behaviour.context}
        return JSONResponse({"object": "list", "data": [card]})

    # --- generation ----------------------------------------------------------------------------------------------------

    async def _generate(self, http: HttpRequest) -> Response:
        body = await http.json()
        self.calls.append(("/generate", body))
        fault = self.faults.popleft() if self.faults else "fine"
        if fault.isdigit():
            return JSONResponse({"error": {"message": f"a fault of the kind {fault}"}}, int(fault))
        if fault == "hang":
            await asyncio.sleep(600)
        try:
            request, limit = self._read(body)
        except BadRequestError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        if min(request.tokens) < 0 or max(request.tokens) >= self.model.arch.vocab_size:
            threading.Thread(target=self.kill).start()  # a device-side assertion
            await asyncio.sleep(600)
        if limit == 0:
            return JSONResponse(self._scored(request, body))
        self._wanted[request.id] = limit
        generation = self.loop.submit([request], wants_tokens=fault == "abort")
        self.running[request.id] = generation
        try:
            completion = await self._wait(generation, fault)
        finally:
            self.running.pop(request.id, None)
        answer = self._answer(request, completion, limit, body)
        if fault == "bare":
            del answer["meta_info"]["output_token_logprobs"]
        return _Cut(answer) if fault == "cut" else JSONResponse(answer)

    async def _wait(self, generation: Generation, fault: str) -> Completion:
        drawn = 0
        async for batch in generation.events():
            for event in batch:
                if isinstance(event.payload, Completion):
                    return event.payload
                drawn += 1
                if fault == "abort" and drawn == 2:
                    generation.cancel()
        raise AssertionError("a generation ended without a completion")

    def _read(self, body: dict[str, Any]) -> tuple[Request, int]:
        """The request for the native engine, and the most tokens asked for."""
        behaviour, vocab = self.behaviour, self.model.arch.vocab_size
        given = behaviour.preferred | body["sampling_params"]
        shape = {name: given.get(name, default) for name, default in SHAPES}
        assert shape["frequency_penalty"] == shape["presence_penalty"] == shape["min_new_tokens"] == 0, "not built here"
        assert shape["repetition_penalty"] == 1, "not built here"
        if not 0 < shape["top_p"] <= 1:
            raise BadRequestError(f"top_p must be in (0, 1], got {shape['top_p']}.")
        if shape["top_k"] < 1 and shape["top_k"] != -1:
            raise BadRequestError(f"top_k must be -1 (disable) or at least 1, got {shape['top_k']}.")
        for token in given.get("logit_bias", {}):
            if not 0 <= int(token) < vocab:
                raise BadRequestError(f"logit_bias must has keys in [0, {vocab - 1}], got {token}.")
        if behaviour.mask and body.get("return_sampling_mask") and not 1 <= shape["top_k"] <= behaviour.mask_tokens:
            raise BadRequestError(
                f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {behaviour.mask_tokens}"
            )
        tokens, limit = tuple(body["input_ids"]), given.get("max_new_tokens", 128)
        if not tokens:
            raise BadRequestError("input_ids cannot be empty.")
        if len(tokens) >= behaviour.context - 6:
            raise BadRequestError(f"Input length ({len(tokens)} tokens) exceeds the maximum allowed length.")
        if len(tokens) + limit > behaviour.context:
            raise BadRequestError(
                f"Requested token count exceeds the model's maximum context length of {behaviour.context} tokens."
            )
        most = min(limit, (behaviour.longest or behaviour.context - 2) - len(tokens))
        ends = () if given.get("ignore_eos") else (*given.get("stop_token_ids", ()), *behaviour.eos)
        greedy = shape["temperature"] == 0 or shape["top_k"] == 1
        options = SamplingOptions(
            temperature=0.0 if greedy else shape["temperature"],
            top_p=shape["top_p"],
            top_k=0 if greedy or shape["top_k"] == -1 else min(shape["top_k"], vocab),
            min_p=shape["min_p"],
            logit_bias=tuple((int(token), value) for token, value in given.get("logit_bias", {}).items()),
            max_tokens=max(1, most),
            stop_tokens=tuple(dict.fromkeys(ends)),
            stop=tuple(given.get("stop", ())),
        )
        rid = body.get("rid") or f"unnamed-{len(self.calls)}"
        if rid in self.running:
            raise BadRequestError(f"Duplicate request ID detected: {rid}")
        # Its noise follows from the position in the sequence, as that of --enable-deterministic-inference does.
        return Request(rid, tokens, options, key=given.get("sampling_seed", 42), generated=len(tokens)), most

    def _answer(self, request: Request, completion: Completion, limit: int, body: dict[str, Any]) -> dict[str, Any]:
        tokens = completion.tokens.tolist()
        if completion.finish == "aborted":
            reason: dict[str, Any] = {"type": "abort", "message": "Aborted"}
        elif len(tokens) >= limit:  # the limit is looked at first
            reason = {"type": "length", "length": limit}
        else:
            reason = {"type": "stop", "matched": tokens[-1]}
        meta = {
            "id": request.id,
            "finish_reason": reason,
            "prompt_tokens": len(request.tokens),
            "weight_version": self.label,
        }
        if not (completion.finish == "aborted" and not tokens):
            meta |= {"completion_tokens": len(tokens), "cached_tokens": 0}
            if body.get("return_logprob") and self.behaviour.logprobs:
                meta |= self._logprobs(request, tokens, body.get("top_logprobs_num", 0))
            if body.get("return_sampling_mask") and self.behaviour.mask:
                alone = request.sampling.temperature == 0  # then no other token could be drawn
                meta["output_token_sampling_logprobs"] = [0.0] * len(tokens) if alone else completion.logp.tolist()
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def _scored(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a scoring request: log-probs of its prompt from a position on, at temperature 1."""
        start, tokens = body["logprob_start_len"], request.tokens
        logp = all_logits(self.model, list(tokens)).log_softmax(-1)
        pairs = [[None, tokens[start], None]]
        pairs += [[float(logp[i - 1, tokens[i]]), tokens[i], None] for i in range(start + 1, len(tokens))]
        meta = {"finish_reason": {"type": "length", "length": 0}, "weight_version": self.label, "completion_tokens": 0}
        return {"text": "", "output_ids": [], "meta_info": meta | {"id": request.id, "input_token_logprobs": pairs}}

    def _logprobs(self, request: Request, tokens: list[int], num_top: int) -> dict[str, Any]:
        """Log-probs of the whole distribution after bias, and after temperature unless the server reports original ones."""
        options = request.sampling
        logits = all_logits(self.model, [*request.tokens, *tokens])[len(request.tokens) - 1 : -1]
        for token, value in options.logit_bias:
            logits[:, token] += value
        temperature = 1.0 if self.behaviour.original_logprobs else options.temperature or 1.0
        logp = (logits / temperature).log_softmax(-1)
        found = {"output_token_logprobs": [[float(row[t]), t, None] for row, t in zip(logp, tokens, strict=True)]}
        if num_top:
            top = logp.topk(num_top, -1)
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            found["output_top_logprobs"] = [[[v, i, None] for v, i in zip(*pair, strict=True)] for pair in pairs]
        return found

    # --- control -------------------------------------------------------------------------------------------------------

    async def _abort(self, http: HttpRequest) -> Response:
        body = await http.json()
        self.calls.append(("/abort_request", body))
        if body.get("abort_all") or body["rid"] in self.running:
            for name, generation in list(self.running.items()):
                if name.startswith(body["rid"]):
                    generation.cancel()
        return Response()

    async def _flush(self, http: HttpRequest) -> Response:
        self.calls.append(("/flush_cache", None))
        self.busy -= 1
        return PlainTextResponse("Cache flushed.", 400 if self.running or self.busy >= 0 else 200)

    async def _update(self, http: HttpRequest) -> Response:
        body = await http.json()
        self.calls.append(("/update_weights_from_disk", body))
        try:
            assert not self.running, "an update waits until nothing runs; no test needs that"
            load_tensors(self.model, stored_tensors(Path(body["model_path"])), body["model_path"])
        except UserError as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        self.path, self.label = body["model_path"], body.get("weight_version") or self.label
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def _release(self, http: HttpRequest) -> Response:
        body = await http.json()
        self.calls.append(("/release_memory_occupation", body))
        self.asleep |= set(body.get("tags") or ("kv_cache", "weights"))
        return JSONResponse(None)

    async def _resume(self, http: HttpRequest) -> Response:
        body = await http.json()
        self.calls.append(("/resume_memory_occupation", body))
        self.asleep -= set(body.get("tags") or ("kv_cache", "weights"))
        return JSONResponse(None)


class _Cut(JSONResponse):
    """An answer whose connection breaks in the middle."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": bytes(self.body[: len(self.body) // 2]), "more_body": True})
        raise ConnectionResetError("cut on purpose")


def main(directory: Path, port: int) -> None:
    """Serve a model directory until the process is killed."""
    policy = load_policy(Model(path=str(directory), dtype="float64", device="cpu"), directory, None, seed=0)
    assert isinstance(policy.module, Decoder)
    SglangServer(policy.module, decode=policy.tokenizer.decode).start(port)
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
