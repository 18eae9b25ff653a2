"""The keys of vLLM: which combinations are refused."""

from __future__ import annotations

import pytest

from burnish.config.engines import Vllm
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.schema import TrainConfig

BASE = ["model.path=somewhere", "data.train.task=sort_digits", "rollout.engine=vllm"]


def test_a_section_given_in_part_keeps_its_defaults() -> None:
    rollout = load(TrainConfig, None, [*BASE, "rollout.vllm.enforce_eager=true"]).config.rollout
    assert rollout.vllm == Vllm(enforce_eager=True)
    rollout = load(TrainConfig, None, [*BASE, "rollout.cache_gib=2"]).config.rollout
    assert (rollout.vllm, rollout.cache_gib) == (None, 2)
    rollout = load(TrainConfig, None, [*BASE, "rollout.vllm={url: http://there, weights_dir: /shared}"]).config.rollout
    assert rollout.vllm == Vllm(url="http://there", weights_dir="/shared")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.engine=native", "rollout.vllm={}"], "rollout.vllm has no effect with rollout.engine=native"),
        (
            ["rollout.engine=auto", "rollout.vllm.url=http://there"],
            "rollout.vllm has no effect with rollout.engine=auto",
        ),
        (["rollout.exact=true"], "rollout.exact needs the native engine, and rollout.engine=vllm"),
        (
            ["rollout.mismatch={name: noise}"],
            "rollout.mismatch puts its fault into an engine on the policy's own tensors",
        ),
        (["rollout.cache_dtype=fp8"], "rollout.cache_dtype=fp8 is of the native engine"),
        (["rollout.cache_gib=1", "rollout.vllm.url=http://there"], "rollout.cache_gib has no effect on a server"),
        (["rollout.vllm={url: http://there, dtype: float32}"], "rollout.vllm.dtype has no effect on a server"),
        (
            ["rollout.vllm={url: http://there, max_model_len: 9}"],
            "rollout.vllm.max_model_len has no effect on a server",
        ),
        (
            ["rollout.vllm={url: http://there, enforce_eager: true}"],
            "rollout.vllm.enforce_eager has no effect on a server",
        ),
        (["rollout.vllm.weights_dir=/shared"], "rollout.vllm.weights_dir is about a server"),
        (["rollout.vllm.timeout_s=3"], "rollout.vllm.timeout_s is about a server"),
        (["rollout.vllm.dtype=float64"], "rollout.vllm.dtype"),
        (["rollout.vllm.uri=http://there"], "uri"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        load(TrainConfig, None, [*BASE, *overrides])
    assert words in str(caught.value)
