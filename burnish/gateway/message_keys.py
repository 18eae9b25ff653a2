"""Message keys: how a message that a client sends back is recognised.

A client sends the whole conversation with each call, and its library changes what does not matter: an empty text becomes `null` or a list of
parts, arguments of calls are written with other spaces, ids are renamed, reasoning is dropped, unknown fields are added. The key of a message
holds what matters:

- the role (`developer` is `system`), the text and the images. Space around the text of an answer does not count, because some clients strip it;
- the calls of an answer in order: name and arguments as parsed JSON. Ids are left out;
- for the result of a tool, the place of its call in the answer before it, which its id tells.

Reasoning is not in the key, because most clients drop it; `SessionTree` compares it where a client sends it. A chain of hashes stands for a
conversation: each hash is of the one before it and of the next key. Hashing is linear in the bytes of the messages. Nothing is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from burnish.config.errors import UserError
from burnish.data.images import ImageInput, image_input
from burnish.data.row import Message

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which clients send reasoning back."""
DIGEST_SIZE = 16


class CallRefused(UserError):
    """A call that cannot be placed in a session. It is the client's mistake: HTTP status 400.

    `param` names the field of the request, `code` is the reason in one word.
    """

    def __init__(self, message: str, param: str = "messages", code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code


# --- the parts of a message ----------------------------------------------------------------------------------------------


def role_of(message: Mapping[str, Any], index: int) -> str:
    """Return the role of a message as templates name it."""
    role = message.get("role") if type(message) is dict or isinstance(message, Mapping) else None
    found = ROLES.get(role) if isinstance(role, str) else None
    if found is None:
        raise CallRefused(f"messages[{index}].role: expected one of {', '.join(ROLES)}, got {str(role)[:80]!r}")
    return found


def content_of(content: Any, index: int) -> str | list[Message]:
    """Return a content as templates read it: a text, or blocks if there are images among its parts. Texts are joined as they are."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallRefused(
            f"messages[{index}].content: expected a text or a list of parts, got {type(content).__name__}"
        )
    parts = [_part(part, f"messages[{index}].content[{place}]") for place, part in enumerate(content)]
    if all(isinstance(part, str) for part in parts):
        return "".join(part for part in parts if isinstance(part, str))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def text_of(content: Any, index: int) -> str:
    """Return the text of a content by which messages are compared: a hash stands for an image."""
    found = content_of(content, index)
    if isinstance(found, str):
        return found
    return "".join(block["text"] if "text" in block else f"\0image {block['image'].digest}\0" for block in found)


def _part(part: Any, where: str) -> str | Message:
    """Return a text part as its text, and an image as a block. Of an agent only `data:` URLs are taken: it names no files of this machine."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_url"):
        return _part_text(part, where)
    assert isinstance(part, Mapping)
    value = part.get(kind)
    url = value.get("url") if isinstance(value, Mapping) else value
    if isinstance(url, ImageInput):
        return {"type": "image", "image": url}
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise CallRefused(
            f"{where}: an image should be a data: URL, got {str(url)[:80]!r}; nothing is fetched or read from files",
            code="unsupported_content",
        )
    try:
        return {"type": "image", "image": image_input(url, where)}
    except UserError as error:
        raise CallRefused(str(error), code="unsupported_content") from error


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
        raise CallRefused(
            f"{where}: the model reads text and images only, and a part is of type {kind[:80]!r}; leave it out",
            code="unsupported_content",
        )
    return text


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message carries; empty without one."""
    for name in REASONING_FIELDS:
        value = message.get(name)
        if value and isinstance(value, str):
            return value
    return ""


def calls_of(message: Mapping[str, Any], index: int) -> list[tuple[str | None, str, Any]]:
    """Return the id, the name and the arguments of each call of a message."""
    given = message.get("tool_calls") or ()
    if not given:
        if not message.get("function_call"):
            return []
        given = ({"function": message["function_call"]},)  # the older form, of one call
    if not isinstance(given, list | tuple):
        raise CallRefused(f"messages[{index}].tool_calls: expected a list, got {type(given).__name__}")
    found = []
    for place, call in enumerate(given):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise CallRefused(f"messages[{index}].tool_calls[{place}]: expected a function with a name")
        found.append((call.get("id"), function["name"], function.get("arguments")))
    return found


def parsed_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as values. A text that is no JSON stays a text; no text means no arguments."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def normal_message(message: Mapping[str, Any], index: int) -> Message:
    """Return a message as templates read it, without the fields that keys ignore."""
    role = role_of(message, index)
    found: Message = {"role": role, "content": content_of(message.get("content"), index)}
    if role in ("system", "assistant") and not isinstance(found["content"], str):
        raise CallRefused(
            f"messages[{index}].content: images are read in messages of users and tools, and this one is of the {role}"
        )
    if role == "assistant":
        if reasoning := reasoning_of(message):
            found["reasoning_content"] = reasoning
        calls = [
            {"id": identity, "type": "function", "function": {"name": name, "arguments": parsed_arguments(arguments)}}
            for identity, name, arguments in calls_of(message, index)
        ]
        if calls:
            found["tool_calls"] = calls
    elif role == "tool":
        found |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
    return found


# --- keys and chains ------------------------------------------------------------------------------------------------------


def head_digest(tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any] | None) -> bytes:
    """Return the hash with which the chain of a conversation begins: its tools in the given order, and the template's variables."""
    given = json.dumps([list(tools or ()), dict(variables or {})], sort_keys=True, ensure_ascii=True, default=repr)
    return _digest(given)


def message_keys(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the key of each message."""
    keys: list[bytes] = []
    ids: list[str | None] = []
    for index, message in enumerate(messages):
        role = role_of(message, index)
        content = message.get("content")
        text = content if type(content) is str else text_of(content, index)
        if role == "assistant":
            calls = calls_of(message, index)
            ids = [identity for identity, _, _ in calls]
            keys.append(answer_key(text, [(name, arguments) for _, name, arguments in calls]))
        elif role == "tool":
            keys.append(_digest(f"tool\0{_place_of_call(message.get('tool_call_id'), ids)}\0{text}"))
        else:
            keys.append(_digest(f"{role}\0{text}"))
    return keys


def answer_key(text: str, calls: Sequence[tuple[str, Any]]) -> bytes:
    """Return the key of an answer with a text and calls, each a name and arguments. Space around the text does not count."""
    text = text.strip()
    if not calls:
        return _digest(f"assistant\0{text}")
    written = json.dumps([(name, _canonical(arguments)) for name, arguments in calls], sort_keys=True)
    return _digest(f"assistant\0{written}\0{text}")


def chain_digests(start: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Return the running hash behind each key."""
    found = []
    for key in keys:
        start = blake2b(start + key, digest_size=DIGEST_SIZE).digest()
        found.append(start)
    return found


def num_leading_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of system messages at the start."""
    return next((index for index, message in enumerate(messages) if role_of(message, index) != "system"), len(messages))


def _place_of_call(identity: Any, ids: Sequence[str | None]) -> str:
    """Return the place of a call of this id in the last answer. An id that the answer does not have stands for itself."""
    if identity is None:
        return ""
    return str(ids.index(identity)) if identity in ids else f"id {identity}"


def _canonical(arguments: Any) -> Any:
    """Return arguments such that equal JSON is equal: 1.0 is 1, as a JavaScript client writes it."""
    parsed = parsed_arguments(arguments)
    if isinstance(parsed, str):
        return {"text": parsed}
    return json.loads(json.dumps(parsed, default=repr), parse_float=_number)


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=DIGEST_SIZE).digest()
