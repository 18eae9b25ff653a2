"""Images in chats, responses and messages: which forms are read, and the prompt that they give."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from burnish.gateway.openai_schema import ApiError, ChatRequest, CompletionRequest, validate_fields
from burnish.gateway.protocols import MESSAGES, RESPONSES
from burnish.serve.other_protocols import chat_request
from burnish.serve.request_to_engine import (
    EnginePrompt,
    ServedModel,
    chat_prompt,
    check_scored_length,
    completion_prompts,
    engine_requests,
)
from tests.made_tokenizers import byte_level
from tests.seeing_tokenizer import CHAT, IMAGE, scene, seeing_tokenizer

SEEN = scene()
TEXT = {"type": "text", "text": "many?"}


def png(pixels: np.ndarray = SEEN) -> str:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


URL = f"data:image/png;base64,{png()}"


def served(folder: Path | None = None) -> ServedModel:
    return ServedModel("m", seeing_tokenizer(), 300, 4096, image_folder=folder)


def chat(url: str, **fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, TEXT]}]
    return validate_fields(ChatRequest, {"model": "m", "messages": messages, **fields})


def of_chat() -> ChatRequest:
    return chat(URL)


def of_responses() -> ChatRequest:
    content = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "many?"}]
    body = {"model": "m", "input": [{"role": "user", "content": content}]}
    return chat_request(RESPONSES.parse(json.dumps(body).encode(), {}))


def of_messages() -> ChatRequest:
    source = {"type": "base64", "media_type": "image/png", "data": png()}
    turn = {"role": "user", "content": [{"type": "image", "source": source}, TEXT]}
    body = {"model": "m", "max_tokens": 9, "messages": [turn]}
    return chat_request(MESSAGES.parse(json.dumps(body).encode(), {}))


@pytest.mark.parametrize("made", [of_chat, of_responses, of_messages])
def test_every_protocol_gives_the_same_tokens_and_pixels(made: Callable[[], ChatRequest]) -> None:
    tokens, pictures = chat_prompt(made(), served())
    mark = served().tokenizer._inner.convert_tokens_to_ids(IMAGE)
    assert [(span.start, span.picture.grid) for span in pictures] == [(tokens.index(mark), (1, 2, 3))]
    assert np.array_equal(pictures[0].picture.pixels[0], SEEN)
    (request,) = engine_requests(made(), [EnginePrompt(tokens, pictures)], served(), "x")
    assert (request.tokens, request.pictures) == (tokens, pictures)


def test_a_seeded_sample_depends_on_the_pixels() -> None:
    other = f"data:image/png;base64,{png(scene(seed=3))}"
    asked = [chat(url, seed=1, max_tokens=4) for url in (URL, URL, other)]
    keys = [engine_requests(one, [chat_prompt(one, served())], served(), "x")[0].key for one in asked]
    assert keys[0] == keys[1] != keys[2]


def test_files_are_read_only_below_the_folder_that_the_server_allows(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    for path in (folder / "a.png", tmp_path / "secret.png"):
        path.write_bytes(base64.b64decode(png()))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    for url in ("a.png", f"file://{folder}/a.png"):
        assert len(chat_prompt(chat(url), served(folder)).pictures) == 1
        with pytest.raises(ApiError, match="reads no files of its own"):
            chat_prompt(chat(url), served())
    for url in ("../secret.png", f"file://{tmp_path}/secret.png", "link.png", "none.png", "../open/../secret.png"):
        with pytest.raises(ApiError, match="there is no file"):
            chat_prompt(chat(url), served(folder))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://a.org/a.png", "fetches nothing from the network"),
        ("data:image/png;base64,AAAA", "cannot be read as an image"),
        ("data:text/html;base64,AAAA", "should be data:image"),
    ],
)
def test_what_is_no_image_here_is_refused(url: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        chat_prompt(chat(url), served())
    assert caught.value.status == 400


def test_images_are_refused_where_they_cannot_be_read() -> None:
    blind = ServedModel("m", byte_level(chat_template=CHAT, additional_special_tokens=[IMAGE]), 300, 4096)
    with pytest.raises(ApiError, match="this model reads text only"):
        chat_prompt(of_chat(), blind)
    asked = chat(URL, logprobs=True, top_logprobs=5, max_tokens=4)
    with pytest.raises(ApiError, match="alternatives are not computed for prompts with images"):
        check_scored_length(asked, engine_requests(asked, [chat_prompt(asked, served())], served(), "x"))
    mark = served().tokenizer._inner.convert_tokens_to_ids(IMAGE)
    for prompt in ([mark], IMAGE):
        with pytest.raises(ApiError, match="placeholder tokens of images, but no images"):
            completion_prompts(validate_fields(CompletionRequest, {"model": "m", "prompt": prompt}), served())
