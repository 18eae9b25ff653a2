"""OpenAI's responses.

A message of the assistant is several items here: its reasoning, its text and its calls. Items that follow each other become one
message, so that an answer that comes back is recognised. With `previous_response_id` the request has only the new items, and
`calls.continued` adds the history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from burnish.gateway.calls import CallAnswer, CallChoice, ModelCall
from burnish.gateway.chat_messages import parse_arguments, template_call, template_message
from burnish.gateway.openai_schema import MAX_MESSAGES, MAX_NAME, ApiError
from burnish.gateway.protocols.base import (
    NO_GRAMMAR,
    ONE_LOGPROB,
    CallProtocol,
    common_fields,
    logprob_entry,
    overridden_fields,
    reasoning_of,
    sse,
    strategy_field,
    template_variables,
    token_names,
    with_limit,
)
from burnish.gateway.protocols.chat_completions import read_arguments, read_content, read_text
from burnish.gateway.protocols.fields import Fields, Json
from burnish.gateway.protocols.tools import checked_choice, offered_tools

PREFIX = "resp_"
ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
REASONING_PARTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probs."""


class Responses(CallProtocol):
    """`POST /v1/responses`."""

    path = "/responses"
    count_path = "/responses/input_tokens"

    def parse(self, body: bytes | bytearray, headers: Mapping[str, str]) -> ModelCall:
        fields = Fields.of_body(body)
        _refuse_unsupported(fields)
        overridden = overridden_fields(fields, "reasoning", "max_tool_calls", "strategy")
        tools = offered_tools(fields, overridden, checked_choice(fields, ("auto", "none", "required")))
        included = fields.texts("include", 16, MAX_NAME, "names")
        instructions = fields.text("instructions")
        head = () if instructions is None else (template_message("system", instructions, where="instructions"),)
        return ModelCall(
            messages=(*head, *_read_input(fields)),
            num_instructions=len(head),
            previous_id=_previous_id(fields),
            is_stored=True,
            tools=tools,
            template_variables=template_variables(fields),
            max_tokens=with_limit(fields, "max_output_tokens"),
            logprobs=LOGPROBS in included or fields.has("top_logprobs"),
            overridden=overridden,
            **common_fields(fields, headers),
        )

    def whole(self, call: ModelCall, answer: CallAnswer) -> Json:
        return _response(call, answer, _output(call, answer)) | _extra(call, answer)

    def events(self, call: ModelCall, answer: CallAnswer) -> Iterator[str]:
        return _number(_events(call, answer))

    def token_count(self, num_tokens: int) -> Json:
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    def error_event(self, error: ApiError) -> str:
        found = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return sse(found | {"sequence_number": 0}, "error")


# --- requests --------------------------------------------------------------------------------------------------------


def _refuse_unsupported(fields: Fields) -> None:
    text = fields.child("text")
    form = text.child("format") if text is not None else None
    if form is not None and form.values.get("type") != "text":
        raise fields.error("text.format", f"the server cannot do that: {NO_GRAMMAR}", "unsupported_parameter")
    if fields.flag("background"):
        raise fields.error("background", "answers are sampled while the client waits", "unsupported_parameter")
    for name in ("conversation", "prompt"):
        if fields.has(name):
            message = "nothing of that kind is stored here; send the items, or give previous_response_id"
            raise fields.error(name, message, "unsupported_parameter")
    num_top = fields.integer("top_logprobs", 0)
    if num_top is not None and num_top > 1:
        raise fields.error("top_logprobs", f"{ONE_LOGPROB}; give 0 or 1", "unsupported_parameter")


def _previous_id(fields: Fields) -> str | None:
    name = fields.text("previous_response_id", MAX_NAME)
    if name is not None and not name.startswith(PREFIX):
        raise fields.error("previous_response_id", f"expected the id of a response, which begins with {PREFIX!r}")
    return None if name is None else name.removeprefix(PREFIX)


def _read_input(fields: Fields) -> list[Json]:
    value = fields.values.get("input")
    if value is None:
        raise fields.missing("input")
    if isinstance(value, str):
        return [template_message("user", value, where="input")]
    found = _Conversation()
    for item in fields.objects("input", MAX_MESSAGES, "items"):
        found.add(item)
    found.flush()
    if not found.messages:
        raise fields.error("input", "expected a text or one item at least")
    return found.messages


@dataclass
class _Conversation:
    """Collects items into messages. The parts of the assistant's message are pending until another item ends it."""

    messages: list[Json] = field(default_factory=list)
    text: str | None = None
    reasoning: str = ""
    calls: list[Json] = field(default_factory=list)
    is_pending: bool = False

    def flush(self) -> None:
        """End the assistant's message, if there is one."""
        if not self.is_pending:
            return
        found = template_message("assistant", self.text or "", reasoning_content=self.reasoning or None, where="input")
        self.messages.append(found | ({"tool_calls": self.calls} if self.calls else {}))
        self.text, self.reasoning, self.calls, self.is_pending = None, "", [], False

    def add(self, item: Fields) -> None:
        kind = item.text("type") or "message"
        if kind == "message":
            self._add_message(item)
        elif kind == "reasoning":
            self._add_reasoning(item)
        elif kind == "function_call":
            arguments = parse_arguments(read_arguments(item, "arguments"), item.where("arguments"))
            self.calls.append(template_call(item.required_name("call_id"), item.required_name("name"), arguments))
            self.is_pending = True
        elif kind == "function_call_output":
            self.flush()
            name = item.required_name("call_id")
            output = read_content(item, "output", TEXT_PARTS)
            self.messages.append(template_message("tool", output, tool_call_id=name, where=item.path))
        else:
            message = (
                f"got an item of type {kind[:50]!r}; expected message, reasoning, function_call or function_call_output"
            )
            raise item.error("type", message, "unsupported_parameter")

    def _add_message(self, item: Fields) -> None:
        role = item.required_text("role")
        if role not in ROLES:
            raise item.error("role", f"got {role[:50]!r}; expected {', '.join(ROLES)}")
        if not item.has("content"):
            raise item.error("content", "a message needs content")
        if role != "assistant":
            self.flush()
            read = read_content if role == "user" else read_text
            self.messages.append(template_message(role, read(item, "content", TEXT_PARTS), where=item.path))
            return
        text = read_text(item, "content", TEXT_PARTS)
        if self.text is not None or self.calls:
            self.flush()
        self.text, self.is_pending = text, True

    def _add_reasoning(self, item: Fields) -> None:
        """Reasoning in full, else its summary. What another provider encrypted is not text and is left out."""
        if self.text is not None or self.calls:
            self.flush()
        full = read_text(item, "content", REASONING_PARTS)
        self.reasoning += full or read_text(item, "summary", REASONING_PARTS, separator="\n")
        self.is_pending = self.is_pending or bool(self.reasoning)


# --- answers ---------------------------------------------------------------------------------------------------------


def _response(call: ModelCall, answer: CallAnswer, output: list[Json], status: str | None = None) -> Json:
    """The response object; with a `status` as it is before the end of a stream."""
    is_cut = answer.choices[0].finish == "length"
    num_prompt, num_sampled = len(answer.prompt_tokens), answer.num_sampled
    usage = {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_sampled,
    }
    return {
        "id": f"{PREFIX}{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status or ("incomplete" if is_cut else "completed"),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut and status is None else None,
        "instructions": call.messages[0]["content"] if call.messages and call.num_instructions else None,
        "max_output_tokens": call.max_tokens,
        "metadata": {},
        "model": call.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None if call.previous_id is None else f"{PREFIX}{call.previous_id}",
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, "parameters": {}} | tool["function"] for tool in call.tools],
        "top_p": None,
        "truncation": "disabled",
        "usage": usage if status is None else None,
    }


def _output(call: ModelCall, answer: CallAnswer) -> list[Json]:
    """The items of an answer: reasoning, text, calls. An answer without any of them has an empty text."""
    choice = answer.choices[0]
    reasoning, text = reasoning_of(choice), choice.message.get("content")
    calls = choice.message.get("tool_calls") or []
    status = "incomplete" if choice.finish == "length" else "completed"
    found: list[Json] = []
    part: Json
    if reasoning:
        part = {"type": "reasoning_text", "text": reasoning}
        item = {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": [part]}
        found.append(item | {"encrypted_content": None, "status": status})
    if text or not calls:
        part = {"type": "output_text", "text": text or "", "annotations": [], "logprobs": _logprobs(call, choice)}
        item = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": status}
        found.append(item | {"content": [part]})
    for k, one in enumerate(calls):
        item = {"id": f"fc_{answer.id}_{k}", "type": "function_call", "call_id": one["id"], "status": status}
        found.append(item | {"name": one["function"]["name"], "arguments": one["function"]["arguments"]})
    return found


def _logprobs(call: ModelCall, choice: CallChoice) -> list[Json]:
    """All sampled tokens, also those of reasoning."""
    if not call.logprobs:
        return []
    return [logprob_entry(name, logp) for name, logp in zip(token_names(choice), choice.logp, strict=True)]


def _extra(call: ModelCall, answer: CallAnswer) -> Json:
    """What OpenAI's responses do not have."""
    if not call.wants_token_ids:
        return strategy_field(answer)
    ids = {"prompt_token_ids": list(answer.prompt_tokens), "token_ids": list(answer.choices[0].tokens)}
    return ids | strategy_field(answer)


def _number(events: Iterator[Json]) -> Iterator[str]:
    for number, event in enumerate(events):
        yield sse(event | {"sequence_number": number}, event["type"])


def _events(call: ModelCall, answer: CallAnswer) -> Iterator[Json]:
    start = _response(call, answer, [], "in_progress")
    yield {"type": "response.created", "response": start}
    yield {"type": "response.in_progress", "response": start}
    output = _output(call, answer)
    for index, item in enumerate(output):
        # An item is added without its content, which the next events fill in.
        empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        added = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        at = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **at, **done}
        else:
            yield from _part_events(item["content"][0], at | {"content_index": 0})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    whole = _response(call, answer, output)
    yield {"type": f"response.{whole['status']}", "response": whole | _extra(call, answer)}


def _part_events(part: Json, at: Json) -> Iterator[Json]:
    kind = part["type"]  # output_text or reasoning_text
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty: Json = {"logprobs": []} if logprobs else {}
    yield {"type": "response.content_part.added", **at, "part": part | {"text": ""} | empty}
    yield {"type": f"response.{kind}.delta", **at, "delta": part["text"], **logprobs}
    yield {"type": f"response.{kind}.done", **at, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}
