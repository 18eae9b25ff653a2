"""Pictures on their way to other processes and to vLLM and SGLang."""

from __future__ import annotations

import base64
import io
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from burnish.config.errors import UserError
from burnish.core.engine import Request, SamplingOptions
from burnish.core.pictures import Picture, PictureSpan
from burnish.inference.picture_inputs import marked_tokens
from burnish.inference.request_arrays import distinct_requests, group_by_prompt, pack_requests, unpack_requests
from burnish.inference.sglang.sglang_requests import InFlightRequest, RequestSender, generate_body, scoring_body
from burnish.inference.sglang.sglang_servers import check_request
from burnish.inference.vllm.vllm_engine import VllmEngine
from burnish.inference.vllm.vllm_requests import (
    PartialCompletion,
    check_server_request,
    check_vllm_request,
    sampling_params,
)


def picture(seed: int, frames: int = 1) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, 16, 24, 3), dtype=np.uint8)
    return Picture(pixels, (1, 2, 3), None if frames == 1 else 0.5)


SHOWN = picture(1)
TOKENS = (5, *[50] * 6, 7, *[50] * 6, 8, 9)
OPTIONS = SamplingOptions(max_tokens=4, stop_tokens=(1,))
REQUEST = Request("r", TOKENS, OPTIONS, 3, pictures=(PictureSpan(1, SHOWN), PictureSpan(8, picture(2))))
MARKED = [5, 50, 7, 50, 8, 9]


def test_prompts_with_other_pictures_are_other_prompts_and_each_picture_travels_once() -> None:
    other = replace(REQUEST, id="o", pictures=(PictureSpan(1, picture(2)), PictureSpan(8, SHOWN)))
    text = Request("t", (5, 6), OPTIONS, 9)
    asked = [replace(REQUEST, id=str(k), key=k) for k in range(2)] + [other, text, replace(other, id="p", key=7)]
    groups = group_by_prompt(asked)
    assert [[request.id for request in group] for group in groups] == [["0", "1"], ["o", "p"], ["t"]]
    assert [request.id for request in distinct_requests(groups)] == ["0", "o", "t"]
    packed = pickle.loads(pickle.dumps(pack_requests(groups, first=70)))
    assert len(packed.pictures) == 2
    together = [request for group in groups for request in group]
    for back, request in zip(unpack_requests(packed), together, strict=True):
        assert replace(back, id=request.id, pictures=()) == replace(request, pictures=())
        assert [(s.start, s.picture.key) for s in back.pictures] == [(s.start, s.picture.key) for s in request.pictures]
    assert pack_requests([[text]]).spans is None


def test_each_image_has_one_mark() -> None:
    assert marked_tokens(TOKENS, REQUEST.pictures) == MARKED
    assert marked_tokens((5, 6), ()) == [5, 6]


def test_sglang_gets_marks_and_lossless_images() -> None:
    for body in (generate_body(REQUEST, [11], "x", 61, False), scoring_body(REQUEST, [11], "x")):
        assert body["input_ids"] == [*MARKED, 11]
        kind, content = body["image_data"][0].split(",")
        assert kind == "data:image/png;base64"
        image = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
        assert np.array_equal(image, SHOWN.pixels[0])
    assert generate_body(REQUEST, [], "x", 61, False)["sampling_params"]["logit_bias"] == {"50": -100.0}
    text = generate_body(Request("t", (5, 6), OPTIONS, 9), [], "x", 61, False)
    assert "image_data" not in text
    assert "logit_bias" not in text["sampling_params"]


def test_an_sglang_server_that_expands_otherwise_is_an_error() -> None:
    sender = RequestSender(*[None] * 5)  # type: ignore[arg-type]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 1, None]], "prompt_tokens": 16}
    assert sender._read(InFlightRequest(REQUEST, 0, None), "url", {"meta_info": meta}, False)[0].tokens == [1]
    with pytest.raises(UserError, match=r"reads its prompt with 2 images as 12 tokens, and burnish as 16"):
        sender._read(InFlightRequest(REQUEST, 0, None), "url", {"meta_info": meta | {"prompt_tokens": 12}}, False)


class Llm:
    """Records what vLLM would get, and answers with prompts of a given length."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.prompts = num_tokens, list[Any]()

    def add_request(self, name: str, prompt: Any, params: Any, **options: Any) -> None:
        self.prompts.append((name, prompt))

    def step(self) -> list[Any]:
        return [SimpleNamespace(request_id="d r", prompt_token_ids=[0] * self.num_tokens, outputs=[None])]


def test_vllm_gets_marks_and_images_by_key_and_its_expansion_is_checked() -> None:
    engine = object.__new__(VllmEngine)
    engine.library = SimpleNamespace(TokensPrompt=dict, SamplingParams=dict, delta=0)  # type: ignore[assignment]
    engine._adapter, engine.llm = None, Llm(12)
    engine._add("d ", REQUEST, REQUEST.tokens, sampling_params(REQUEST))
    ((name, prompt),) = engine.llm.prompts
    assert (name, prompt["prompt_token_ids"]) == ("d r", MARKED)
    shown = zip(prompt["multi_modal_data"]["image"], REQUEST.pictures, strict=True)
    assert all(np.array_equal(image, span.picture.pixels[0]) for image, span in shown)
    assert prompt["multi_modal_uuids"]["image"] == [str(span.picture.key) for span in REQUEST.pictures]
    assert sampling_params(REQUEST)["logit_bias"] == {50: -100.0}
    engine._requests = {"r": PartialCompletion(REQUEST)}
    with pytest.raises(UserError, match=r"vLLM reads its prompt with 2 images as 12 tokens, and burnish as 16"):
        engine._step()


def test_videos_and_vllm_servers_are_refused() -> None:
    video = replace(REQUEST, pictures=(PictureSpan(1, picture(1, frames=2)),))
    with pytest.raises(UserError, match="picture 1 is a video"):
        check_vllm_request(video, 61, 100)
    with pytest.raises(UserError, match="picture 1 is a video"):
        check_request(video, [], 61)
    check_vllm_request(REQUEST, 61, 100)
    with pytest.raises(UserError, match="a vLLM server takes token ids or images, not both"):
        check_server_request(REQUEST, 61, 100)
