"""What a sampling request asks about its prompt: log-probs of its tokens, of the likeliest and of given ones, and draws.

All come from one forward pass over the prompt, a few rows of logits at a time. Prompts of several requests are packed together.
They agree with the engine's log-probs to rounding: sums are taken in another order. Log-probs are the model's own, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from burnish.core.random_keys import fold
from burnish.models.decoder import Decoder
from burnish.serve.tinker.requests import BadRequest, JsonTensor, Sample, json_values
from burnish.serve.tinker.responses import NO_LOGPROB, PromptScores, Table, TopTable
from burnish.training.packing import pack_units, sequence_units

LOGIT_ROWS = 256
"""Positions whose logits are in memory at the same time."""
MAX_TOP = 1024
"""Most likeliest tokens, or draws, at a position."""
NOTHING = -1
"""A cell of the wanted tokens that asks for nothing."""


@dataclass(frozen=True)
class WantedTokens:
    """Tokens to score: cell i is token `ids[i]` at prompt position `rows[i]` + 1. The answer has the layout of the request."""

    ids: np.ndarray
    rows: np.ndarray
    tensor: JsonTensor
    shape: tuple[int, int]

    def answer(self, values: np.ndarray) -> Table:
        """The scores as a tensor like that of the request."""
        if self.tensor.sparse_crow_indices is None:
            return Table.dense(values.reshape(self.shape))
        pointers, columns = self.tensor.sparse_crow_indices, self.tensor.sparse_col_indices
        return Table(values, self.shape, np.asarray(pointers), np.asarray(columns))


@dataclass
class ScoredPrompt:
    """A prompt with what is asked about it, and the answers as far as they are known. `first` is the first scored position."""

    tokens: Sequence[int]
    first: int | None
    num_top: int
    wanted: WantedTokens | None
    num_draws: int
    temperature: float
    seed: int
    logprobs: np.ndarray = field(init=False)
    top: TopTable = field(init=False)
    scores: np.ndarray = field(init=False)
    draws: tuple[np.ndarray, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.tokens)
        self.logprobs = np.full(size, np.nan, np.float32)
        empty = np.zeros((size, self.num_top), np.int64), np.full((size, self.num_top), NO_LOGPROB, np.float32)
        self.top = TopTable(*empty)
        self.scores = np.zeros(0 if self.wanted is None else len(self.wanted.ids), np.float32)
        shape = max(0, size - 1), self.num_draws
        self.draws = np.zeros(shape, np.int64), np.zeros(shape, np.float32)

    @property
    def is_asked(self) -> bool:
        """Whether a forward pass is needed."""
        asks = self.first is not None or bool(self.num_top) or self.wanted is not None or bool(self.num_draws)
        return asks and len(self.tokens) > 1

    def result(self) -> PromptScores:
        """The answers; None for what was not asked."""
        return PromptScores(
            None if self.first is None else self.logprobs,
            self.top if self.num_top else None,
            None if self.wanted is None else self.wanted.answer(self.scores),
            (Table.dense(self.draws[0]), Table.dense(self.draws[1])) if self.num_draws else None,
        )


def scored_prompt(asked: Sample, tokens: Sequence[int], vocab_size: int, seed: int) -> ScoredPrompt:
    """What a request asks about its prompt; BadRequest if it cannot be answered."""
    last = asked.prompt_logprobs_last_n
    if last is not None and (not asked.prompt_logprobs or last >= len(tokens)):
        raise BadRequest(
            f"prompt_logprobs_last_n is {last}; expected 1 to {len(tokens) - 1}, the prompt's tokens but one, with prompt_logprobs"
        )
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if getattr(asked, name) > min(MAX_TOP, vocab_size):
            raise BadRequest(f"{name} is {getattr(asked, name)}; expected at most {min(MAX_TOP, vocab_size)}")
    first = None if not asked.prompt_logprobs else 1 if last is None else len(tokens) - last
    wanted = None if asked.target_prompt_logprobs is None else _wanted(asked.target_prompt_logprobs, tokens, vocab_size)
    num_top, num_draws = asked.topk_prompt_logprobs, asked.prompt_alt_tokens_k
    return ScoredPrompt(tokens, first, num_top, wanted, num_draws, asked.sampling_params.temperature, seed)


def _wanted(tensor: JsonTensor, tokens: Sequence[int], vocab_size: int) -> WantedTokens:
    shape = tensor.shape or []
    if tensor.dtype != "int64" or len(shape) != 2 or shape[0] != len(tokens) - 1:
        raise BadRequest(
            f"target_prompt_logprobs is {tensor.dtype} {shape}; expected int64 [{len(tokens) - 1}, K] for {len(tokens)} tokens"
        )
    ids = json_values(tensor)
    if tensor.sparse_crow_indices is None:
        expected = shape[0] * shape[1]
        rows = np.repeat(np.arange(shape[0]), shape[1]) if expected == len(ids) else ids[:0]
    else:
        pointers = np.asarray(tensor.sparse_crow_indices)
        steps = np.diff(pointers)
        if len(pointers) != shape[0] + 1 or pointers[0] != 0 or (steps < 0).any():
            raise BadRequest("target_prompt_logprobs has row pointers that do not fit its shape")
        rows, expected = np.repeat(np.arange(shape[0]), steps), len(tensor.sparse_col_indices or [])
    if not len(ids) == len(rows) == expected or not len(ids):
        raise BadRequest(f"target_prompt_logprobs names {len(ids)} tokens, and its shape {expected}")
    if ids.min() < NOTHING or ids.max() >= vocab_size:
        raise BadRequest(f"target_prompt_logprobs names a token outside of -1 to {vocab_size - 1}")
    return WantedTokens(ids, rows, tensor, (shape[0], shape[1]))


@torch.inference_mode()
def score_prompts(module: Decoder, prompts: Sequence[ScoredPrompt], token_budget: int) -> None:
    """Compute what is asked about the prompts."""
    asked = [prompt for prompt in prompts if prompt.is_asked]
    if not asked:
        return
    device = module.embedding.weight.device
    units = sequence_units([len(prompt.tokens) for prompt in asked], module.attention_cost)
    for part in pack_units(units, token_budget):
        members = [asked[index] for unit in part for index in unit.members]
        lengths = [len(prompt.tokens) for prompt in members]
        tokens = torch.tensor([token for prompt in members for token in prompt.tokens], device=device)
        offsets = torch.tensor(np.cumsum([0, *lengths]), device=device)
        hidden = module.hidden(tokens, offsets)
        for prompt, states in zip(members, hidden.split(lengths), strict=True):
            for start, logits in _logits(module, states[:-1]):
                _score_rows(prompt, start, logits)


def _logits(module: Decoder, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, logits in float32 at least) of consecutive rows."""
    start = 0
    for part in hidden.split(LOGIT_ROWS):
        logits = module.logits(part)
        yield start, logits.to(torch.promote_types(logits.dtype, torch.float32))
        start += len(part)


def _score_rows(prompt: ScoredPrompt, start: int, logits: Tensor) -> None:
    """Answer from the logits of rows [start, start + n): row i tells about position i + 1."""
    logp = logits.log_softmax(-1)
    positions = np.arange(start + 1, start + 1 + len(logits))
    if prompt.first is not None:
        own = torch.tensor(prompt.tokens[start + 1 : start + 1 + len(logits)], device=logits.device)
        found = logp.gather(1, own[:, None])[:, 0].float().cpu().numpy()
        in_scope = positions >= prompt.first
        prompt.logprobs[positions[in_scope]] = found[in_scope]
    if prompt.num_top:
        values, ids = logp.topk(prompt.num_top)
        rows = positions[positions >= (prompt.first or 1)]
        skipped = len(positions) - len(rows)
        prompt.top.tokens[rows] = ids.cpu().numpy()[skipped:]
        prompt.top.logprobs[rows] = values.float().cpu().numpy()[skipped:]
    if prompt.wanted is not None:
        at, wanted = prompt.wanted.rows, prompt.wanted.ids
        cells = np.nonzero((at >= start) & (at < start + len(logits)) & (wanted != NOTHING))[0]
        where = torch.as_tensor(at[cells] - start, device=logits.device)
        chosen = torch.as_tensor(wanted[cells], device=logits.device)
        prompt.scores[cells] = logp[where, chosen].float().cpu().numpy()
    if prompt.num_draws:
        _draw(prompt, start, logits, logp)


def _draw(prompt: ScoredPrompt, start: int, logits: Tensor, logp: Tensor) -> None:
    """Draw tokens at the request's temperature, with replacement; their log-probs are at temperature 1."""
    generator = torch.Generator().manual_seed(fold("prompt draws", prompt.seed, start) >> 1)
    if prompt.temperature > 0:
        weights = (logits / prompt.temperature).softmax(-1).cpu()
        drawn = torch.multinomial(weights, prompt.num_draws, replacement=True, generator=generator)
    else:
        drawn = logits.argmax(-1, keepdim=True).expand(-1, prompt.num_draws).cpu()
    rows = slice(start, start + len(logits))
    prompt.draws[0][rows] = drawn.numpy()
    prompt.draws[1][rows] = logp.cpu().gather(1, drawn).float().numpy()
