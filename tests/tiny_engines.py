"""Tiny decoders, and a reference sampler that computes every token by a full forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.core.engine import Completion, Engine, Request, SamplingOptions
from burnish.core.random_keys import fold, to_int64, uniforms
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise

NextLogits = Callable[[list[int]], Tensor]


@dataclass(frozen=True)
class Tools:
    """Functions for tests of engines, as a fixture (test modules cannot import one another)."""

    decoder: Callable[..., Decoder]
    successor: Callable[..., Decoder]
    requests: Callable[..., list[Request]]
    distribution: Callable[[Tensor, SamplingOptions], Tensor]
    reference: Callable[[NextLogits, Request], tuple[list[int], list[float], str]]
    run: Callable[[Engine, list[Request]], dict[str, Completion]]


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools(decoder, successor, requests, distribution, reference, run)


def decoder(dtype: torch.dtype = torch.float64, vocab: int = 13, seed: int = 0, **options: Any) -> Decoder:
    """A random decoder whose distributions are neither flat nor nearly certain."""
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 48,
    }  # fmt: skip
    sizes |= {"family": "llama", "vocab_size": vocab, "max_positions": 512}
    arch = Architecture(**(sizes | options))
    model = Decoder(arch)
    initialise(model, seed, std=0.3)
    return model.to(dtype)


def successor(vocab: int, dtype: torch.dtype = torch.float64) -> Decoder:
    """A decoder that always continues t with t + 1 (modulo the vocabulary), with near certainty."""
    width = vocab + vocab % 2
    model = decoder(dtype, vocab, hidden_size=width, num_heads=1, num_kv_heads=1, head_dim=width)
    with torch.no_grad():
        for layer in model.layers:
            layer.out.weight.zero_()
            layer.down.weight.zero_()
        model.embedding.weight.copy_(torch.eye(vocab, width))
        model.head_weight.copy_(100 * torch.eye(vocab, width).roll(1, 0))
    return model


def requests(prompts: list[tuple[int, ...]], n: int = 1, **options: Any) -> list[Request]:
    """`n` requests of each prompt with keys of their own."""
    sampling = SamplingOptions(**({"max_tokens": 12} | options))
    return [
        Request(f"{i}.{sample}", prompt, sampling, fold("test", i, sample))
        for i, prompt in enumerate(prompts)
        for sample in range(n)
    ]


def distribution(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Probabilities [vocab] after bias, temperature, top-k, top-p, min-p, written from the definition in plain Python."""
    logits = logits.double().clone()
    for token, value in options.logit_bias:
        logits[token] += value
    p = (logits / (options.temperature or 1.0)).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if options.top_k:
        order = order[: options.top_k]
    if options.top_p < 1:
        mass, target, kept = 0.0, options.top_p * sum(p[t] for t in order), []
        for token in order:
            if mass >= target:
                break
            kept.append(token)
            mass += p[token]
        order = kept
    order = [token for token in order if p[token] >= options.min_p * p[order[0]]]
    total = sum(p[token] for token in order)
    return torch.tensor([p[t] / total if t in order else 0.0 for t in range(len(p))], dtype=torch.float64)


def reference(next_logits: NextLogits, request: Request) -> tuple[list[int], list[float], str]:
    """Tokens, log-probs and the finish of a request: a full forward for each token, no cache, by inversion."""
    options = request.sampling
    tokens: list[int] = []
    logps: list[float] = []
    for position in range(options.max_tokens):
        p = distribution(next_logits([*request.tokens, *tokens]), options)
        u = float(uniforms(torch.tensor([to_int64(request.key)]), torch.tensor([request.generated + position])))
        token, below = 0, 0.0
        while below + float(p[token]) < u:
            below += float(p[token])
            token += 1
        if options.temperature == 0:
            token = int(p.argmax())
        tokens.append(token)
        logps.append(float(p[token].log()))
        if token in options.stop_tokens:
            return tokens, logps, "stop"
    return tokens, logps, "length"


def run(engine: Engine, wanted: list[Request]) -> dict[str, Completion]:
    """Run requests; return the completions by id. Each must come exactly once."""
    engine.submit(wanted)
    found = list(engine.stream())
    assert sorted(c.id for c in found) == sorted(r.id for r in wanted)
    for completion in found:
        assert completion.tokens.dtype == np.int64
        assert completion.logp.dtype == np.float32
        assert len(completion.tokens) == len(completion.logp)
    return {c.id: c for c in found}
