"""Length budgets: a sentence at the end of each prompt, with the same number for a row throughout a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from burnish.algorithms.curriculum.spec import LengthBudget
from burnish.config.data import Data, Source
from burnish.config.errors import UserError
from burnish.data.prompt_stream import PromptStream, validation_prompts
from burnish.data.template import with_suffix
from burnish.models.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_characters("".join(map(chr, range(32, 127))) + "\n")
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "so"},
    {"role": "user", "content": "last", "name": "x"},
    {"role": "assistant", "content": "well"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"Q{i}?"}) + "\n" for i in range(200)))
    return folder


def budgets(folder: Path, seed: int, **options: Any) -> list[int | None]:
    source = [Source(path="rows.jsonl")]
    made = PromptStream(
        source, TOKENIZER, Data(sampler="sequential", budget=LengthBudget(**options)), seed, base=folder
    )
    draws = made.draw(400)
    for draw in draws:
        assert (
            draw.prompt.text == f"Q{int(draw.prompt.row.id.rpartition('/')[2])}? Think for {draw.prompt.budget} tokens."
        )
        assert draw.prompt.row.prompt == draw.prompt.text
        assert draw.prompt.tokens == TOKENIZER.encode(draw.prompt.text)
    return [d.prompt.budget for d in draws]


def test_budgets_are_in_their_span_and_belong_to_the_row_and_the_seed(folder: Path) -> None:
    found = budgets(folder, 0)
    assert found == budgets(folder, 0) != budgets(folder, 1)
    assert found[:200] == found[200:]  # a row drawn again asks for the same
    numbers = [n for n in found if n is not None]
    assert all(100 <= n <= 4000 for n in numbers)
    assert abs(sum(numbers) / len(numbers) - 2050) < 4.5 * 3901 / (12 * 200) ** 0.5
    assert set(budgets(folder, 0, low=3, high=5)) == {3, 4, 5}
    assert set(budgets(folder, 0, low=7, high=7)) == {7}


def test_without_a_budget_a_prompt_is_as_it_was(folder: Path) -> None:
    made = PromptStream([Source(path="rows.jsonl")], TOKENIZER, Data(sampler="sequential"), 0, base=folder)
    (draw,) = made.draw(1)
    assert (draw.prompt.text, draw.prompt.budget) == ("Q0?", None)


def test_validation_prompts_ask_too(folder: Path) -> None:
    budget = LengthBudget(low=3, high=5, text=" At most {n}, {n}!")
    (prompt,) = validation_prompts([Source(path="rows.jsonl")], TOKENIZER, Data(budget=budget), 0, 1, folder)
    assert prompt.text == f"Q0? At most {prompt.budget}, {prompt.budget}!"


def test_the_length_limit_sees_the_sentence(folder: Path) -> None:
    source = [Source(path="rows.jsonl", limit=10)]
    limit = len("Q0? Think for 10 tokens.")
    fits, too_long = (
        Data(max_prompt_tokens=limit, budget=LengthBudget(low=number, high=number)) for number in (10, 100)
    )
    made = PromptStream(source, TOKENIZER, fits, 0, base=folder)
    assert (made.report(), made.longest()) == (None, limit)
    with pytest.raises(UserError, match="all 10 prompts are longer"):
        PromptStream(source, TOKENIZER, too_long, 0, base=folder)


def test_a_conversation_gets_it_behind_what_the_user_says_last() -> None:
    before = json.dumps(CONVERSATION)
    asked = with_suffix(CONVERSATION, " !", "row 1")
    assert asked == [*CONVERSATION[:3], {"role": "user", "content": "last !", "name": "x"}, CONVERSATION[4]]
    assert json.dumps(CONVERSATION) == before
    with pytest.raises(UserError, match="row 1: no message has the role user"):
        with_suffix([CONVERSATION[0]], " !", "row 1")


@pytest.mark.parametrize(
    ("options", "message"), [({"low": 5, "high": 4}, "low=5 is more than"), ({"text": "Think!"}, r"no \{n\} in it")]
)
def test_a_budget_that_asks_for_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LengthBudget(**options)
