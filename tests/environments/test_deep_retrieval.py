"""DeepRetrieval: rewards by the recall of one query, with the numbers of the paper."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.environments.base import Answer, End, Episode
from burnish.environments.deep_retrieval import DeepRetrieval, recall_reward

WORDS = ("amber", "basalt", "cedar", "delta", "ember")


def written(query: str) -> str:
    return f'<think>names</think>\n<answer>{{"query": "{query}"}}</answer>'


@pytest.mark.parametrize(
    ("text", "reward", "recall"),
    [
        (written("amber basalt"), 6.0, 1.0),
        (written("amber"), 5.0, 0.5),
        (written("cedar"), -2.5, 0.0),
        ("<think>names</think><answer>amber basalt</answer>", -3.0, 0.0),
        (written("   "), -3.0, 0.0),
        (f"{written('amber')}{written('basalt')}", -4.0, 0.0),
        ('<answer>{"query": "amber basalt"}</answer><think>names</think>', -4.0, 0.0),
        ("amber basalt", -4.0, 0.0),
    ],
)
def test_an_answer_earns_its_form_and_its_recall(text: str, reward: float, recall: float, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    lines = [json.dumps({"id": str(k), "title": word, "text": f"about {word}"}) for k, word in enumerate(WORDS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    environment = DeepRetrieval("corpus.jsonl", str(tmp_path), top_k=2)

    async def play() -> End:
        await environment.start(Episode("a", 0, "question", extra={"needs": ["0", "1"]}))
        end = await environment.step(Answer(text, text))
        assert isinstance(end, End)
        return end

    end = asyncio.run(play())
    assert (end.reward, end.metrics["recall"], end.success) == (reward, recall, recall == 1.0)


def test_the_tiers_are_the_papers() -> None:
    recalls = (1.0, 0.7, 0.69, 0.45, 0.3, 0.1, 0.05, 0.04)
    assert [recall_reward(recall) for recall in recalls] == [5.0, 5.0, 4.0, 3.0, 1.0, 0.5, 0.1, -3.5]


def test_a_row_without_ids_is_an_error_of_the_data(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "0", "title": "amber", "text": "about amber"}) + "\n")
    environment = DeepRetrieval("corpus.jsonl", str(tmp_path))
    with pytest.raises(UserError, match="needs"):
        asyncio.run(environment.start(Episode("a", 0, "question")))
