"""Conversion of API requests to engine requests, and log-probs of given tokens.

The engine returns the log-prob of each drawn token only. Log-probs of a prompt (`echo`) and of alternatives (`top_logprobs`) are
computed here by one forward pass over the sequence, on the same weights. They agree with the engine's to rounding: sums are taken in
another order, and an 8-bit cache rounds what the engine reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from burnish.config.errors import UserError, did_you_mean
from burnish.core.engine import Request, SamplingOptions
from burnish.core.pictures import PictureSpan, distinct_tokens
from burnish.core.random_keys import fold
from burnish.data.template import check_all_placed, media_for, place_pictures
from burnish.environments.tools.call_formats import CallFormat, call_format, detect_format
from burnish.evaluation.strategies.verifiers import SelfCertainty
from burnish.gateway.chat_messages import RESERVED_VARIABLES, template_message
from burnish.gateway.image_parts import content_of, opened
from burnish.gateway.openai_schema import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    bad_value,
    draws_likeliest,
    num_alternatives,
    validate_fields,
)
from burnish.gateway.request_bodies import TextLimit
from burnish.inference.engine_common import MAX_BIASES
from burnish.inference.native.sampler import add_bias, truncate
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.models.transformers_model import TransformersPolicy
from burnish.rewards.score_types import ScoreRequest

MAX_SCORED_TOKENS = 16384
"""Longest sequence that is scored: one forward pass needs memory besides the engine's cache."""
LOGIT_ROWS = 256
"""Positions whose logits are in memory at the same time."""


@dataclass
class TokenScores:
    """Log-probs of consecutive tokens of a sequence."""

    logp: list[float] = field(default_factory=list)
    """Log-probs of the tokens."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at each position with their log-probs; fewer if fewer can be drawn."""


class Scorer(Protocol):
    """Scores sequences."""

    def score(
        self, tokens: Sequence[int], first: int, num_top: int, options: SamplingOptions | None = None
    ) -> TokenScores:
        """Score the tokens from `first` on, under the model itself or under the distribution of `options`."""

    def self_certainty(self, paths: Sequence[ScoreRequest]) -> list[float]:
        """Return the self-certainty of each path of a search."""


@dataclass(frozen=True)
class TokenScorer:
    """Scores sequences with the engine's module, so only the engine's thread may call it."""

    module: Decoder | TransformersPolicy

    @torch.inference_mode()
    def score(
        self, tokens: Sequence[int], first: int, num_top: int, options: SamplingOptions | None = None
    ) -> TokenScores:
        """Score the tokens from `first` on, under the model itself or under the distribution of `options`."""
        device = next(self.module.parameters()).device
        packed = torch.tensor(tokens, device=device)
        found = TokenScores()
        start = first
        for logits in self._logits(packed, first):
            logp = _log_probs(logits, options)
            drawn = packed[start : start + len(logp)]
            found.logp += logp.gather(1, drawn[:, None])[:, 0].tolist()
            values, ids = logp.topk(min(num_top, logp.shape[1]))
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            found.top += [[(i, x) for i, x in zip(*row, strict=True) if x != -torch.inf] for row in pairs]
            start += len(logp)
        return found

    def self_certainty(self, paths: Sequence[ScoreRequest]) -> list[float]:
        """Return the self-certainty of each path of a search."""
        return SelfCertainty(self.module)(paths)

    def _logits(self, tokens: Tensor, first: int) -> Iterator[Tensor]:
        """Yield the logits of the positions from `first` on, in order, as [up to ROWS, vocab]."""
        if not isinstance(self.module, Decoder):
            yield from (
                self.module.inner(input_ids=tokens[None], use_cache=False).logits[0, first - 1 : -1].split(LOGIT_ROWS)
            )
            return
        offsets = torch.tensor([0, len(tokens)], device=tokens.device)
        hidden, _ = self.module.states(tokens, offsets, torch.arange(first - 1, len(tokens) - 1, device=tokens.device))
        for part in hidden.split(LOGIT_ROWS):
            yield self.module.logits(part)


def _log_probs(logits: Tensor, options: SamplingOptions | None) -> Tensor:
    """Log-probs [n, vocab] as the sampler computes them, in float32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options is None:
        return logits.log_softmax(-1)
    if options.logit_bias:
        logits = add_bias(logits, [options.logit_bias] * len(logits))
    scale = options.temperature or 1.0  # greedy log-probs are untempered

    def column(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((len(logits),), value, dtype=dtype, device=logits.device)

    if options.top_k or options.top_p < 1 or options.min_p > 0:
        tails = column(options.top_k, torch.int64), column(options.top_p), column(options.min_p)
        logits = truncate(logits, column(scale), *tails)
    return (logits / scale).log_softmax(-1)


@dataclass(frozen=True)
class ServedModel:
    """The served model and its limits."""

    name: str
    tokenizer: Tokenizer
    num_embeddings: int
    max_positions: int | None
    """Longest sequence of the model and the cache; None if unknown."""
    max_tokens: int | None = None
    """Most new tokens of a completion, if the server limits them further."""
    call_format: str | None = None
    """Format of the model's tool calls; None: the one that its chat template names."""
    image_folder: Path | None = None
    """Folder whose images clients may name by their paths; None: they send images as data URLs."""

    @cached_property
    def tool_calls(self) -> CallFormat:
        """The format in which the model calls tools."""
        try:
            return call_format(self.call_format or detect_format(self.tokenizer))
        except UserError as error:
            raise bad_value(
                "tools",
                "the chat template of this model names no known format of tool calls: start the server with --call-format",
                "unsupported_parameter",
            ) from error

    @cached_property
    def text_limit(self) -> TextLimit:
        """The check for texts that are certainly too long."""
        return TextLimit(self.tokenizer, self.max_positions)


class EnginePrompt(NamedTuple):
    """The prompt of a request for the engine."""

    tokens: tuple[int, ...]
    pictures: tuple[PictureSpan, ...] = ()


def completion_prompts(request: CompletionRequest, served: ServedModel) -> list[EnginePrompt]:
    """The token ids of each prompt. Texts get the tokenizer's special tokens; token ids are used as they are."""
    prompts = []
    for prompt in request.prompt:
        tokens = _encode(prompt, served) if isinstance(prompt, str) else prompt
        _check_tokens(tokens, "prompt", served)
        prompts.append(EnginePrompt(tuple(tokens)))
    return prompts


def _encode(text: str, served: ServedModel, special: bool = True) -> list[int]:
    try:
        served.text_limit.check(text, "prompt")
        return served.tokenizer.encode(text, special=special)
    except UserError as error:
        raise bad_value("prompt", str(error)) from error


def chat_prompt(request: ChatRequest, served: ServedModel) -> EnginePrompt:
    """The token ids and the images of a dialogue up to the assistant's turn, by the model's chat template."""
    tokenizer, kwargs = served.tokenizer, request.chat_template_kwargs
    if not tokenizer.has_chat_template:
        raise ApiError(
            400, "this model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
        )
    for name in kwargs:
        if name in RESERVED_VARIABLES or not tokenizer.chat_template_mentions(name):
            raise bad_value(f"chat_template_kwargs.{name}", "the chat template has no variable of that name to set")
    tools = offered_tools(request)
    if tools and not tokenizer.chat_template_mentions("tools"):
        raise bad_value("tools", "this model's chat template has no place for tools", "unsupported_parameter")
    try:
        messages = chat_messages(request, served)
        media = media_for(messages, tokenizer)
        variables = kwargs | ({"tools": tools} if tools else {})
        text = tokenizer.chat_text(messages, **variables)
        served.text_limit.check(text, "messages")  # the rendered text: a template may leave parts out
        waiting = iter(media)
        tokens, pictures = place_pictures(tokenizer.encode(text), waiting, tokenizer)
        check_all_placed(waiting, len(media))
        return EnginePrompt(tuple(tokens), pictures)
    except (UserError, TypeError) as error:  # a template raises a TypeError for unexpected values
        raise bad_value("messages", str(error)) from error


def chat_messages(request: ChatRequest, served: ServedModel) -> list[dict[str, Any]]:
    """The messages as chat templates expect them, with their images opened."""
    messages = [_template_message(message, i) for i, message in enumerate(request.messages)]
    return opened(messages, served.image_folder)


def offered_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools for the prompt; none with tool_choice=none."""
    if request.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in request.tools]


def _template_message(message: Message, index: int) -> dict[str, Any]:
    return template_message(
        message.role,
        content_of(message.parts),
        name=message.name,
        reasoning_content=message.reasoning_content,
        tool_call_id=message.tool_call_id,
        tool_calls=[call.model_dump() for call in message.tool_calls],
        where=f"messages[{index}]",
    )


def max_tokens_of(
    request: CompletionRequest | ChatRequest, prompts: Sequence[EnginePrompt], served: ServedModel
) -> int:
    """Most new tokens of each completion. A chat without a limit gets all remaining positions."""
    if not all(prompt.tokens for prompt in prompts):
        raise ApiError(400, "a prompt has no tokens", param="prompt", code="empty_prompt")
    longest = max(len(prompt.tokens) for prompt in prompts)
    left = served.max_positions - longest if served.max_positions is not None else None
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is not None and served.max_tokens is not None and asked > served.max_tokens:
        raise bad_value(name, f"got {asked}, but this server allows {served.max_tokens} new tokens at most")
    wanted = 1 if asked is None else asked
    if left is not None and wanted > left:
        raise ApiError(
            400,
            f"this server has {served.max_positions} positions for a sequence; the prompt has {longest} tokens, and {wanted} new "
            "ones are asked for",
            param=name if left > 0 else "messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    if asked is not None:
        return asked
    limits = [limit for limit in (left, served.max_tokens) if limit is not None]
    if not limits:
        raise bad_value(
            name, "the model's config names no limit: say how many tokens you want", "missing_required_parameter"
        )
    return min(limits)


def engine_requests(
    request: CompletionRequest | ChatRequest, prompts: Sequence[EnginePrompt], served: ServedModel, name: str
) -> list[Request]:
    """`n` requests of each prompt, in the order of the choices. With a seed the noise depends only on it, the prompt and the index of
    the choice."""
    options = SamplingOptions(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=min(request.top_k, served.num_embeddings),
        min_p=request.min_p,
        logit_bias=logit_bias_of(request, served),
        raw_logprobs=request.raw_logprobs,
        max_tokens=max_tokens_of(request, prompts, served),
        stop_tokens=served.tokenizer.eos_ids,
        stop=tuple(request.stop),
    )
    seed = request.seed if request.seed is not None else secrets.randbits(63)
    requests: list[Request] = []
    for tokens, pictures in prompts:
        noise = fold("serve", seed, ",".join(map(str, distinct_tokens(tokens, pictures))))
        for _ in range(request.n):
            index = len(requests)
            requests.append(Request(f"{name}/{index}", tokens, options, fold(noise, index), pictures=pictures))
    return requests


def check_scored_length(request: CompletionRequest | ChatRequest, requests: Sequence[Request]) -> None:
    """Raise for sequences that are too long to be scored for `echo` or `top_logprobs`."""
    is_echo = isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
    is_top = num_alternatives(request) > (1 if draws_likeliest(request) else 0)
    if is_top and any(r.pictures for r in requests):
        raise bad_value(
            "top_logprobs", "alternatives are not computed for prompts with images", "unsupported_parameter"
        )
    longest = max(len(r.tokens) + (r.sampling.max_tokens if is_top else 0) for r in requests)
    if (is_echo or is_top) and longest > MAX_SCORED_TOKENS:
        name = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
        what = "prompts" if is_echo and not is_top else "prompt and max_tokens"
        raise bad_value(
            name,
            f"log-probs beside those of sampled tokens are computed for {MAX_SCORED_TOKENS} tokens at most; {what} come to {longest}",
        )


def tokenize_response(request: TokenizeRequest, served: ServedModel) -> dict[str, Any]:
    """The response of `/tokenize`."""
    if request.model is not None:
        check_model(request.model, served)
    if request.prompt is not None:
        tokens = _encode(request.prompt, served, special=request.add_special_tokens)
    else:
        chat = {"model": served.name, "messages": request.messages, "tools": request.tools}
        asked = validate_fields(ChatRequest, chat | {"chat_template_kwargs": request.chat_template_kwargs})
        tokens = list(chat_prompt(asked, served).tokens)
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": served.max_positions, "tokens": tokens}
    if request.return_token_strs:
        found["token_strs"] = served.tokenizer.pieces(tokens, skip_special=False)
    return found


def detokenize_response(request: DetokenizeRequest, served: ServedModel) -> dict[str, Any]:
    """The response of `/detokenize`, with special tokens as text."""
    if request.model is not None:
        check_model(request.model, served)
    _check_tokens(request.tokens, "tokens", served)
    return {"prompt": served.tokenizer.decode(request.tokens, skip_special=False)}


def _check_tokens(tokens: Sequence[int], param: str, served: ServedModel) -> None:
    wrong = next((t for t in tokens if not 0 <= t < served.num_embeddings), None)
    if wrong is not None:
        raise bad_value(param, f"there is no token {wrong}; the model knows 0 to {served.num_embeddings - 1}")
    processor = served.tokenizer.image_processor
    if processor is not None and not processor.placeholder_tokens.isdisjoint(tokens):
        raise bad_value(param, "it has placeholder tokens of images, but no images: send them in a chat")


def logit_bias_of(request: CompletionRequest | ChatRequest, served: ServedModel) -> tuple[tuple[int, float], ...]:
    """The biases by token id, without zeros."""
    pairs = {int(name): value for name, value in request.logit_bias.items()}
    wrong = next((token for token in pairs if token >= served.num_embeddings), None)
    if wrong is not None:
        raise bad_value("logit_bias", f"there is no token {wrong}; the model knows 0 to {served.num_embeddings - 1}")
    if len(pairs) < len(request.logit_bias):
        raise bad_value("logit_bias", "a token is named twice")
    if len(pairs) > MAX_BIASES:
        raise bad_value("logit_bias", f"got {len(pairs)} tokens; a request may name {MAX_BIASES} at most")
    return tuple((token, value) for token, value in pairs.items() if value)


def check_model(asked: str, served: ServedModel) -> None:
    """Raise unless a client names the served model."""
    if asked != served.name:
        raise ApiError(
            404,
            f"there is no model {asked!r} here{did_you_mean(asked, [served.name])} (this server has {served.name!r})",
            param="model",
            code="model_not_found",
        )
