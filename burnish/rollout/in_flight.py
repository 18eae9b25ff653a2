"""`InFlightTrajectories` holds trajectories that have not ended: in an engine, paused between two requests, or waiting for an environment.

A paused trajectory keeps its tokens, each with the version of the weights that sampled it. It continues as a request whose prompt
includes those tokens, and its random numbers continue at the same position. Multi-turn trajectories continue in the same way, with the
environment's tokens appended. While a trajectory waits for its environment, it has no request in the engine.

An episode whose environment fails is started again with the same seed, up to `retries` times. Then it ends with an error text and
without a reward.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.pictures import PictureSpan, distinct_tokens
from burnish.core.random_keys import fold, sample_key
from burnish.core.routed_experts import first_records
from burnish.core.trajectory import (
    EPISODE,
    OPPONENT,
    PLAYERS,
    RECORD,
    ROLE,
    VOID_TURNS,
    Trajectory,
    TrajectoryFinish,
    TurnSpan,
)
from burnish.data.prompt_stream import PromptSample
from burnish.environments.base import Answer, Done, End, Episode, EpisodeFailed, Observation, Turn
from burnish.environments.host import HostReply, Reply
from burnish.rollout.finished_trajectory import checked_reward, episode_reward, finished_trajectory
from burnish.rollout.running_trajectory import PartialTurn, RunningTrajectory, TokenPath

if TYPE_CHECKING:
    from burnish.rollout.runner import RolloutRunner

T = TypeVar("T")
REPLACEMENT_CHARACTER = "\ufffd"
"""What a tokenizer decodes an incomplete UTF-8 sequence to."""
MAX_DEATHS = 64
"""How often an episode starts again because its worker process died with others in it. These starts do not count as retries."""
MAX_OPENINGS = 4096
"""Different first prompts of episodes that are remembered. An asynchronous run has one for each of its groups, without end."""
SEED_COLUMN = "seed"
"""The column of a row that sets the seed of its episodes."""


class InFlightTrajectories:
    """The unfinished trajectories of a runner: running in its engine, paused until `submit_pending`, or waiting for an environment."""

    def __init__(self, runner: RolloutRunner, is_continued: bool = False) -> None:
        """`is_continued`: other answers will start from prefixes of these, so the engine should keep their KV cache."""
        self.runner, self.is_continued = runner, is_continued
        self.running: dict[str, RunningTrajectory] = {}
        """By request id."""
        self.paused: list[RunningTrajectory] = []
        self.waiting: dict[RunningTrajectory, None] = {}
        """Trajectories whose environment has not replied yet, in the order of the calls."""
        self._replies: queue.SimpleQueue[HostReply] = queue.SimpleQueue()
        self._has_interrupted = False
        self._openings: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __iter__(self) -> Iterator[RunningTrajectory]:
        yield from self.running.values()
        yield from self.paused
        yield from self.waiting

    def add(
        self, draw: PromptSample, sample: int, sampling: SamplingOptions, stream: str, priority: int = 0
    ) -> list[Trajectory]:
        """Add a new trajectory. If its environment fails to start, return the failed trajectory.

        The greedy answer (sample -1) has the random key of sample 0 of its stream.
        """
        key = sample_key(self.runner.seed, stream, draw.prompt.row.id, draw.visit, max(0, sample))
        active = RunningTrajectory(draw, sample, key, stream, sampling, sampling, priority)
        if self.runner.opponents is not None and stream == "train":
            active.game = self.runner.opponents.game_of(draw)
        return self._begin(active)

    def drop(self, active: RunningTrajectory) -> None:
        """Forget a trajectory that is not in the engine."""
        active.is_dropped = True
        if active in self.waiting:
            del self.waiting[active]
        else:
            self.paused.remove(active)
        self._close(active)

    def submit_pending(self) -> None:
        """Submit all paused trajectories to the engine."""
        pending, self.paused = self.paused, []
        if pending:
            self.runner.engine.submit([self._request(active) for active in pending])

    def take(self, completion: Completion) -> list[Trajectory]:
        """Process a completion. Returns the trajectories that ended with it; otherwise the trajectory is paused or waits."""
        active = self.running.pop(completion.id)
        self._record(active, completion)
        if completion.finish == "aborted":
            self._drop_partial_stop(active)
            self.paused.append(active)
            return []
        turn, active.turn = active.turn, PartialTurn()
        return self._take_turn(active, turn, completion)

    def _take_turn(self, active: RunningTrajectory, turn: PartialTurn, completion: Completion) -> list[Trajectory]:
        """Process a complete turn of the model."""
        path = active.current
        path.turns.append(TurnSpan(path.append_turn(turn), path.state))
        active.num_turns += 1
        if active.session is None:
            return self._observe_tokens(active, turn, completion.finish == "length")
        if completion.finish == "length" and not active.session.kind.takes_truncated:
            if active.session.kind.tells_void_turns:
                active.add_metrics({VOID_TURNS: 1.0})  # a complete call or answer would have ended the turn
            return self._cut(active, "length")
        return self._ask(active, "step", self._answer(active, turn, completion))

    def take_replies(self, wait_s: float = 0.0) -> list[Trajectory]:
        """Process the replies of environments that have arrived; wait up to `wait_s` for the first. Returns trajectories that ended."""
        self._has_interrupted = False  # before reading: a later reply must interrupt the engine again
        finished = list[Trajectory]()
        while self.waiting:
            try:
                ticket, reply = self._replies.get(timeout=wait_s) if wait_s else self._replies.get_nowait()
            except queue.Empty:
                break
            wait_s = 0.0
            finished += self._take_reply(ticket, reply)
        return finished

    def _take_reply(self, ticket: Any, reply: Reply) -> list[Trajectory]:
        """Process one reply. The ticket is the trajectory that waits for it."""
        if ticket.is_dropped:
            return []
        del self.waiting[ticket]
        return self._handle(ticket, reply)

    @property
    def has_replies(self) -> bool:
        """Whether a reply of an environment has not been processed yet."""
        return not self._replies.empty()

    def pause_all(self) -> list[Trajectory]:
        """Abort all requests and pause their trajectories. Returns those that ended meanwhile. No stream may be open."""
        engine, ended = self.runner.engine, list[Completion]()
        left = set(self.running)
        while left:
            stopped = engine.abort(left, keep=True)
            # A request that could not be aborted has ended, or is being reissued: take one completion, then try again.
            ended += stopped or list(islice(engine.stream(), 1))
            left -= {completion.id for completion in ended}
        for _ in engine.stream():  # consumes a late interrupt, which would otherwise end the next stream
            raise RuntimeError("the engine returned a completion after all its requests were aborted")
        return [finished for completion in ended for finished in self.take(completion)]

    def close(self) -> None:
        """Close the environments of all trajectories."""
        for active in list(self):
            active.is_dropped = True
            self._close(active)

    # --- requests and completions ------------------------------------------------------------------------------------

    def _request(self, active: RunningTrajectory) -> Request:
        """Build the next request of a trajectory and move the trajectory to `running`."""
        again = f"~{active.num_requests}" if active.num_partial or active.num_retries or active.num_deaths else ""
        name = f"{active.draw.prompt.row.id}#{active.draw.visit}.{active.label}/{active.num_turns}{again}"
        self.running[name] = active
        active.num_requests += 1
        sampling = active.sampling
        if active.num_partial:
            sampling = replace(sampling, max_tokens=sampling.max_tokens - active.num_partial)
        may_continue = self.is_continued or active.num_turns + 1 < self.runner.max_turns
        path = active.current
        is_opening = len(path.nodes) == 1 and not active.num_partial
        tokens = path.opening if is_opening else tuple(active.context())
        game = active.game
        opponent = None if game is None or active.role == game.player else game.version
        return Request(
            name,
            tokens,
            sampling,
            active.key,
            active.num_sampled,
            active.priority,
            may_continue,
            opponent,
            path.opening_pictures if is_opening else path.pictures(),
        )

    def _record(self, active: RunningTrajectory, completion: Completion) -> None:
        """Append the sampled tokens of a completion to the current turn. Raises if a log-prob is not finite."""
        if not np.isfinite(completion.logp).all():
            raise UserError(
                f"{completion.id}: the model gives log-probs that are not finite, so its weights are broken; "
                "go back to an earlier checkpoint and lower training.optimizer.lr"
            )
        tokens = completion.tokens.tolist()
        active.turn.append(tokens, completion.logp.tolist(), completion.version)
        active.turn.experts = first_records(active.turn.experts, completion.experts)
        active.num_sampled += len(tokens)

    def _drop_partial_stop(self, active: RunningTrajectory) -> None:
        """Remove trailing tokens of an aborted request that may begin a stop string; they are sampled again.

        An engine finds stop strings only in the tokens of its current request.
        """
        if not active.sampling.stop:
            return
        prefixes = tuple(text[:k] for text in active.sampling.stop for k in range(1, len(text) + 1))
        while active.num_partial:
            text = self.runner.tokenizer.decode(active.turn.tokens)
            if not text.endswith((REPLACEMENT_CHARACTER, *prefixes)):
                return
            active.turn.drop_last(1)
            active.num_sampled -= 1

    # --- environments on tokens --------------------------------------------------------------------------------------

    def _begin(self, active: RunningTrajectory) -> list[Trajectory]:
        """Start the environment of a trajectory."""
        runner, row = self.runner, active.draw.prompt.row
        if runner.host is not None:
            active.session = runner.host.open()
            return self._ask(active, "start", self._episode(active))

        make = runner.make_environment
        assert make is not None, "a runner has a host or a factory"

        def start() -> Turn | Done:
            active.environment = make(active.draw.prompt)
            return active.environment.start()

        reply = _call_environment(start, "start", row.id)
        if isinstance(reply, str):
            active.add_event("reset_failed", "start", reply)
            return self._failed(active, reply)
        opening = self._checked_turn(active, reply, "start")
        return self._open(active, tuple(opening.tokens), opening.pictures)

    def _open(
        self, active: RunningTrajectory, opening: tuple[int, ...], pictures: tuple[PictureSpan, ...]
    ) -> list[Trajectory]:
        """Set the first tokens of a trajectory and pause it. An opening that is too long fails the sample or ends the run."""
        runner, row = self.runner, active.draw.prompt.row
        num_tokens = len(opening) + active.sampling.max_tokens
        if runner.longest is not None and num_tokens > runner.longest:
            problem = f"row {row.id}: the environment's start() gave {len(opening)} tokens, and max_tokens={active.sampling.max_tokens} more make {num_tokens}"
            if runner.longest == runner.max_tokens:  # an environment's long prompt fails one sample, not the run
                problem += f", but environment.max_tokens={runner.longest} is for all turns together; raise it, or lower max_tokens"
                active.add_event("too_long", "start", problem)
                return self._failed(active, problem)
            raise UserError(f"{problem}, but the model is made for {runner.longest} positions; lower max_tokens")
        active.current.open(opening, pictures)
        self.paused.append(active)
        return []

    def _observe_tokens(self, active: RunningTrajectory, turn: PartialTurn, is_cut: bool) -> list[Trajectory]:
        """Call an environment that works on tokens after a complete turn."""
        if is_cut:
            return self._trajectories(active, "length")
        environment, text = active.environment, self.runner.tokenizer.decode(turn.tokens)
        assert environment is not None, "a running trajectory has an environment"
        reply = _call_environment(lambda: environment.observe(turn.tokens, text), "observe", active.draw.prompt.row.id)
        if isinstance(reply, str):
            active.add_event("step_failed", "observe", reply)
            return self._failed(active, reply)
        path = active.current
        if isinstance(reply, Done):
            path.turns[-1] = path.turns[-1]._replace(reward=checked_reward(reply.reward or 0.0))
            return self._trajectories(active, "stop", is_scored=reply.reward is not None)
        seen = self._checked_turn(active, reply, "observe")
        path.turns[-1] = path.turns[-1]._replace(reward=checked_reward(reply.reward))
        longest, most = self.runner.longest, active.sampling.max_tokens
        if longest is not None and path.length + len(seen.tokens) + most > longest:
            return self._trajectories(active, "length")  # no room for another turn
        if active.num_turns >= self.runner.max_turns:
            return self._trajectories(active, "turns")
        path.append(seen.tokens, pictures=seen.pictures)
        self.paused.append(active)
        return []

    def _checked_turn(self, active: RunningTrajectory, reply: object, method: str) -> Turn:
        """Check an environment's turn, store its state and return it. Wrong types or tokens would crash later or be trained on."""
        if not isinstance(reply, Turn):
            expected = "Turn" if method == "start" else "Turn or Done"
            raise UserError(f"the environment's {method}() returned {type(reply).__name__}; expected {expected}")
        size = self.runner.tokenizer.vocab_size
        if unknown := [t for t in reply.tokens if not 0 <= t < size]:
            raise UserError(
                f"the environment's {method}() gave token {unknown[0]}; the tokenizer knows 0 to {size - 1}"
            )
        if reply.state is not None and not isinstance(reply.state, str):
            raise UserError(
                f"the environment's {method}() gave a state of type {type(reply.state).__name__}; expected a text"
            )
        self._set_state(active, active.current, reply.state)
        return reply

    def _set_state(self, active: RunningTrajectory, path: TokenPath, state: str | None) -> None:
        if path.turns and (state is None) != (path.turns[0].state is None):
            raise UserError(
                "the environment reports its state in some turns and not in others; give a state in all of them"
            )
        path.state = state

    # --- environments on messages ------------------------------------------------------------------------------------

    def _episode(self, active: RunningTrajectory) -> Episode:
        draw, row = active.draw, active.draw.prompt.row
        given = row.extra.get(SEED_COLUMN)
        seed = given if isinstance(given, int) else fold(self.runner.seed, "episode", row.id, draw.visit) % 2**31
        name = f"{row.id}#{draw.visit}.{active.sample}"
        return Episode(
            name, seed, row.prompt, row.answer, row.extra, row.data_source, active.sample, active.stream == "train"
        )

    def _answer(self, active: RunningTrajectory, turn: PartialTurn, completion: Completion) -> Answer:
        tokens, decode = turn.tokens, self.runner.tokenizer.decode
        spoken = tokens[:-1] if tokens and tokens[-1] in active.sampling.stop_tokens else tokens
        return Answer(
            decode(tokens),
            decode(spoken, skip_special=False),
            "length" if completion.finish == "length" else "stop",
            len(tokens),
            active.num_turns - 1,
        )

    def _ask(
        self, active: RunningTrajectory, method: Literal["start", "step", "end"], argument: Episode | Answer | str
    ) -> list[Trajectory]:
        """Call the environment. Without an immediate reply the trajectory waits."""
        host, session = self.runner.host, active.session
        assert host is not None, "an environment on messages has a host"
        assert session is not None, "its episode has begun"
        reply = host.ask(session, method, argument, active, self._replies, self._interrupt)
        if reply is not None:
            return self._handle(active, reply)
        self.waiting[active] = None
        return []

    def _interrupt(self) -> None:
        """Make the engine's stream return, so that the reply is processed now. Runs in the thread of the event loop."""
        if not self._has_interrupted:
            self._has_interrupted = True
            self.runner.engine.interrupt()

    def _handle(self, active: RunningTrajectory, reply: Reply) -> list[Trajectory]:
        """Process the reply of an environment."""
        if isinstance(reply, UserError):
            raise reply
        if isinstance(reply, EpisodeFailed):
            return self._retry(active, reply)
        active.events += [asdict(event) for event in reply.events]
        active.add_metrics(reply.metrics)
        try:
            return self._end(active, reply) if isinstance(reply, End) else self._continue(active, reply)
        except EpisodeFailed as error:
            return self._retry(active, error)

    def _retry(self, active: RunningTrajectory, failure: EpisodeFailed) -> list[Trajectory]:
        """Start a failed episode again with the same seed and random numbers, or give it up."""
        message = f"row {active.draw.prompt.row.id}: the environment's {failure.message}"
        active.add_event(
            failure.kind, self.runner.host.kind.name if self.runner.host else "", message, failure.traceback
        )
        self._close(active)
        if not failure.is_suspect and active.num_deaths < MAX_DEATHS:
            active.num_deaths += 1
        elif active.num_retries >= self.runner.retries:
            return self._failed(active, message)
        else:
            active.num_retries += 1
        active.begin_again()
        return self._begin(active)

    def _continue(self, active: RunningTrajectory, seen: Observation) -> list[Trajectory]:
        """Append an observation, or end the episode if no further turn is allowed."""
        runner = self.runner
        if active.num_turns == 0:
            return self._open_conversation(active, seen)
        path = active.current
        path.turns[-1] = path.turns[-1]._replace(reward=episode_reward(seen.reward))
        if active.num_turns >= runner.max_turns:
            return self._cut(active, "turns")
        if seen.role != active.role:
            path = active.paths.setdefault(seen.role, TokenPath())
        renderer = runner.renderer
        assert renderer is not None, "an environment on messages has a renderer"
        if not path.nodes or seen.new_conversation:
            if not seen.messages:
                raise EpisodeFailed("bad_reply", "step() gave text to begin a conversation with; expected messages")
            messages = seen.messages
            path.conversation = _rendered(lambda: renderer.open(messages, None))
            tokens, pictures, is_branch = path.conversation.tokens, path.conversation.pictures, True
            length, observed = len(tokens), None  # a first prompt
        else:
            conversation = path.conversation
            assert conversation is not None, "it was opened with the first prompt"
            completion = path.nodes[path.path[-1]].tokens.tolist()
            if seen.text is not None:
                text = seen.text
                extension = _rendered(lambda: conversation.append_text(completion, text, seen.bodies))
            else:
                extension = _rendered(lambda: conversation.extend(completion, seen.messages or (), bodies=seen.bodies))
            tokens, is_branch, observed = extension.tokens, extension.is_branch, extension.observed
            pictures = extension.pictures
            length = len(tokens) if is_branch else path.length + len(tokens)
        if runner.longest is not None and length + active.sampling.max_tokens > runner.longest:
            return self._cut(active, "length")  # the role that answered last is still the current one
        active.role = seen.role
        self._set_state(active, path, seen.state)
        if not path.nodes:
            path.open(self._shared_opening(tokens, pictures), pictures)
        elif seen.new_conversation:
            path.restart(tokens, pictures)
        elif is_branch:
            path.branch(tokens, observed, pictures)
        else:
            path.append(tokens, observed, pictures)
        self.paused.append(active)
        return []

    def _open_conversation(self, active: RunningTrajectory, seen: Observation) -> list[Trajectory]:
        """Render the first prompt of an episode."""
        renderer = self.runner.renderer
        assert renderer is not None, "an environment on messages has a renderer"
        if seen.stop:
            stop = (*active.sampling.stop, *(text for text in seen.stop if text not in active.sampling.stop))
            active.sampling = replace(active.sampling, stop=stop)
        if seen.role is not None:
            active.role, active.paths = seen.role, {seen.role: TokenPath()}
        messages = seen.messages if seen.messages is not None else active.draw.prompt.row.prompt
        path = active.current
        path.conversation = _rendered(lambda: renderer.open(messages, seen.tools))
        self._set_state(active, path, seen.state)
        pictures = path.conversation.pictures
        return self._open(active, self._shared_opening(path.conversation.tokens, pictures), pictures)

    def _shared_opening(self, tokens: tuple[int, ...], pictures: tuple[PictureSpan, ...] = ()) -> tuple[int, ...]:
        """Return one object for all equal openings, so that engines see that they share the prefix. Other images make another opening."""
        name = tuple(distinct_tokens(tokens, pictures)) if pictures else tokens
        if name not in self._openings and len(self._openings) >= MAX_OPENINGS:
            del self._openings[next(iter(self._openings))]  # the oldest
        return self._openings.setdefault(name, tokens)

    def _cut(self, active: RunningTrajectory, reason: Literal["turns", "length"]) -> list[Trajectory]:
        """End an episode that has no turns or tokens left. The environment says what it is worth."""
        active.finish = reason
        return self._ask(active, "end", reason)

    def _end(self, active: RunningTrajectory, end: End) -> list[Trajectory]:
        """Place the last rewards and return the finished trajectories."""
        if end.rewards is not None:
            played = [role for role in self.runner.roles if role in active.paths and active.paths[role].turns]
            if missing := [role for role in played if role not in end.rewards]:
                raise EpisodeFailed(
                    "bad_reply",
                    f"End gives no reward to the role {missing[0]!r}, which had a turn; give every such role one, 0 if it earned nothing",
                )
            for role, reward in end.rewards.items():
                path = active.paths.get(role)
                if path is not None and path.turns:
                    path.turns[-1] = path.turns[-1]._replace(reward=path.turns[-1].reward + episode_reward(reward))
        elif end.reward is not None:
            turns = active.current.turns
            turns[-1] = turns[-1]._replace(reward=turns[-1].reward + episode_reward(end.reward))
        is_scored = end.reward is not None or end.rewards is not None
        return self._trajectories(active, active.finish or "stop", is_scored, end=end)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _failed(self, active: RunningTrajectory, error: str) -> list[Trajectory]:
        return self._trajectories(active, "error", error=error)

    def _trajectories(
        self,
        active: RunningTrajectory,
        finish: TrajectoryFinish,
        is_scored: bool = False,
        error: str | None = None,
        end: End | None = None,
    ) -> list[Trajectory]:
        """Return the finished trajectories of an episode: one, or one for each role that had a turn.

        `is_scored`: the environment gave a reward at the end.
        """
        self._close(active)
        roles = self.runner.roles
        if not roles:
            return [self._trajectory(active, active.current, finish, is_scored, error, end)]
        found = list[Trajectory]()
        for index, role in enumerate(roles):
            path = active.paths.get(role)
            if active.game is not None and role != active.game.player:
                continue  # an opponent's tokens are not trained
            if error is None and (path is None or not path.turns):
                continue  # the game ended before this role had a turn
            trajectory = self._trajectory(active, path or TokenPath(), finish, is_scored, error, end, role)
            trajectory.sample = active.sample * len(roles) + index
            trajectory.metadata |= {ROLE: role, EPISODE: active.sample}
            if active.game is not None:
                trajectory.metadata[OPPONENT] = active.game.version
            found.append(trajectory)
        for trajectory in found:
            trajectory.metadata[PLAYERS] = len(found)
        if end is not None and end.record is not None and found:
            found[0].metadata[RECORD] = dict(end.record)
        return found

    def _trajectory(
        self,
        active: RunningTrajectory,
        path: TokenPath,
        finish: TrajectoryFinish,
        is_scored: bool = False,
        error: str | None = None,
        end: End | None = None,
        role: str | None = None,
    ) -> Trajectory:
        """Return the finished trajectory of one conversation. A subclass may add to it."""
        return finished_trajectory(active, path, self.runner.tokenizer, finish, is_scored, error, end, role)

    def _close(self, active: RunningTrajectory) -> None:
        if active.session is not None and self.runner.host is not None:
            self.runner.host.close_session(active.session)


def _rendered(render: Callable[[], T]) -> T:
    """Render messages of an environment. Messages that the chat template refuses fail the episode: those of others may be right."""
    try:
        return render()
    except UserError as error:
        raise EpisodeFailed("bad_reply", f"messages cannot be rendered: {error}") from error


def _call_environment(ask: Callable[[], Turn | Done], method: str, row: str) -> Turn | Done | str:
    """Call an environment on tokens and return its reply, or an error text if it raised. A `UserError` ends the run."""
    try:
        return ask()
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 (user code may raise anything; the sample fails with the reason)
        return f"row {row}: the environment's {method}() raised {type(error).__name__}: {error}"
