"""Tiny models behind real servers on loopback, each in a thread of this process, and the real `openai` client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from torch import Tensor

from burnish.gateway.http_guards import bind_socket
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.kernels.shared_prefix import Attend
from burnish.models.tokenizer import Tokenizer
from burnish.serve.app import Api
from burnish.serve.async_engine import AsyncEngine
from burnish.serve.engine_worker import EngineThread
from burnish.serve.http_server import ApiServer, server_url
from burnish.serve.request_to_engine import ServedModel, TokenScorer

START, END, PAD = "<|im_start|>", "<|im_end|>", "<pad>"
TEMPLATE = (
    "{% if tools %}<|im_start|>tools{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% if shout is defined %}<|im_start|>shout {{ shout }}<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAME = "tiny"


def byte_tokenizer(template: str | None = TEMPLATE, special: tuple[str, ...] = (START,)) -> Tokenizer:
    """One token for each byte, a few longer ones, and special tokens: characters beyond ASCII take several tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("t", "h"), ("th", "e"), ("S", "T"), ("ST", "O")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    inner: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, additional_special_tokens=list(special)
    )
    inner.chat_template = template
    return Tokenizer(inner)


class Scripted(Decoder):
    """A decoder that, whatever it is asked, says `script` from position `start` on (then its first token again and again).

    While `gate` is closed it does not compute, at positions from `hold_from` on; `fail` makes it raise.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        initialise(self, seed=0)
        self.script: list[int] = [0]
        self.start = 1
        self.hold_from = 0
        self.fail = False
        self.gate = threading.Event()
        self.gate.set()

    def say(self, script: list[int], after: int = 1) -> None:
        """Set the tokens to say after a prompt of so many tokens."""
        self.script, self.start = script, after

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, num_positions: int) -> Tensor:
        if int(positions.max()) >= self.hold_from:
            assert self.gate.wait(300), "a test left the gate closed"
        if self.fail:
            raise ZeroDivisionError("a fault in the model")
        hidden = super().forward(tokens, positions, attend, num_positions)
        return torch.cat([hidden[:, 1:], positions[:, None].to(hidden.dtype)], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        at = (hidden[:, -1].long() + 1 - self.start).tolist()
        wanted = [self.script[k] if 0 <= k < len(self.script) else self.script[0] for k in at]
        out = torch.full((len(wanted), self.arch.vocab_size), -50.0, dtype=hidden.dtype)
        out[torch.arange(len(wanted)), torch.tensor(wanted)] = 50.0
        return out


def architecture(vocab: int, max_positions: int) -> Architecture:
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 48}
    return Architecture(family="llama", vocab_size=vocab, max_positions=max_positions, **sizes)


@dataclass
class Running:
    """A running server with its engine and model."""

    model: Any
    tokenizer: Tokenizer
    served: ServedModel
    loop: AsyncEngine
    url: str
    server: ApiServer
    log: list[str] = field(default_factory=list)
    _client: openai.OpenAI | None = None
    name: str = NAME

    def client(self, **options: Any) -> openai.OpenAI:
        """A client without retries, shared by all threads, since making one is slow."""
        if self._client is None:
            self._client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=300)
        return self._client.with_options(**options) if options else self._client

    @property
    def engine(self) -> DenseEngine:
        assert isinstance(self.loop.host, EngineThread)
        assert isinstance(self.loop.host.worker.engine, DenseEngine)
        return self.loop.host.worker.engine

    def wait_until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds} s for nothing; the log says {self.log}"
            time.sleep(0.005)

    def is_idle(self) -> bool:
        return not (self.loop.num_unfinished or self.engine.waiting or len(self.engine.rows) or self.engine.prefilled)


Start = Callable[..., Running]


def start(stops: list[Callable[[], None]], model: Decoder, tokenizer: Tokenizer, **options: Any) -> Running:
    """A server on a free port; its end is added to `stops`."""
    max_rows, max_queue = options.pop("max_rows", 8), options.pop("max_queue", 64)
    max_body, api_key = options.pop("max_body", 2**20), options.pop("api_key", None)
    grace_s, limits = options.pop("grace_s", 300), options.pop("limits", None)
    served = ServedModel(
        NAME,
        tokenizer,
        model.arch.vocab_size,
        model.arch.max_positions,
        options.pop("max_tokens", None),
        options.pop("call_format", None),
    )
    assert not options
    loop = AsyncEngine(
        EngineThread(lambda listener: DenseEngine(model, max_rows, tokenizer.decode, listener)), max_rows + max_queue
    )
    log: list[str] = []
    bound = bind_socket("127.0.0.1", 0)
    server = ApiServer(
        Api(served, loop, max_body, TokenScorer(model)), api_key, grace_s, log=log.append, ready="ready", limits=limits
    )
    running = Running(model, tokenizer, served, loop, server_url(bound), server, log)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()

    def stop() -> None:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()

    stops.append(stop)
    running.wait_until(lambda: server.started)
    return running


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def plain_tokenizer() -> Tokenizer:
    """Without a chat template."""
    return byte_tokenizer(None)


@pytest.fixture(scope="session")
def random_server(tokenizer: Tokenizer) -> Iterator[Running]:
    """A random decoder in float64, whose answers do not depend on other requests; it writes random bytes."""
    model = Decoder(architecture(tokenizer.vocab_size, 2048))
    initialise(model, seed=3, std=0.3)
    stops: list[Callable[[], None]] = []
    yield start(stops, model.double(), tokenizer)
    stops[0]()


@pytest.fixture(scope="session")
def _script_server(tokenizer: Tokenizer) -> Iterator[Running]:
    stops: list[Callable[[], None]] = []
    yield start(stops, Scripted(architecture(tokenizer.vocab_size, 2**17)), tokenizer)
    stops[0]()


@pytest.fixture
def script_server(_script_server: Running) -> Iterator[Running]:
    """A model that says a given text; it must be idle at the end of a test."""
    yield _script_server
    _script_server.model.gate.set()
    _script_server.model.hold_from = 0
    _script_server.wait_until(_script_server.is_idle)


@pytest.fixture
def start_server(tokenizer: Tokenizer) -> Iterator[Start]:
    """`start_server(max_queue=1, ...)`: a scripted model behind a server of its own."""
    stops: list[Callable[[], None]] = []

    def build(**options: Any) -> Running:
        tokens = options.pop("tokenizer", tokenizer)
        return start(stops, Scripted(architecture(tokens.vocab_size, 2**17)), tokens, **options)

    yield build
    for stop in stops:
        stop()


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A tiny model as a Hugging Face directory."""
    from burnish.models.policy import PolicyModel

    path = tmp_path_factory.mktemp("models") / NAME
    path.mkdir()
    model = Decoder(architecture(tokenizer.vocab_size, 2**17))
    initialise(model, seed=5, std=0.3)
    PolicyModel(model, tokenizer, None, "").save(path)
    return path
