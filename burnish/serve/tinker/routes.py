"""The routes of the training API (all below /api/v1), as the stock `tinker` client calls them.

POST client/config, client/dynamic_config, telemetry        what the client asks at its start
GET  healthz, get_server_capabilities                       the server and its base model
POST create_session, session_heartbeat                      a client
POST create_model, load_weights, get_info, unload_model     models
POST forward_backward, forward, optim_step                  training
POST save_weights, save_weights_for_sampler                 checkpoints and sampler weights
POST create_sampling_session, join_sampling_session, asample
POST retrieve_future, cancel_future                         results
POST weights_info; GET training_runs, checkpoints, sessions, samplers and one of each; DELETE a checkpoint

Requests that take time return a future. `retrieve_future` waits for its result, and answers 408 if there is none yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from burnish.config.errors import UserError
from burnish.gateway.openai_schema import ApiError
from burnish.gateway.request_bodies import BodyReader
from burnish.serve.tinker import listings
from burnish.serve.tinker.protobuf import MalformedMessage, int_of, read_fields, text_of
from burnish.serve.tinker.requests import (
    BadRequest,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    ForwardBackward,
    Heartbeat,
    JoinSamplingSession,
    LoadWeights,
    ModelRequest,
    OptimStep,
    RetrieveFuture,
    Sample,
    SaveWeights,
    WeightsInfo,
    forward_backward_from_json,
    forward_backward_from_protobuf,
    parse_json,
)
from burnish.serve.tinker.responses import JSON, PROTOBUF, Result, SampleOutput, TrainingOutput
from burnish.serve.tinker.service import TinkerService
from burnish.serve.tinker.state import NotFound

PREFIX = "/api/v1"
POLL_S = 20.0
"""How long `retrieve_future` waits. The client gives up after 45 s."""
SWEEP_S = 60.0
"""Time between two looks for lost sessions and expired checkpoints."""
CLIENT_CLOSED_REQUEST = 499
NO_EXTERNAL = "save_weights_external is not served here: checkpoints of save_weights_for_sampler are PEFT or Hugging Face folders on the server's disk"
M = TypeVar("M", bound=BaseModel)
Endpoint = Callable[[Request], Awaitable[Response]]


class ModelIds(BaseModel):
    """The model and the number of a request, whatever else it holds."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    model_id: str
    seq_id: int | None = None


class Routes:
    """The endpoints around a service."""

    def __init__(
        self, service: TinkerService, max_body: int, max_concurrent_samples: int, log: Callable[[str], None]
    ) -> None:
        self.service, self.log = service, log
        self.max_concurrent_samples = max_concurrent_samples
        self.bodies = BodyReader(max_body, content_types=(JSON, PROTOBUF))
        self.poll_s = POLL_S

    # --- the client's start ------------------------------------------------------------------------------------------------

    async def client_config(self, request: Request) -> Response:
        """What the client may use: an API key as it is, plain bodies, and losses that run on its side."""
        await self.bodies.work(request, lambda data: None)
        return JSONResponse(
            {
                "pjwt_auth_enabled": False,
                "proto_compress_fwdbwd": False,
                "sample_use_retrieve_futures": False,
                "custom_loss_server_side": False,
                "sample_join_sampling_session": True,
                "sample_max_concurrent_requests": self.max_concurrent_samples,
            }
        )

    async def dynamic_config(self, request: Request) -> Response:
        """A client cancels sampling requests whose results it no longer wants."""
        await self.bodies.work(request, lambda data: None)
        return JSONResponse({"sample_cancel_enabled": True})

    async def telemetry(self, request: Request) -> Response:
        """Accepted and not kept."""
        await self.bodies.work(request, lambda data: None)
        return JSONResponse({"status": "accepted"})

    async def health(self, request: Request) -> Response:
        """Whether the server runs."""
        return JSONResponse({"status": "ok"})

    # --- requests ----------------------------------------------------------------------------------------------------------

    def json(self, kind: type[M], answer: Callable[[M], dict[str, Any]]) -> Endpoint:
        """The endpoint of a JSON request."""

        async def endpoint(request: Request) -> Response:
            asked = await self.bodies.work(request, lambda data: parse_json(kind, data))
            return JSONResponse(answer(asked))

        return endpoint

    def model_request(self, kind: type[M], answer: Callable[[M], dict[str, Any]]) -> Endpoint:
        """The endpoint of a numbered request of a model. One that cannot be read gets a future that fails."""

        def parse(data: bytearray) -> M | tuple[ModelIds, BadRequest]:
            try:
                return parse_json(kind, data)
            except BadRequest as error:
                return parse_json(ModelIds, data), error

        async def endpoint(request: Request) -> Response:
            asked = await self.bodies.work(request, parse)
            if isinstance(asked, tuple):
                return JSONResponse(self.service.refuse(asked[0].model_id, asked[0].seq_id, asked[1]))
            return JSONResponse(answer(asked))

        return endpoint

    def training(self, forward_only: bool | None = None) -> Endpoint:
        """`forward_backward` and `forward`, in protobuf or in JSON."""

        async def endpoint(request: Request) -> Response:
            if request.headers.get("content-encoding", "identity") != "identity":
                raise BadRequest("a compressed body: this server's client/config asks for plain ones")
            is_binary = request.headers.get("content-type", "").startswith(PROTOBUF)
            asked = await self.bodies.work(request, _training_parser(is_binary))
            if isinstance(asked, tuple):
                return JSONResponse(self.service.refuse(asked[0].model_id, asked[0].seq_id, asked[1]))
            if forward_only is not None:
                asked.forward_only = forward_only
            return JSONResponse(self.service.forward_backward(asked))

        return endpoint

    def refuse_external(self, asked: SaveWeights) -> dict[str, Any]:
        """The future of a request that is not served."""
        return self.service.refuse(asked.model_id, asked.seq_id, BadRequest(NO_EXTERNAL))

    def join_sampling_session(self, asked: JoinSamplingSession) -> dict[str, Any]:
        """A number for another client of a sampler."""
        entry = self.service.sampler(asked.sampling_session_id)
        number, entry.num_clients = entry.num_clients, entry.num_clients + 1
        return {"type": "join_sampling_session", "client_counter": number}

    # --- results -----------------------------------------------------------------------------------------------------------

    async def retrieve_future(self, request: Request) -> Response:
        """The result of a request, once there is one."""
        asked = await self.bodies.work(request, lambda data: parse_json(RetrieveFuture, data))
        try:
            result = await self.service.futures.wait(asked.request_id, self.poll_s)
        except KeyError:
            text = f"there is no request {asked.request_id}: its session has ended, or the server was started again"
            return _error(410, text)
        if result is None:
            still = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return JSONResponse(still, 408)
        return await asyncio.to_thread(_encoded, result, PROTOBUF in request.headers.get("accept", ""))

    async def cancel_future(self, request: Request) -> Response:
        """Stop a sampling request."""
        asked = await self.bodies.work(request, lambda data: parse_json(RetrieveFuture, data))
        self.service.cancel(asked.request_id)
        return Response(status_code=204)

    # --- questions ---------------------------------------------------------------------------------------------------------

    def question(self, answer: Callable[..., dict[str, Any]], *names: str, paged: bool = False) -> Endpoint:
        """An endpoint that answers from files and state: `answer(service, path parameters..., offset and limit)`."""

        async def endpoint(request: Request) -> Response:
            values: list[Any] = [request.path_params[name] for name in names]
            if paged:
                values += _page(request)
            return JSONResponse(await asyncio.to_thread(answer, self.service, *values))

        return endpoint

    async def delete_checkpoint(self, request: Request) -> Response:
        """Delete a checkpoint."""
        parts = request.path_params
        path = f"tinker://{parts['model_id']}/{parts['folder']}/{parts['name']}"
        await asyncio.to_thread(self.service.store.delete, path)
        return Response(status_code=204)

    async def sessions(self, request: Request) -> Response:
        """The ids of all sessions."""
        offset, limit = _page(request)
        return JSONResponse({"sessions": list(self.service.sessions)[offset : offset + limit]})

    def table(self) -> list[Route]:
        """All routes."""
        service = self.service
        post: dict[str, Endpoint] = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "telemetry": self.telemetry,
            "create_session": self.json(CreateSession, service.create_session),
            "session_heartbeat": self.json(Heartbeat, lambda asked: service.heartbeat(asked.session_id)),
            "create_model": self.json(CreateModel, service.create_model),
            "load_weights": self.model_request(LoadWeights, service.load_weights),
            "get_info": self.json(ModelRequest, lambda asked: service.get_info(asked.model_id)),
            "unload_model": self.json(ModelRequest, lambda asked: service.unload_model(asked.model_id)),
            "forward_backward": self.training(),
            "forward": self.training(forward_only=True),
            "optim_step": self.model_request(OptimStep, service.optim_step),
            "save_weights": self.model_request(SaveWeights, lambda asked: service.save_weights(asked, "weights")),
            "save_weights_for_sampler": self.model_request(
                SaveWeights, lambda asked: service.save_weights(asked, "sampler_weights")
            ),
            "save_weights_external": self.model_request(SaveWeights, self.refuse_external),
            "create_sampling_session": self.json(CreateSamplingSession, service.create_sampling_session),
            "join_sampling_session": self.json(JoinSamplingSession, self.join_sampling_session),
            "asample": self.json(Sample, service.sample),
            "retrieve_future": self.retrieve_future,
            "cancel_future": self.cancel_future,
            "weights_info": self.json(WeightsInfo, lambda asked: listings.weights_info(service, asked.tinker_path)),
        }
        get: dict[str, Endpoint] = {
            "healthz": self.health,
            "get_server_capabilities": self.question(listings.capabilities),
            "training_runs": self.question(listings.training_runs, paged=True),
            "training_runs/{model_id}": self.question(listings.training_run, "model_id"),
            "training_runs/{model_id}/checkpoints": self.question(listings.checkpoints, "model_id"),
            "checkpoints": self.question(listings.all_checkpoints, paged=True),
            "sessions": self.sessions,
            "sessions/{session_id}": self.question(listings.session, "session_id"),
            "samplers/{sampler_id}": self.question(listings.sampler, "sampler_id"),
        }
        checkpoint = f"{PREFIX}/training_runs/{{model_id}}/checkpoints/{{folder}}/{{name}}"
        return [
            *[Route(f"{PREFIX}/{path}", endpoint, methods=["POST"]) for path, endpoint in post.items()],
            *[Route(f"{PREFIX}/{path}", endpoint) for path, endpoint in get.items()],
            Route(checkpoint, self.delete_checkpoint, methods=["DELETE"]),
        ]

    async def sweep(self) -> None:
        """Drop lost sessions and expired checkpoints from time to time."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for session_id in self.service.end_lost_sessions():
                self.log(f"session {session_id} has ended: no heartbeat for {self.service.session_timeout_s:g} s")
            try:
                deleted = await asyncio.to_thread(self.service.store.delete_expired)
            except Exception as error:  # noqa: BLE001 - a damaged checkpoint must not end the search for lost sessions
                self.log(f"expired checkpoints below {self.service.store.root} could not be deleted: {error!r}")
                continue
            for path in deleted:
                self.log(f"deleted {path}: its time is over")


def _training_parser(
    is_binary: bool,
) -> Callable[[bytearray], ForwardBackward | tuple[ModelIds, BadRequest]]:
    def parse(data: bytearray) -> ForwardBackward | tuple[ModelIds, BadRequest]:
        try:
            return forward_backward_from_protobuf(data) if is_binary else forward_backward_from_json(data)
        except BadRequest as error:
            return (_binary_ids(data) if is_binary else parse_json(ModelIds, data)), error

    return parse


def _binary_ids(data: bytearray) -> ModelIds:
    """Model and number of a ForwardBackwardRequest whose other fields are wrong."""
    found: dict[str, Any] = {}
    try:
        for number, value in read_fields(data):
            if number == 1:
                found["model_id"] = text_of(value)
            elif number == 2:
                found["seq_id"] = int_of(value)
    except MalformedMessage as error:
        if len(found) < 2:
            raise BadRequest(f"the body is no ForwardBackwardRequest: {error}") from error
    if "model_id" not in found:
        raise BadRequest("the body is no ForwardBackwardRequest: it names no model")
    return ModelIds(**found)


def _encoded(result: Result, wants_protobuf: bool) -> Response:
    """A result as the client accepts it."""
    if wants_protobuf and isinstance(result, TrainingOutput | SampleOutput):
        return Response(result.to_protobuf(), media_type=PROTOBUF)
    return Response(to_json(result.to_json(), inf_nan_mode="constants"), media_type=JSON)


def _page(request: Request) -> list[int]:
    """Offset and limit of a listing."""
    found = []
    for name, default, most in (("offset", 0, 2**31), ("limit", listings.PAGE, listings.MAX_PAGE)):
        text = request.query_params.get(name, str(default))
        if not text.isdecimal():
            raise BadRequest(f"{name} is {text!r}; expected a whole number")
        found.append(min(int(text), most))
    return found


# --- the application -----------------------------------------------------------------------------------------------------


def make_app(routes: Routes) -> Starlette:
    """The application. The worker starts and stops with it."""
    service = routes.service

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.futures.loop = asyncio.get_running_loop()
        service.worker.start()
        sweeping = asyncio.create_task(routes.sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await asyncio.to_thread(service.worker.stop)

    return Starlette(
        routes=routes.table(),
        lifespan=lifespan,
        exception_handlers={
            BadRequest: lambda request, error: _error(400, str(error)),
            UserError: lambda request, error: _error(400, str(error)),
            NotFound: lambda request, error: _error(404, str(error)),
            ApiError: _api_error,
            HTTPException: _routing_error,
            ClientDisconnect: lambda request, error: Response(status_code=CLIENT_CLOSED_REQUEST),
            Exception: lambda request, error: _error(500, "the server failed; its log has the cause", "server"),
        },
    )


def _error(status: int, text: str, category: str = "user") -> Response:
    """An error in the form of a failed request."""
    return JSONResponse({"error": text, "category": category}, status)


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error.status, error.message)


def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{request.method} {request.url.path} is not served here: {error.detail}")
