"""A vLLM server as an engine.

Each request in flight is one call of `/v1/completions` in its own thread, at most `max_rows` at a time; the server batches them.
Calls do not stream: an aborted call is answered with the tokens so far. New weights are files in a folder that the server reads
(`/collective_rpc` of vLLM's `reload_weights`, or `/v1/load_lora_adapter`). The prefix cache is then emptied and the weights get a
label. `stream` compares the label, which finds a server that was restarted.

Randomness is that of the engine in this process. The server finds stop strings with its own tokenizer.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Vllm
from burnish.core.engine import Completion, CompletionFinish, Request
from burnish.inference.engine_common import check_requests, enqueue_by_priority, needs_scoring
from burnish.inference.server_client import ServerError, write_weight_files
from burnish.inference.vllm import vllm_requests
from burnish.inference.vllm.vllm_requests import (
    VLLM,
    PartialCompletion,
    check_server_request,
    completion_body,
    inspect_server,
    sampling_params,
    scoring_params,
)
from burnish.inference.vllm.vllm_weights import WeightUpdate, verify_weights, write_adapter
from burnish.inference.weight_sync import probe_request
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel

MAX_LOGIT_BIAS = 100.0
"""A server clips a larger bias to this."""
ABORT_RETRY_S = 0.25
"""Seconds between two aborts. One that arrives before its request has no effect, so it is repeated."""
FINISH_REASONS: dict[str, CompletionFinish] = {"stop": "stop", "length": "length", "abort": "aborted"}


class VllmServer:
    """Samples from a server of the policy's model."""

    def __init__(self, policy: PolicyModel, options: Vllm, max_rows: int = 256) -> None:
        assert options.url is not None, "VllmEngine is for vLLM in this process"
        self.policy, self.max_rows, self.timeout_s = policy, max_rows, options.timeout_s
        self.vocab_size = _vocab_size(policy)
        adapters = policy.lora is not None and policy.is_plain_below
        self.info = inspect_server(VLLM.check_url(options.url), self.vocab_size, adapters)
        self.update = WeightUpdate(policy, adapters, wide=self.info.dtype == "float32")
        self.version = 0
        self.ready: deque[Completion] = deque()
        self._root = _weights_root(options.weights_dir)
        self._owner = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        self._name = uuid.uuid4().hex[:8]
        self._num_calls = self._num_loads = 0
        self._label: str | None = None
        self._waiting: deque[Request] = deque()
        self._waiting_ids: set[str] = set()
        self._running: dict[str, _RequestThread] = {}
        self._ended: queue.SimpleQueue[_RequestThread | None] = (
            queue.SimpleQueue()
        )  # None wakes `stream` to check for an interrupt
        self._interrupted = self._has_weights = self._asleep = False

    # --- the Engine protocol -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        check = partial(check_server_request, vocab_size=self.vocab_size, max_positions=self.info.max_positions)
        undelivered = {completion.id for completion in self.ready}
        check_requests(requests, (self._waiting_ids, self._running, undelivered), check)
        for request in requests:
            if large := [token for token, value in request.sampling.logit_bias if abs(value) > MAX_LOGIT_BIAS]:
                raise UserError(
                    f"request {request.id}: the bias of token {large[0]} is past the {MAX_LOGIT_BIAS:g} that a vLLM server accepts"
                )
            if self.update.adapters and needs_scoring(request.sampling):
                raise UserError(
                    f"request {request.id}: a vLLM server with adapters gives no raw log-probs that differ from the sampled ones"
                )
        if not self._has_weights:
            self.load(self.version, ())
        self.wake()
        enqueue_by_priority(self._waiting, requests)
        self._waiting_ids.update(request.id for request in requests)

    def stream(self) -> Iterator[Completion]:
        """Yield completions. A failed request raises once; the others continue in the next stream."""
        if self._known():
            self._check_label()
        while self.ready or ((self._waiting or self._running) and not self._interrupted):
            if not self.ready:
                self._start()
                self._collect(self._ended.get())
            while self.ready:
                yield self.ready.popleft()
                self._start()
        self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = True
        self._ended.put(None)

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        wanted = set(ids)
        if unknown := wanted - self._known():
            raise KeyError(f"cannot abort requests that are not running: {sorted(unknown)[:3]}")
        threads = [thread for name, thread in self._running.items() if name in wanted]
        deadline = time.monotonic() + self.timeout_s
        while left := [thread for thread in threads if not thread.is_done.is_set()]:
            self._post(vllm_requests.ABORT_REQUESTS, {"request_ids": [thread.server_id for thread in left]})
            left[0].is_done.wait(ABORT_RETRY_S)
            if time.monotonic() > deadline:
                raise VLLM.error(
                    "failed",
                    self.info.url,
                    vllm_requests.ABORT_REQUESTS,
                    f"{len(left)} requests did not end within {self.timeout_s:g} s",
                )
        for thread in threads:
            self._collect(thread)
        self.ready.extend(PartialCompletion(r).completion(self.version) for r in self._waiting if r.id in wanted)
        self._waiting = deque(r for r in self._waiting if r.id not in wanted)
        self._waiting_ids.difference_update(wanted)
        kept = [completion for completion in self.ready if completion.id in wanted]
        self.ready = deque(completion for completion in self.ready if completion.id not in wanted)
        return kept if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if busy := len(self._running) + len(self._waiting):
            raise RuntimeError(f"new weights while {busy} rows are running: finish or abort them first")
        self.wake()
        self._has_weights = False  # until the load is complete
        self._num_loads += 1
        label = f"{self._name}-{self._num_loads}"
        folder = self._root / label
        tensors = self.update.tensors(named_tensors)
        if self.update.adapters:
            self._load_adapter(folder, label, tensors)
        else:
            write_weight_files(folder, tensors)
            self._reload(folder)
        if not self._post(vllm_requests.RESET_PREFIX_CACHE, {}).get("success", True):
            raise VLLM.error(
                "failed",
                self.info.url,
                vllm_requests.RESET_PREFIX_CACHE,
                "it did not empty its prefix cache after new weights",
            )
        if self.info.has_labels:
            self._post(vllm_requests.SET_LABEL, {"new_version": label})
        if self._label is not None:
            shutil.rmtree(self._root / self._label, ignore_errors=True)
        self._label, self.version = label, version
        if self.update.is_own and self.policy.part.count == 1:
            self._verify()
        self._has_weights = True

    def sleep(self) -> None:
        """Free the memory of a server that was started with --enable-sleep-mode; do nothing for others."""
        if busy := len(self._running) + len(self._waiting):
            raise RuntimeError(f"the engine cannot sleep with {busy} requests unfinished")
        if self.info.can_sleep and not self._asleep:
            self._post("/sleep?level=1", {})
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._post("/wake_up", {})
            self._asleep = False

    # --- requests ------------------------------------------------------------------------------------------------------

    def _known(self) -> set[str]:
        return self._running.keys() | self._waiting_ids | {completion.id for completion in self.ready}

    def _start(self) -> None:
        """Start waiting requests up to `max_rows`."""
        while self._waiting and len(self._running) < self.max_rows:
            self._num_calls += 1
            request = self._waiting.popleft()
            self._waiting_ids.discard(request.id)
            thread = _RequestThread(self, request, f"{self._name}-{self._num_calls}")
            self._running[thread.state.request.id] = thread
            thread.start()

    def _collect(self, thread: _RequestThread | None) -> None:
        """Turn an ended call into a completion, once; raise its error if it failed."""
        if thread is None or self._running.get(thread.state.request.id) is not thread:
            return
        del self._running[thread.state.request.id]
        if thread.error is not None:
            raise thread.error
        self.ready.append(thread.state.completion(self.version))

    # --- the server ----------------------------------------------------------------------------------------------------

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = VLLM.call(self.info.url, path, self.timeout_s, body)
        return answer if isinstance(answer, dict) else {}

    def _reload(self, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            self._post(vllm_requests.COLLECTIVE_RPC, body)
        except ServerError as error:
            raise UserError(
                f"{error}; the server must be able to read {folder} (rollout.vllm.weights_dir) and serve the policy's model"
            ) from error

    def _load_adapter(self, folder: Path, label: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        write_adapter(folder, self.policy, tensors)
        if self._label is not None:
            self._post(vllm_requests.UNLOAD_ADAPTER, {"lora_name": self._label})
        try:
            self._post(vllm_requests.LOAD_ADAPTER, {"lora_name": label, "lora_path": str(folder)})
        except ServerError as error:
            raise UserError(
                f"{error}; the server must be able to read {folder} (rollout.vllm.weights_dir) and run with a --max-lora-rank of "
                "the adapters' rank or more"
            ) from error

    def _check_label(self) -> None:
        """Raise if the server no longer has the weights it was sent."""
        if not self.info.has_labels:
            return
        found = VLLM.call(self.info.url, vllm_requests.GET_LABEL, self.timeout_s).get("weight_version")
        if found != self._label:
            raise VLLM.error(
                "failed",
                self.info.url,
                vllm_requests.GET_LABEL,
                f"it has weights {found!r} and not {self._label!r}: was it started again?",
            )

    def _verify(self) -> None:
        probe = probe_request(self.vocab_size, self.info.max_positions)
        thread = _RequestThread(self, probe, f"{self._name}-probe-{self._num_loads}")
        thread.draw()
        dtype = self.info.dtype or "bfloat16"  # the widest tolerance if the server does not say its type
        verify_weights(self.policy, probe, thread.state.completion(self.version), dtype, f"vLLM server {self.info.url}")


class _RequestThread(threading.Thread):
    """One request in flight: a call for its tokens, and a second one if raw log-probs must be scored."""

    def __init__(self, server: VllmServer, request: Request, name: str) -> None:
        super().__init__(name=f"vllm {request.id}", daemon=True)
        self.state = PartialCompletion(request)
        self.error: Exception | None = None
        self.is_done = threading.Event()
        self.server_id = f"cmpl-{name}-0"
        """The server's id of the request."""
        self._server, self._call_name = server, name

    def run(self) -> None:
        try:
            self.draw()
        except Exception as error:  # noqa: BLE001 (raised by `stream`)
            self.error = error
        self.is_done.set()
        self._server._ended.put(self)

    def draw(self) -> None:
        server, request, state = self._server, self.state.request, self.state
        options = sampling_params(request) | {"stop": list(request.sampling.stop)}
        options["priority"] = -request.priority if server.info.has_priorities else 0
        choice = self._ask(options, list(request.tokens), self._call_name)
        try:
            state.tokens = [int(token) for token in choice["token_ids"]]
            state.logp = [float(value) for value in choice["logprobs"]["token_logprobs"]] if state.tokens else []
            state.finish = FINISH_REASONS[choice["finish_reason"]]
            if len(state.tokens) != len(state.logp):
                raise ValueError(f"{len(state.tokens)} tokens with {len(state.logp)} log-probs")
            if state.tokens and needs_scoring(request.sampling):
                *before, last = (*request.tokens, *state.tokens)
                state.raw_logp = _raw_logprobs(
                    self._ask(scoring_params(last), before, self._call_name + "-raw"), len(request.tokens), last
                )
        except (KeyError, TypeError, ValueError) as error:
            raise VLLM.error(
                "failed", server.info.url, vllm_requests.COMPLETIONS, f"its answer cannot be read ({error!r})"
            ) from error

    def _ask(self, options: dict[str, Any], tokens: list[int], name: str) -> Any:
        server = self._server
        model = server._label if server.update.adapters else None
        answer = VLLM.call(
            server.info.url, vllm_requests.COMPLETIONS, server.timeout_s, completion_body(options, tokens, name, model)
        )
        try:
            return answer["choices"][0]
        except (KeyError, TypeError, IndexError) as error:
            raise VLLM.error(
                "failed", server.info.url, vllm_requests.COMPLETIONS, f"its answer has no choices: {answer}"
            ) from error


def _raw_logprobs(choice: Any, start: int, last: int) -> list[float]:
    """The model's own log-probs of a completion, from a scoring pass whose prompt has all tokens but the last."""
    tokens = choice["prompt_token_ids"]
    inside = [float(choice["prompt_logprobs"][i][str(tokens[i])]["logprob"]) for i in range(start, len(tokens))]
    return [*inside, float(choice["logprobs"]["top_logprobs"][0][f"token_id:{last}"])]


def _vocab_size(policy: PolicyModel) -> int:
    module = policy.module
    if isinstance(module, Decoder):
        return module.arch.vocab_size
    return int(module.inner.get_input_embeddings().num_embeddings)


def _weights_root(weights_dir: str | None) -> Path:
    """Make a folder for the weights of this engine."""
    if weights_dir is not None:
        Path(weights_dir).mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="burnish-weights-", dir=weights_dir)).absolute()
    if weights_dir is not None:
        root.chmod(0o755)  # the server may run as another user
    return root
