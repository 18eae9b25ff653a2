"""Builds the `SearchRunner` of a strategy from a config, a policy and its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from burnish.config.data import Reward, Template
from burnish.config.records import Slot
from burnish.core.engine import Engine
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Message, Row
from burnish.data.template import render, template_kind
from burnish.evaluation.answers import verifier_of
from burnish.evaluation.strategies.registry import load_strategy, strategy_verifier
from burnish.evaluation.strategies.search import SearchProgram
from burnish.evaluation.strategies.search_runner import SearchRunner
from burnish.evaluation.strategies.verifiers import build_verifier
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer


def build_search_runner(
    strategy: Slot,
    policy: PolicyModel,
    engine: Engine,
    reward: Reward,
    rows: Iterable[Row],
    seed: int,
    base: Path | None = None,
    template: Template | None = None,
    budget: int | None = None,
    keep_trees: bool = False,
    on_step: Callable[[SearchProgram], None] | None = None,
) -> SearchRunner:
    """Return a runner for questions among `rows`. Close it after use.

    `reward` is that of the evaluation: it says where a completion has its answer, and only the verifier `oracle` scores with it.
    """
    start = load_strategy(strategy, base)
    part = strategy_verifier(strategy)
    by_id = {row.id: row for row in rows}
    verifier = None if part is None else build_verifier(part, policy, reward, base, by_id)

    def kind(draw: PromptSample) -> str:
        return verifier_of(reward.parts, draw.prompt.row.data_source, draw.prompt.row.extra)

    return SearchRunner(
        engine,
        policy.tokenizer,
        start,
        verifier,
        kind,
        seed,
        budget,
        policy.max_positions,
        conversation_renderer(policy.tokenizer, template or Template()),
        keep_trees,
        on_step,
    )


def conversation_renderer(
    tokenizer: Tokenizer, template: Template
) -> Callable[[Sequence[Message]], tuple[int, ...]] | None:
    """Return a function from a conversation to its tokens up to the model's turn; None without a chat template."""
    if template_kind(tokenizer, template) != "chat":
        return None

    def rendered(messages: Sequence[Message]) -> tuple[int, ...]:
        row = Row("conversation", list(messages), "", None)
        return tuple(render(row, tokenizer, template).text_tokens("a strategy that asks again"))

    return rendered
