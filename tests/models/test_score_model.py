"""Score models: their scores equal those of transformers' sequence classification class, after loading and saving."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.batch import to_padded
from burnish.models.heads import ScoreModel, load_score_model, new_score_model, score_positions
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import load_decoder
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents

TinyModel = Callable[..., tuple[Any, Path]]
Packed = Callable[..., tuple[Tensor, Tensor]]
CPU = torch.device("cpu")
FAMILIES = [
    ("llama", False),
    ("llama", True),
    ("qwen2", True),
    ("qwen3", False),
    ("mistral-window", False),
    ("gemma2", True),
    ("gemma3", True),
]


def saved(model: ScoreModel, folder: Path, source: Path | None) -> Path:
    folder.mkdir()
    tokenizer = Tokenizer.from_characters("0123456789>")
    write_contents(folder, model.contents(keep_in_place, source, tokenizer))
    return folder


def their_scores(folder: Path, tokens: Tensor, offsets: Tensor) -> Tensor:
    """Scores of transformers, right-padded with the model's padding token."""
    from transformers import AutoModelForSequenceClassification

    theirs: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert theirs.config.num_labels == 1
    padded = to_padded(tokens, offsets, fill=theirs.config.pad_token_id)
    real = torch.arange(padded.shape[1]) < offsets.diff()[:, None]
    with torch.no_grad():
        return theirs(input_ids=padded, attention_mask=real.long()).logits[:, 0]


def our_scores(model: ScoreModel, tokens: Tensor, offsets: Tensor, pad_id: int = 0) -> Tensor:
    with torch.no_grad():
        return model.token_values(tokens, offsets, score_positions(tokens, offsets, pad_id))


@pytest.mark.parametrize(("variant", "tied"), FAMILIES)
def test_transformers_gives_the_same_scores(
    variant: str, tied: bool, tiny_model: TinyModel, packed: Packed, tmp_path: Path
) -> None:
    source = tiny_model(variant, tied)[1]
    model = new_score_model(load_decoder(source, torch.float32, CPU), seed=3)
    tokens, offsets = packed([6, 2, 15, 3])
    tokens = tokens.clamp(min=2)  # the next test has padding inside
    folder = saved(model, tmp_path / "scorer", source)
    ours = our_scores(model, tokens, offsets)
    assert ours.std() > 0.05
    assert torch.allclose(ours, their_scores(folder, tokens, offsets), atol=2e-5)
    again = load_score_model(folder, torch.float32, CPU)
    assert torch.equal(our_scores(again, tokens, offsets), ours)


def test_a_sequence_that_ends_with_the_padding_token_is_scored_before_it_as_transformers_does(
    tiny_model: TinyModel, packed: Packed, tmp_path: Path
) -> None:
    source = tiny_model("qwen2", False)[1]
    model = new_score_model(load_decoder(source, torch.float32, CPU), seed=3)
    tokens, offsets = packed([5, 4])
    tokens = tokens.clamp(min=2)
    tokens[[3, 4, 6]] = 0
    assert score_positions(tokens, offsets, 0).tolist() == [2, 8]
    ours = our_scores(model, tokens, offsets)
    assert torch.allclose(ours, their_scores(saved(model, tmp_path / "s", source), tokens, offsets), atol=2e-5)


def test_a_sequence_of_padding_alone_is_scored_at_its_first_token() -> None:
    assert score_positions(torch.tensor([5, 0, 0, 7]), torch.tensor([0, 1, 3, 4]), 0).tolist() == [0, 1, 3]


def test_the_scores_depend_on_the_last_token_and_begin_with_the_seed(tiny_model: TinyModel, packed: Packed) -> None:
    decoder = load_decoder(tiny_model("llama", False)[1], torch.float32, CPU)
    tokens, offsets = packed([6, 4])
    tokens = tokens.clamp(min=2)
    first, second = new_score_model(decoder, seed=0), new_score_model(decoder, seed=1)
    before = our_scores(first, tokens, offsets)
    assert not torch.allclose(before, our_scores(second, tokens, offsets))
    changed = tokens.clone()
    changed[5] = (tokens[5] - 1) % 59 + 2
    after = our_scores(first, changed, offsets)
    assert after[0] != before[0]
    assert after[1] == before[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not a reward model"),
        ({"num_labels": 3}, "gives 3 numbers per text"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
    ],
)
def test_a_directory_that_is_no_scorer_is_refused(
    change: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("llama", False)[1]
    folder = saved(new_score_model(load_decoder(source, torch.float32, CPU), 0), tmp_path / "s", source)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=message):
        load_score_model(folder, torch.float32, CPU)
