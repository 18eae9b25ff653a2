"""Builds the `SearchRunner` of a strategy from a config, a policy and its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from burnish.config.data import Reward, Template
from burnish.config.records import Slot
from burnish.core.engine import Engine
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.environments.dialogue import ChatRenderer
from burnish.evaluation.answers import verifier_of
from burnish.evaluation.strategies.registry import load_strategy, strategy_needs, strategy_verifier
from burnish.evaluation.strategies.search import no_chat_error
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.search_runner import SearchRunner
from burnish.evaluation.strategies.verifiers import build_verifier, check_steps, step_delimiter
from burnish.models.policy import PolicyModel


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
    chat = ChatRenderer(policy.tokenizer, template)
    if "chat" in strategy_needs(strategy) and not chat.is_chat:
        raise no_chat_error()
    part = strategy_verifier(strategy)
    if part is not None:
        check_steps(strategy, step_delimiter(part, base))
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
        chat if chat.is_chat else None,
        keep_trees,
        on_step,
        _names(strategy),
    )


def _names(strategy: Slot) -> dict[str, str | None]:
    """Return what every record of a search says of it: the strategy, its verifier, and what ends its steps if it has steps."""
    part = strategy_verifier(strategy)
    names: dict[str, str | None] = {"strategy": strategy.name}
    if part is not None:
        names["verifier"] = part.name
    return names | strategy.model_dump(include={"step"})
