"""`ServerTeacher`: a teacher behind a server that speaks OpenAI's API, so that it runs in another process or on another machine.

Each sequence is sent as token ids to `/v1/completions` with `echo` and `max_tokens: 0`, and the server returns the log-prob of every
token. `burnish serve` and vLLM do. The server must serve a model with the policy's tokenizer: ids are sent, not texts.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from burnish.core.batch import Batch
from burnish.inference.server_client import ServerClient, ServerError
from burnish.training.reference import Reference

URL_KEY = "algorithm.kl.reference.url"
PATH = "/v1/completions"
MAX_CALLS = 8
"""Sequences that are scored at once."""
NUM_ATTEMPTS = 4
"""Calls of a sequence before the run ends; a server may be restarted meanwhile."""
WAIT_S = 2.0
"""Wait before the second attempt; doubled for each further one."""
TIMEOUT_S = 300.0
"""Time limit of one call."""


class ServerTeacher(Reference):
    """A reference whose log-probs a server computes, at temperature 1."""

    def __init__(self, url: str, model: str | None = None, key: str = URL_KEY) -> None:
        """`key` is the place of the url in the config. Without the name of a `model` the server has only one."""
        self.client = ServerClient("teacher", key, "http://host:8000", connect_s=10.0)
        self.url = self.client.check_url(url)
        self.name = model or self._served_model()

    @property
    def model(self) -> nn.Module:
        raise AssertionError("the model of a server is not here; the config refuses losses that need it")

    def _served_model(self) -> str:
        """The name of the only model that the server has."""
        found = self.client.call(self.url, "/v1/models", TIMEOUT_S)
        names = [one["id"] for one in found["data"]]
        if len(names) != 1:
            remedy = "set algorithm.kl.reference.served_model to one of them"
            if self.client.option != URL_KEY:
                remedy = "give each of several teachers a server with one model"
            raise self._refused("/v1/models", f"it serves {', '.join(names) or 'no model'}: {remedy}")
        return str(names[0])

    def _refused(self, path: str, reason: str) -> ServerError:
        return self.client.error("refused", self.url, path, reason)

    def _logprobs(self, batch: Batch) -> Tensor:
        """[N] log-probs at the tokens that the model wrote; 0 elsewhere."""
        mask, tokens, offsets = batch.action_mask.cpu(), batch.tokens.cpu(), batch.offsets.tolist()
        spans = list(zip(offsets[:-1], offsets[1:], strict=True))
        found = torch.zeros(batch.num_tokens)
        asked = [(start, stop) for start, stop in spans if bool(mask[start:stop].any())]
        with ThreadPoolExecutor(MAX_CALLS) as pool:
            scores = pool.map(self._score, [tokens[start:stop].tolist() for start, stop in asked])
            for (start, stop), logp in zip(asked, scores, strict=True):
                found[start:stop] = torch.tensor(logp)
        return torch.where(mask, found, torch.zeros(())).to(batch.tokens.device)

    def _score(self, tokens: list[int]) -> list[float]:
        """The log-prob of each token of a sequence; 0 for the first."""
        body = {"model": self.name, "prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 1.0}
        for attempt in range(NUM_ATTEMPTS):
            try:
                return self._parsed(self.client.call(self.url, PATH, TIMEOUT_S, body), len(tokens))
            except ServerError as error:
                if error.kind == "refused" or attempt == NUM_ATTEMPTS - 1:
                    raise
                time.sleep(WAIT_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _parsed(self, answer: Any, num_tokens: int) -> list[float]:
        try:
            logp = answer["choices"][0]["logprobs"]["token_logprobs"]
        except (KeyError, IndexError, TypeError) as error:
            reason = "its answer has no choices[0].logprobs.token_logprobs: use a server that echoes the log-probs of a prompt"
            raise self._refused(PATH, reason) from error
        logp = [0.0, *logp[1:num_tokens]]
        if len(logp) != num_tokens or any(x is None or not math.isfinite(x) for x in logp):
            reason = f"it gave {len(logp)} log-probs of {num_tokens} tokens, or some that are no numbers"
            raise self._refused(PATH, reason)
        return [float(x) for x in logp]
