"""vLLM's `POST /inference/v1/generate`: token ids in, token ids and log-probs out.

The training client of verifiers and prime-rl speaks it: it renders chats itself. It reads the log-prob of each sampled token, and asks for
it by `logprobs: 1`. Its path begins at the server's root, not below `/v1`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from burnish.gateway.calls import CallAnswer, ModelCall
from burnish.gateway.openai_schema import MAX_N, MAX_STOP_LENGTH, ApiError
from burnish.gateway.protocols.base import (
    MAX_STOPS,
    ONE_LOGPROB,
    TEXT_ONLY,
    CallProtocol,
    common_fields,
    overridden_fields,
    plain_finish,
    usage,
)
from burnish.gateway.protocols.completions import read_tokens
from burnish.gateway.protocols.fields import Fields, Json

MAX_STOP_TOKENS = 256


class Generate(CallProtocol):
    """`POST /inference/v1/generate`."""

    path = "/inference/v1/generate"

    def parse(self, body: bytes | bytearray, headers: Mapping[str, str]) -> ModelCall:
        fields = Fields.of_body(body)
        for name in ("features", "content_parts"):
            if fields.values.get(name):
                raise fields.error(name, f"{TEXT_ONLY}; leave it out", "unsupported_parameter")
        if fields.flag("stream"):
            raise fields.error("stream", "answers of this path come whole; leave it out", "unsupported_parameter")
        if not fields.has("token_ids"):
            raise fields.missing("token_ids")
        options = fields.child("sampling_params") or Fields({}, "sampling_params")
        num_logprobs = options.integer("logprobs", 0)
        if (num_logprobs is not None and num_logprobs > 1) or options.has("prompt_logprobs"):
            name = "prompt_logprobs" if options.has("prompt_logprobs") else "logprobs"
            raise options.error(name, f"{ONE_LOGPROB}, nor those of the prompt", "unsupported_parameter")
        ends = options.items("stop_token_ids", MAX_STOP_TOKENS, "tokens")
        return ModelCall(
            token_ids=read_tokens(fields.values["token_ids"], fields, "token_ids"),
            n=options.integer("n", 1, MAX_N) or 1,
            max_tokens=options.integer("max_tokens", 1),
            stop=options.texts("stop", MAX_STOPS, MAX_STOP_LENGTH, "stop strings"),
            stop_tokens=read_tokens(ends, options, "stop_token_ids") if ends else (),
            seed=options.integer("seed", -(2**63)),
            logprobs=num_logprobs is not None,
            overridden=overridden_fields(options, "logit_bias", "ignore_eos", "bad_words", "allowed_token_ids"),
            **common_fields(fields, headers),
        )

    def whole(self, call: ModelCall, answer: CallAnswer) -> Json:
        choices = []
        for i, choice in enumerate(answer.choices):
            pairs = zip(choice.tokens, choice.logp, strict=True) if call.logprobs else ()
            content = [{"token": f"token_id:{token}", "logprob": logp, "top_logprobs": []} for token, logp in pairs]
            choices.append(
                {
                    "index": i,
                    "token_ids": list(choice.tokens),
                    "logprobs": {"content": content} if call.logprobs else None,
                    "finish_reason": plain_finish(choice),
                }
            )
        found: Json = {"request_id": answer.id, "model": call.model, "choices": choices, "usage": usage(answer)}
        return found | ({"prompt_token_ids": list(answer.prompt_tokens)} if call.wants_token_ids else {})

    def events(self, call: ModelCall, answer: CallAnswer) -> Iterator[str]:
        raise NotImplementedError("parse refuses streams of this path")

    def stopped(self, call: ModelCall, answer_id: str, created: int, reason: str) -> CallAnswer:
        """Raise: a text has no tokens that the model sampled. This client gives up at a 400, as after its own stop conditions."""
        raise ApiError(400, f"session stopped: {reason}", code="session_stopped")
