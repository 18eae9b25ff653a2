"""Episodes with environments on messages: the engine never waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import EVENTS, Trajectory, pack
from burnish.environments.base import Answer, Done, End, Environment, Episode, Observation, Turn
from burnish.environments.workers import ObjectSpec
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.decoder import Decoder
from burnish.rollout.in_flight import InFlightTrajectories
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.running_trajectory import PartialTurn, TokenPath
from burnish.rollout.scoring import score_request
from tests.rollout.counting_episodes import COUNTING, SAMPLING, Counting, facts, played, runner_of
from tests.rollout.test_in_flight import TOKENIZER, Stopping, draws


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


def test_an_episode_is_the_same_in_the_runner_in_the_loop_in_a_worker_and_on_tokens(
    model: Decoder, tmp_path: Path
) -> None:
    class OnTokens:
        def __init__(self, prompt: Any) -> None:
            self.prompt, self.told, self.turn = prompt, 0, 0

        def start(self) -> Turn:
            return Turn(tuple(self.prompt.tokens), "0")

        def observe(self, completion: list[int], text: str) -> Turn | Done:
            self.told, self.turn = self.told + len(completion), self.turn + 1
            if self.turn == 3:
                return Done(float(self.told))
            return Turn(tuple(TOKENIZER.encode(f"{self.told % 10}>")), str(self.turn - 1), 0.5)

    sampling = SamplingOptions(
        max_tokens=6, stop_tokens=(1, 3, 4, 5)
    )  # ends early: an environment on tokens sees no cut answers
    plain = RolloutRunner(DenseEngine(model), OnTokens, TOKENIZER, 7, 5)
    expected = {t.id: t for t in plain.run(draws(), 3, sampling, "train") if t.finish == "stop"}
    (tmp_path / "counting.py").write_text(COUNTING)
    spec = ObjectSpec("counting.py:Counting", {}, str(tmp_path))
    assert expected
    for runner in (
        runner_of(DenseEngine(model), Counting, "runner"),
        runner_of(DenseEngine(model, 2), Counting, "loop"),
        runner_of(DenseEngine(model), None, "worker", spec),
    ):
        found = {t.id: t for t in runner.run(draws(), 3, sampling, "train")}
        runner.close()
        assert all(t.accuracy == float(t.reward - 1.0 > 3) for t in found.values() if t.reward is not None)
        for name, t in expected.items():
            assert facts({name: found[name]})[name][:4] == facts({name: t})[name][:4]


def test_an_episode_that_waits_costs_no_row(model: Decoder) -> None:
    """With one row, the first episode is answered only after all others have ended."""
    ended = list[str]()
    all_others = asyncio.Event()

    class Waits(Environment):
        async def start(self, episode: Episode) -> Observation:
            self.id = episode.id
            return Observation()

        async def step(self, answer: Answer) -> Observation | End:
            if self.id == "r0#0.0" and answer.turn == 0:
                await all_others.wait()
                return Observation(messages=({"role": "user", "content": "5>"},))
            ended.append(self.id)
            if len(ended) == 5:
                all_others.set()
            return End(reward=1.0)

    found = played(runner_of(DenseEngine(model, 1), Waits), 3)
    assert len(found) == 6
    assert ended[-1] == "r0#0.0"
    assert [len(t.turns) for t in found.values()].count(2) == 1


def test_a_cut_answer_ends_the_episode_unless_the_environment_takes_it(model: Decoder) -> None:
    asked = list[str]()

    class Valued(Counting):  # type: ignore[misc]
        async def end(self, reason: str) -> End:
            asked.append(reason)
            return End(reward=9.0)

    found = played(runner_of(DenseEngine(model), Valued, takes_truncated=False))
    cut = [t for t in found.values() if t.finish == "length"]
    assert cut
    assert asked == ["length"] * len(cut)
    assert all(t.reward == 9.0 + 0.5 * (len(t.turns) - 1) for t in cut)
    asked.clear()
    found = played(runner_of(DenseEngine(model), Valued, max_turns=2))
    assert {t.finish for t in found.values()} == {"turns"}
    assert asked == ["turns"] * 4


def test_an_episode_paused_anywhere_has_the_tokens_of_one_that_is_not(model: Decoder) -> None:
    expected = facts(played(runner_of(DenseEngine(model), Counting), 3))
    runner = runner_of(Stopping(model, 3), Counting)
    in_flight = InFlightTrajectories(runner)
    for draw in draws():
        for sample in range(3):
            in_flight.add(draw, sample, SAMPLING, "train")
    found = list[Trajectory]()
    for version in range(400):
        runner.engine.load(version, ())
        in_flight.submit_pending()
        for completion in runner.engine.stream():
            found += in_flight.take(completion)
        found += in_flight.pause_all()
        found += in_flight.take_replies(5.0 if in_flight.waiting else 0.0)
        if not list(in_flight):
            break
    runner.close()
    assert facts({t.id: t for t in found}) == expected


def test_each_role_of_a_game_has_a_conversation_and_a_trajectory_of_its_own(model: Decoder) -> None:
    class Duel(Environment):
        async def start(self, episode: Episode) -> Observation:
            return Observation(messages=({"role": "user", "content": "1>"},), role="first")

        async def step(self, answer: Answer) -> Observation | End:
            if answer.turn == 3:
                return End(rewards={"first": 1.0, "second": -1.0})
            role = "second" if answer.turn % 2 == 0 else "first"
            return Observation(messages=({"role": "user", "content": f"{answer.turn + 2}>"},), role=role)

    found = played(runner_of(DenseEngine(model), Duel, roles=("first", "second")), 2)
    assert len(found) == 8
    by_role = {role: [t for t in found.values() if t.role == role] for role in ("first", "second")}
    assert {t.reward for t in by_role["first"]} == {1.0}
    assert {t.reward for t in by_role["second"]} == {-1.0}
    first, second = by_role["first"][0], by_role["second"][0]
    assert TOKENIZER.decode(first.nodes[0].tokens.tolist()) == "1>"
    assert TOKENIZER.decode(second.nodes[0].tokens.tolist()) == "2>"
    assert [len(t.turns) for t in (first, second)] == [2, 2]
    batch = pack([t for t in found.values() if t.prompt_id == "r0"])
    assert len(set(batch.sequence["group_ids"].tolist())) == 2


def test_without_room_for_the_next_role_the_last_reward_is_that_of_the_role_that_answered(model: Decoder) -> None:
    class LongReply(Environment):
        async def start(self, episode: Episode) -> Observation:
            return Observation(messages=({"role": "user", "content": "1>"},), role="first")

        async def step(self, answer: Answer) -> Observation | End:
            return Observation(messages=({"role": "user", "content": "1" * 30},), role="second")

        async def end(self, reason: Any) -> End:
            return End(reward=1.0)

    found = played(runner_of(DenseEngine(model), LongReply, roles=("first", "second"), max_tokens=20), 1)
    assert [(t.role, t.finish, t.reward) for t in found.values()] == [("first", "length", 1.0)] * 2


@pytest.mark.parametrize(
    ("roles", "first", "reply", "problem"),
    [
        (
            ("a", "b"),
            "a",
            Observation(({"role": "user", "content": "2>"},), role="c"),
            "role 'c'; expected one of a, b",
        ),
        (("a", "b"), "a", Observation(({"role": "user", "content": "2>"},)), "the role None; expected one of a, b"),
        (("a", "b"), "a", Observation(text="2>", role="b"), "text to begin a conversation"),
        (("a", "b"), "a", End(rewards={"c": 1.0}), "role 'c'; its roles are a, b"),
        ((), None, Observation(({"role": "user", "content": "2>"},), role="b"), "no `roles`; list them there"),
        ((), None, Observation(text="2>", new_conversation=True), "text to begin a conversation"),
        ((), None, End(rewards={"a": 1.0}), "no `roles`, so give `reward`"),
    ],
)
def test_what_belongs_to_no_trajectory_fails_the_episode(
    model: Decoder, roles: tuple[str, ...], first: str | None, reply: Any, problem: str
) -> None:
    class Wrong(Environment):
        async def start(self, episode: Episode) -> Observation:
            return Observation(messages=({"role": "user", "content": "1>"},), role=first)

        async def step(self, answer: Answer) -> Observation | End:
            return reply if answer.turn == 0 else End(reward=0.0)

    found = played(runner_of(DenseEngine(model), Wrong, roles=roles), 1)
    assert len(found) == 2 * max(1, len(roles))
    assert all(problem in (t.error or "") for t in found.values())


def test_rewards_of_turns_that_cancel_out_need_one_at_the_end_too(model: Decoder) -> None:
    class Cancelling(Environment):
        async def start(self, episode: Episode) -> Observation:
            return Observation()

        async def step(self, answer: Answer) -> Observation | End:
            reward = 1.0 if answer.turn == 0 else -1.0
            return (
                Observation(messages=({"role": "user", "content": "2>"},), reward=reward) if answer.turn < 2 else End()
            )

    with pytest.raises(UserError, match="give the end a reward"):
        played(runner_of(DenseEngine(model), Cancelling), 1)


def test_an_end_must_reward_every_role_that_had_a_turn(model: Decoder) -> None:
    class Duel(Environment):
        async def start(self, episode: Episode) -> Observation:
            self.is_short = episode.sample == 1
            return Observation(messages=({"role": "user", "content": "1>"},), role="first")

        async def step(self, answer: Answer) -> Observation | End:
            if answer.turn == 0 and not self.is_short:
                return Observation(messages=({"role": "user", "content": "2>"},), role="second")
            return End(rewards={"first": 1.0})

    for t in played(runner_of(DenseEngine(model), Duel, roles=("first", "second"))).values():
        if t.sample >= 2:  # the second game ends before the second role has a turn
            assert (t.role, t.reward) == ("first", 1.0)
            continue
        assert t.reward is None
        assert t.error is not None
        assert t.error.startswith(
            f"row {t.prompt_id}: the environment's End gives no reward to the role 'second', which had a turn"
        )
        assert t.metadata[EVENTS][0]["kind"] == "bad_reply"


@pytest.mark.parametrize("where", ["start", "step", "text", "new conversation"])
def test_messages_that_cannot_be_rendered_fail_their_episode_only(model: Decoder, where: str) -> None:
    class Speaks(Environment):
        async def start(self, episode: Episode) -> Observation:
            self.word = "\ud800" if episode.sample == 0 else "2>"  # half of a surrogate pair
            return Observation(messages=({"role": "user", "content": self.word if where == "start" else "1>"},))

        async def step(self, answer: Answer) -> Observation | End:
            if answer.turn == 1:
                return End(reward=1.0)
            if where == "text":
                return Observation(text=self.word)
            messages = ({"role": "user", "content": self.word},)
            return Observation(messages=messages, new_conversation=where == "new conversation")

    for t in played(runner_of(DenseEngine(model), Speaks)).values():
        assert (t.reward is None) == (t.sample == 0)
        if t.sample == 0:
            assert t.error is not None
            assert f"row {t.prompt_id}: the environment's messages cannot be rendered: the text has half of" in t.error
            assert [event["kind"] for event in t.metadata[EVENTS]] == ["bad_reply"]


def test_rewards_read_the_last_sequence_behind_its_prompt() -> None:
    """A branch repeats the prompt and earlier turns as context, up to a change at the end of the prompt."""
    path = TokenPath()
    path.opening = (5, 6, 7)
    path.append(path.opening)
    turn = PartialTurn()
    turn.append([8, 9], [0.0, 0.0], 0)
    path.append_turn(turn)
    assert (path.tokens()[path.prompt_length() :], path.prompt_length()) == ([8, 9], 3)
    path.branch([5, 6, 7, 8, 9, 3])  # repeats the first answer, which an earlier sequence trains
    path.append_turn(turn)
    t = Trajectory("r0", 0, 0, path.nodes, "stop", "", metadata={"prompt_length": path.prompt_length()})
    request = score_request(t, draws()[0])
    assert request.num_prompt == 3
    assert request.tokens is not None
    assert request.written is not None
    assert [int(token) for token in request.tokens] == [5, 6, 7, 8, 9, 3, 8, 9]
    assert [int(one) for one in request.written] == [0, 0, 0, 1, 1, 0, 1, 1]
    path.branch([5, 6, 9, 2])  # the end of the prompt is another
    path.append_turn(turn)
    assert path.tokens()[path.prompt_length() :] == [9, 2, 8, 9]
    path.restart([4, 4])
    path.append_turn(turn)
    assert path.tokens()[path.prompt_length() :] == [8, 9]


def test_turns_without_call_or_answer_are_a_column_of_the_batch(model: Decoder) -> None:
    class Counts(Environment):
        async def start(self, episode: Episode) -> Observation:
            self.is_void = episode.sample == 1
            return Observation()

        async def step(self, answer: Answer) -> Observation | End:
            return End(reward=1.0, metrics={"void_turns": 1} if self.is_void else {})

        async def end(self, reason: str) -> End:
            return End(reward=0.0)

    runner = runner_of(DenseEngine(model), Counts, tells_void_turns=True, takes_truncated=False)
    found = played(runner, 6)
    assert {t.finish for t in found.values()} == {"stop", "length"}
    column = pack(list(found.values())).sequence["void_turns"].tolist()
    assert column == [float(t.finish == "length" or t.sample == 1) for t in found.values()]
    assert "void_turns" not in pack(list(played(runner_of(DenseEngine(model), Counting)).values())).sequence


def test_a_new_conversation_is_another_root_of_the_same_trajectory(model: Decoder) -> None:
    class Reader(Environment):
        async def start(self, episode: Episode) -> Observation:
            return Observation(messages=({"role": "user", "content": "11>"},))

        async def step(self, answer: Answer) -> Observation | End:
            if answer.turn == 2:
                return End(reward=1.0)
            return Observation(messages=({"role": "user", "content": f"{answer.turn}>"},), new_conversation=True)

    for t in played(runner_of(DenseEngine(model), Reader)).values():
        assert [node.parent for node in t.nodes] == [-1, 0, -1, 2, -1, 4]
        assert len(t.sequences) == 3
        assert sum(s.num_actions for s in t.sequences) == t.num_actions
        assert t.completion == TOKENIZER.decode(t.nodes[-1].tokens.tolist())


# --- marks of what was said ------------------------------------------------------------------------------------------------


class Telling(Environment):
    """Says a digit as a tool, then one as a user, then begins a conversation anew."""

    takes_truncated = True

    async def start(self, episode: Episode) -> Observation:
        return Observation()

    async def step(self, answer: Answer) -> Observation | End:
        seen = [
            Observation(text=">7"),
            Observation(messages=({"role": "user", "content": "38"},), bodies=None),
            Observation(messages=({"role": "user", "content": "56>"},), new_conversation=True),
        ]
        return End(1.0) if answer.turn == 3 else seen[answer.turn]


def test_bodies_are_marked_and_first_prompts_are_not(model: Decoder) -> None:
    runner = runner_of(DenseEngine(model), Telling)
    assert runner.renderer is not None
    plain, again = played(runner), runner_of(DenseEngine(model), Telling)
    assert again.renderer is not None
    again.renderer.marks_bodies = True
    marked = played(again)
    assert facts(plain) == facts(marked)
    assert all(node.observed is None for t in plain.values() for node in t.nodes)
    for t in marked.values():
        told = {
            role: TOKENIZER.decode([k for n in t.nodes if n.observed is not None for k in n.tokens[n.observed == role]])
            for role in (1, 2)
        }
        assert told == {1: ">7", 2: "38"}
