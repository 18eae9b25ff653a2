"""Multi-turn rollouts: rewards per turn, failing environments, limits, and reuse of the engine's cache."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from burnish.config.data import Reward
from burnish.config.environment import Environment as EnvironmentConfig
from burnish.config.errors import UserError
from burnish.core.engine import Request, SamplingOptions
from burnish.core.trajectory import Trajectory, TurnSpan, pack
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.data.tasks.registry import make_task
from burnish.environments.base import Done, Turn
from burnish.environments.registry import environment_factory
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.inference.request_arrays import group_by_prompt, pack_requests, unpack_requests
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.scoring import Rewards
from burnish.rollout.episode_metrics import turn_metrics
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.scoring import from_arrays, rollout_and_score, to_arrays
from burnish.trainers.episode_rows import turns_json
from tests.rollout.test_in_flight import Stopping, stopped_again_and_again

TOKENIZER = Tokenizer.from_characters("0123456789>")
SAMPLING = SamplingOptions(max_tokens=40, stop_tokens=(1, 2, 3, 4))


class Game:
    """Answers every completion with `42>`; the k-th completion earns k / 4. It may fail, and may know no states."""

    def __init__(
        self,
        prompt: Prompt,
        turns: int = 3,
        fails: str = "",
        states: Callable[[int], str | None] = str,
        last: float | None = 1.0,
        hint: str = "42>",
    ) -> None:
        if fails == "made":
            raise OSError("no server")
        self.prompt, self.turns, self.fails, self.states, self.last, self.seen = prompt, turns, fails, states, last, 0
        self.hint = TOKENIZER.encode(hint)

    def start(self) -> Turn:
        if self.fails == "start":
            raise RuntimeError("no game")
        return Turn(tuple(self.prompt.tokens), self.states(0))

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        self.seen += 1
        if self.fails == f"turn {self.seen}":
            raise KeyError("lost")
        if self.seen == self.turns:
            return Done(self.last)
        return Turn(tuple(self.hint), self.states(self.seen), 0.25 * self.seen)


class Scoring(Game):
    gives_rewards = True


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


def draws() -> list[PromptSample]:
    return [PromptSample(Prompt(Row(f"r{k}", text, "rows", "9"), text, TOKENIZER.encode(text)), 0) for k, text in enumerate(("31>", "9>"))]  # fmt: skip


def play(model: Decoder, kind: type[Game] = Game, max_turns: int = 5, positions: int | None = None, **options: Any) -> list[Trajectory]:  # fmt: skip
    runner = RolloutRunner(
        DenseEngine(model), lambda prompt: kind(prompt, **options), TOKENIZER, 7, max_turns, positions
    )
    found = list(runner.run(draws(), 2, SAMPLING, "train"))
    assert {t.id for t in found} == {"r0#0.0", "r0#0.1", "r1#0.0", "r1#0.1"}
    return found


def test_turns_know_where_they_begin_their_state_and_what_they_earned(model: Decoder) -> None:
    for one in play(model):
        (sequence,) = one.sequences
        starts = np.flatnonzero(np.diff(sequence.action_mask.astype(int)) == 1) + 1
        assert [place.start for place in one.turn_places] == starts.tolist()
        assert one.turns == [TurnSpan(1, "0", 0.25), TurnSpan(3, "1", 0.5), TurnSpan(5, "2", 1.0)]
        assert one.reward == 1.75
        assert one.parts == {"environment": 1.75}
        assert one.accuracy is None, "the environment does not say which rewards mean success"
    batch = pack(play(model))
    assert batch.ragged["turn_reward"].values.tolist() == [0.25, 0.5, 1.0] * 4
    states = batch.ragged["turn_state"].values.reshape(4, 3)
    assert (states == states[0]).all()
    assert len(set(states[0].tolist())) == 3


@pytest.mark.parametrize(("threshold", "accuracy"), [(1.0, 1.0), (2.0, 0.0)])
def test_an_environment_may_say_from_which_reward_on_it_was_a_success(
    model: Decoder, threshold: float, accuracy: float
) -> None:
    kind = type("Judging", (Game,), {"correct_at": threshold})
    assert {one.accuracy for one in play(model, kind)} == {accuracy}


def test_a_journal_has_the_turns(model: Decoder) -> None:
    found = play(model)
    again = from_arrays(to_arrays(found))
    assert [t.turns for t in again] == [t.turns for t in found]
    assert all(isinstance(span, TurnSpan) for t in again for span in t.turns)


def test_an_episode_that_is_cut_off_has_what_it_earned_until_then(model: Decoder) -> None:
    for one in play(model, Scoring, max_turns=2):
        assert (one.finish, one.reward, len(one.turns)) == ("turns", 0.75, 2)
    for one in play(model, Scoring, positions=70, hint="42" * 10):
        assert one.finish == "length"
        assert one.reward == sum(0.25 * (k + 1) for k in range(len(one.turns)))
        assert len(one.sequences[0].tokens) <= 70
    for one in play(model, Scoring, last=None):
        assert (one.finish, one.reward) == ("stop", 0.75)


def test_a_first_turn_that_might_not_fit_is_told_with_its_row(model: Decoder) -> None:
    assert len(play(model, Scoring, positions=43)) == 4
    told = r"row r0: .* gave 3 tokens, and max_tokens=40 more make 43, but the model is made for 42 positions"
    with pytest.raises(UserError, match=told):
        play(model, Scoring, positions=42)


@pytest.mark.parametrize("positions", [None, 42, 43])
def test_a_first_turn_that_its_environment_has_no_room_for_is_a_sample_lost(
    model: Decoder, positions: int | None
) -> None:
    runner = RolloutRunner(DenseEngine(model), Scoring, TOKENIZER, 7, 5, positions, 42)
    found = {t.id: t for t in runner.run(draws(), 1, SAMPLING, "train")}
    lost, kept = found["r0#0.0"], found["r1#0.0"]
    assert (lost.finish, lost.reward, lost.turns) == ("error", None, [])
    assert lost.error is not None
    assert re.fullmatch(
        r"row r0: .* gave 3 tokens, and max_tokens=40 more make 43, but environment.max_tokens=42 is for all turns .*",
        lost.error,
    )
    assert (kept.finish, len(kept.sequences[0].tokens) <= 42) == ("length", True)


def test_rewards_of_turns_without_one_for_the_end_are_a_mistake_that_is_told(model: Decoder) -> None:
    with pytest.raises(UserError, match=r"gave turns of r. a reward and none at the end"):
        play(model, last=None)
    with pytest.raises(UserError, match="gives_rewards = True"):
        play(model, max_turns=2)
    with pytest.raises(UserError, match="the reward nan; expected a finite number"):
        play(model, last=float("nan"))
    with pytest.raises(
        UserError, match=r"reward out of range: 1e\+307 is not a usable reward.* at most 1e\+09 in magnitude"
    ):
        play(model, last=1e307)
    with pytest.raises(UserError, match=r"rewards of r., added up over its turns: 1e\+09 is not a usable reward"):
        play(model, last=1e9)


def test_states_are_in_every_turn_or_in_none(model: Decoder) -> None:
    with pytest.raises(UserError, match="state in some turns and not in others"):
        play(model, states=lambda k: None if k == 1 else str(k))
    assert {span.state for t in play(model, states=lambda k: None) for span in t.turns} == {None}


def test_a_state_that_is_no_text_is_refused(model: Decoder) -> None:
    with pytest.raises(UserError, match=r"start\(\) gave a state of type int; expected a text"):
        play(model, states=lambda k: k)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match=r"observe\(\) gave a state of type tuple; expected a text"):
        play(model, states=lambda k: (k,) if k else "0")  # type: ignore[arg-type, return-value]


# --- environments that fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "turns", "reason"),
    [
        ("made", 0, r"start\(\) raised OSError: no server"),
        ("start", 0, r"start\(\) raised RuntimeError: no game"),
        ("turn 2", 2, r"observe\(\) raised KeyError: 'lost'"),
    ],
)
def test_an_environment_that_raises_ends_its_sample_and_nothing_else(
    model: Decoder, fails: str, turns: int, reason: str
) -> None:
    runner = RolloutRunner(
        DenseEngine(model),
        lambda prompt: Game(prompt, fails=fails if prompt.row.id == "r0" else ""),
        TOKENIZER,
        7,
        5,
    )
    with Rewards(Reward(parts=[{"name": "exact"}], workers=1)) as rewards:
        scored = rollout_and_score(runner, rewards, draws(), 2, SAMPLING, "train", lambda text: None)
    lost, kept = scored.trajectories[:2], scored.trajectories[2:]
    for one in lost:
        assert (one.finish, one.reward, one.accuracy, len(one.turns)) == ("error", None, None, turns)
        assert re.search(reason, one.error or "")
        assert not one.truncated
    assert all(one.reward == 1.75 for one in kept)
    assert [one.error for one in scored.failed] == [one.error for one in lost]
    assert pack(scored.usable).num_sequences == 2
    assert turn_metrics(scored.trajectories) == {
        "turns_mean": (2 * turns + 6) / 4,
        "turns_max": 3.0,
        "out_of_turns": 0.0,
        "environment_errors": 2.0,
    }
    again = from_arrays(to_arrays(scored.trajectories))
    assert [one.error for one in again] == [one.error for one in scored.trajectories]


def test_a_users_mistake_ends_the_run(model: Decoder) -> None:
    class Wrong(Game):
        def observe(self, completion: list[int], text: str) -> Turn | Done:
            return Turn(tuple(TOKENIZER.encode("é")))

    with pytest.raises(UserError, match="not in this tokenizer's alphabet"):
        play(model, Wrong)


# --- engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DenseEngine, PagedEngine])
def test_every_engine_gives_the_same_turns(model: Decoder, kind: Any) -> None:
    engine = kind(model, 4)
    runner = RolloutRunner(engine, lambda prompt: Game(prompt, hint="42>" * 8), TOKENIZER, 7, 5)
    found = {t.id: t for t in runner.run(draws(), 3, SAMPLING, "train")}
    plain = RolloutRunner(DenseEngine(model), lambda prompt: Game(prompt, hint="42>" * 8), TOKENIZER, 7, 5)
    for one in plain.run(draws(), 3, SAMPLING, "train"):
        assert found[one.id].completion == one.completion
        np.testing.assert_array_equal(found[one.id].sequences[0].tokens, one.sequences[0].tokens)
        np.testing.assert_allclose(
            found[one.id].sequences[0].behaviour_logp, one.sequences[0].behaviour_logp, rtol=1e-5
        )


def prefilled(model: Decoder, goes_on: bool, longest: int | None) -> tuple[int, int, int]:
    """Tokens that were prefilled and those of all contexts, and how often a cache was made."""
    caches: list[Any] = []
    engine = PagedEngine(model, 8, on_cache=caches.append)
    if longest is not None:
        engine.reserve(longest)
    if not goes_on:  # as if nothing would follow
        submit = engine.submit
        engine.submit = lambda requests: submit([replace(r, may_continue=False) for r in requests])  # type: ignore[method-assign]
    runner = RolloutRunner(engine, lambda prompt: Game(prompt, turns=4, hint="42>" * 8), TOKENIZER, 7, 5)
    found = list(runner.run(draws(), 2, SAMPLING, "train"))
    assert {len(t.turns) for t in found} == {4}
    return engine.stats.prefilled_tokens, sum(place.start for t in found for place in t.turn_places), len(caches)


def test_a_later_turn_finds_what_the_turns_before_it_computed(model: Decoder) -> None:
    """Only the new tokens of a context are computed, and those of the old ones that fill no page."""
    (kept, whole, _), (forgotten, *_) = prefilled(model, True, 400), prefilled(model, False, 400)
    prompts, later = sum(len(d.prompt.tokens) for d in draws()), 2 * 2 * 3
    assert prompts + later * 24 <= kept <= prompts + later * (24 + 16)
    assert kept < forgotten < whole
    assert kept < 0.7 * whole


def test_contexts_that_grow_do_not_make_a_cache_for_every_length(model: Decoder) -> None:
    (kept, _, few), (forgotten, _, many) = prefilled(model, True, None), prefilled(model, False, None)
    assert few <= 2 < many
    assert kept < forgotten


def test_a_request_that_goes_on_says_so_to_engines_elsewhere() -> None:
    requests = [Request("a", (1, 2), SAMPLING, 3, 1, 2, True), Request("b", (1, 2), SAMPLING, 4)]
    again = unpack_requests(pack_requests(group_by_prompt(requests)))
    assert [r.may_continue for r in again] == [True, False]


@pytest.mark.parametrize("every", [1, 7])
def test_an_episode_that_is_stopped_in_the_middle_has_the_turns_of_one_that_is_not(model: Decoder, every: int) -> None:
    """New weights arrive in the middle of turns: the episode goes on with what its environment knows."""
    plain = RolloutRunner(DenseEngine(model, 4), lambda prompt: Scoring(prompt), TOKENIZER, 7, 5)
    expected = {t.id: t for t in plain.run(draws(), 3, SAMPLING, "train")}
    stopping = RolloutRunner(Stopping(model, every), lambda prompt: Scoring(prompt), TOKENIZER, 7, 5)
    found = stopped_again_and_again(stopping, SAMPLING)
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert (one.turns, one.reward, one.finish) == (
            expected[name].turns,
            expected[name].reward,
            expected[name].finish,
        )
        np.testing.assert_array_equal(one.sequences[0].tokens, expected[name].sequences[0].tokens)
    several = [len(set(one.nodes[-1].version.tolist())) > 1 for one in found.values()]
    assert any(several), "some turn is of two versions"


# --- the game, with its rows -----------------------------------------------------------------------------------------


def test_a_game_from_its_task_to_the_table_of_samples(tools: Any) -> None:
    task = make_task("guess_number", {}, 0)
    tokenizer = Tokenizer.from_characters(str(task.alphabet))
    rows = [task.row("train", k) for k in range(6)]
    prompts = [Prompt(row, str(row.prompt), tokenizer.encode(str(row.prompt))) for row in rows]
    model = tools.decoder(vocab=tokenizer.vocab_size)
    make = environment_factory(EnvironmentConfig(name="guess_number"), tokenizer)
    runner = RolloutRunner(DenseEngine(model), make, tokenizer, 0, 4)
    sampling = SamplingOptions(max_tokens=20, stop_tokens=tokenizer.eos_ids)
    found = list(runner.run([PromptSample(p, 0) for p in prompts], 2, sampling, "train"))
    assert {t.reward for t in found} <= {0.0, 1.0}
    for one in found:
        secret = next(row.answer for row in rows if row.id == one.prompt_id)
        assert [who["who"] for who in said(one, tokenizer)] == (["model", "environment"] * len(one.turns))[
            : 2 * len(one.turns) - 1
        ]
        states = [span.state for span in one.turns]
        for state in states:
            low, high = (int(x) for x in str(state).split("-"))
            assert low <= secret <= high
        assert "".join(who["text"] for who in said(one, tokenizer)).replace("<pad>", "") == one.completion


def said(one: Trajectory, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(turns_json(one, tokenizer) or "[]")
    return found
