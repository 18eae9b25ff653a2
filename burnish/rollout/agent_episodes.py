"""`AgentTrajectories`: episodes of agents that call the model themselves, through the recording endpoint.

The program of an agent runs outside of the runner: in a worker process, or as a command. Its model calls arrive as `SampleRequest`s in the
same queue as its end. Each is a request of the engine, beside those of all other episodes; it is paused and continued with the weights like
any other. While an agent thinks or waits for a tool, it has no request in the engine.

A session's token tree becomes the trajectory of the episode when the agent ends. An agent that fails (it raises, dies, hangs, or never calls the
model) is started again with the same random numbers, up to `environment.retries` times; then the sample leaves the loss and the group
statistics.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request
from burnish.core.random_keys import fold
from burnish.core.trajectory import BRANCH_CREDIT, MAIN_TURN, NO_CALLS, SCORED_TEXT, Trajectory, TrajectoryFinish
from burnish.environments.base import AgentTask, End, EpisodeFailed
from burnish.environments.host import HostReply, Reply
from burnish.gateway.endpoint import RecordingEndpoint
from burnish.gateway.session import AgentSession, Sampled, SampleRequest, SessionLimits, bare_id
from burnish.rollout.finished_trajectory import episode_reward
from burnish.rollout.in_flight import InFlightTrajectories
from burnish.rollout.running_trajectory import PartialTurn, RunningTrajectory, TokenPath

WATCH_INTERVAL_S = 0.25
"""How often a running agent is checked for its deadline."""
REWRITES_HISTORY = "agent_rewrites_history"
"""Kind of the event of an agent none of whose calls continues an answer, so that every step is computed anew. The user is told once."""
METRIC_NAMES = {"retries": "call_retries"}
"""Counts of a session that have another name as metrics: `retries` counts episodes that started again."""
SAMPLE = End()
"""The reply that comes with a `SampleRequest`, which needs none."""


class AgentTrajectories(InFlightTrajectories):
    """The unfinished episodes of agents, all in `waiting`, and their model calls, in `running` or `paused`."""

    def __init__(self, runner: Any, is_continued: bool = False) -> None:
        super().__init__(runner, is_continued)
        assert runner.host is not None, "agents have a host"
        assert runner.endpoint is not None, "agents have an endpoint"
        self._host = runner.host
        self._endpoint: RecordingEndpoint = runner.endpoint
        self._episodes: dict[AgentSession, RunningTrajectory] = {}
        self._samples: dict[RunningTrajectory, SampleRequest] = {}
        """The model calls in `running` and `paused`."""
        self._numbers = itertools.count()
        most = self._host.kind.max_open
        # Not shared with other collections: validation must not wait for agents of training, whose calls wait for the engine.
        self._slots: AbstractAsyncContextManager[None] = nullcontext() if most is None else asyncio.Semaphore(most)

    def __iter__(self) -> Iterator[RunningTrajectory]:
        yield from self.waiting  # the calls of an episode are parts of it

    def drop(self, active: RunningTrajectory) -> None:
        """Forget an episode. Its agent is interrupted."""
        active.is_dropped = True
        del self.waiting[active]
        self._close(active)

    def submit_pending(self) -> None:
        """Submit all paused calls to the engine, except those that no agent waits for any more."""
        wanted = [call for call in self.paused if self._is_wanted(self._samples[call])]
        for call in set(self.paused).difference(wanted):
            del self._samples[call]
        self.paused = wanted
        super().submit_pending()

    # --- the life of an episode --------------------------------------------------------------------------------------------

    def _begin(self, active: RunningTrajectory) -> list[Trajectory]:
        """Start an agent. It may have to wait until another one has ended."""
        active.session = self._host.open()
        self.waiting[active] = None
        self._host.spawn(self._play(active, active.session))
        return []

    async def _play(self, active: RunningTrajectory, session: Any) -> None:
        """Run the agent of an episode to its end. Runs in the event loop."""
        reply: Reply
        try:
            async with session.lock:  # so that the session is closed after it
                reply = await self._played(active, session)
        except (EpisodeFailed, UserError) as error:
            reply = error
        except Exception as error:  # noqa: BLE001 (an episode without a reply would wait for ever)
            reply = EpisodeFailed("step_failed", f"agent could not be run: {type(error).__name__}: {error}")
        if active.agent is not None:
            self._endpoint.end(active.agent)
        self._replies.put(HostReply(active, reply))
        self._interrupt()

    async def _played(self, active: RunningTrajectory, session: Any) -> End:
        runner, kind = self.runner, self._host.kind
        async with self._slots:
            await self._endpoint.start()
            if active.is_dropped:
                return End()
            limits = SessionLimits(runner.max_turns, active.sampling.max_tokens, runner.longest)
            agent = self._endpoint.open(active.label, limits, self._submit)
            active.agent, self._episodes[agent] = agent, active
            task = AgentTask(self._episode(active), agent.base_url, agent.api_key)
            playing = asyncio.ensure_future(session.call("play", task, on_open=agent.begin))
            try:
                while not (await asyncio.wait([playing], timeout=WATCH_INTERVAL_S))[0]:
                    is_late = agent.idle_s > kind.deadline_s
                    if is_late or active.is_dropped:
                        self._endpoint.end(agent)
                        await session.interrupt()
                        await asyncio.wait([playing], timeout=kind.deadline_s)
                        raise EpisodeFailed(
                            "step_timed_out", f"agent neither ended nor called the model for {kind.deadline_s:g} s"
                        )
                return playing.result()
            finally:
                playing.cancel()
                await asyncio.wait([playing])  # a program is killed before its slot is free

    def _submit(self, sample: SampleRequest) -> None:
        """Hand a model call to the runner's thread. Runs in the event loop."""
        self._replies.put(HostReply(sample, SAMPLE))
        self._interrupt()

    def _take_reply(self, ticket: Any, reply: Reply) -> list[Trajectory]:
        if not isinstance(ticket, SampleRequest):
            return super()._take_reply(ticket, reply)
        if self._is_wanted(ticket):
            self._add_call(self._episodes[ticket.session], ticket)
        return []

    def _is_wanted(self, sample: SampleRequest) -> bool:
        """Whether the agent of an episode in flight waits for a sample."""
        active = self._episodes.get(sample.session)
        return active is not None and not active.is_dropped and sample.is_wanted

    # --- model calls -------------------------------------------------------------------------------------------------------

    def _add_call(self, active: RunningTrajectory, sample: SampleRequest) -> None:
        """Queue a model call for the engine."""
        stop = (*active.sampling.stop, *(text for text in sample.stop if text not in active.sampling.stop))
        stop_tokens = tuple(dict.fromkeys((*active.sampling.stop_tokens, *sample.stop_tokens)))
        sampling = replace(active.sampling, max_tokens=sample.max_tokens, stop=stop, stop_tokens=stop_tokens)
        key = fold(active.key, "call", *sample.key_parts)
        call = RunningTrajectory(active.draw, active.sample, key, active.stream, sampling, sampling, active.priority)
        call.num_turns = next(self._numbers)  # names its requests; earlier tries of the episode may still have some
        path = call.current
        path.open(self._shared_opening(sample.tokens, sample.pictures), sample.pictures)
        self._samples[call] = sample
        self.paused.append(call)

    def _request(self, active: RunningTrajectory) -> Request:
        return replace(super()._request(active), may_continue=True)

    def _record(self, active: RunningTrajectory, completion: Completion) -> None:
        super()._record(active, completion)
        episode = self._episodes.get(self._samples[active].session)
        if episode is not None and len(completion.tokens):
            known = completion.version if episode.oldest_call is None else episode.oldest_call
            episode.oldest_call = min(known, completion.version)

    def _take_turn(self, active: RunningTrajectory, turn: PartialTurn, completion: Completion) -> list[Trajectory]:
        """Hand the sampled tokens of a model call to its session."""
        sample = self._samples.pop(active)
        is_cut = completion.finish == "length"
        sample.complete(Sampled(turn.tokens, turn.logp, turn.version, "length" if is_cut else "stop"))
        return []

    # --- the end -----------------------------------------------------------------------------------------------------------

    def _handle(self, active: RunningTrajectory, reply: Reply) -> list[Trajectory]:
        """Build the trajectory of an episode from its token tree."""
        if isinstance(reply, End) and active.agent is not None:
            try:
                reply = self._read_tree(active, active.agent, reply)
            except EpisodeFailed as error:
                reply = error
        return super()._handle(active, reply)

    def _read_tree(self, active: RunningTrajectory, agent: AgentSession, end: End) -> End:
        """Take the nodes and turns from the token tree. Returns the end without the reward, which goes to the last turn of the main branch."""
        if not agent.tree.answers:
            raise EpisodeFailed(NO_CALLS, f"agent ended without a model call; it was given {agent.base_url}")
        for response_id, value in (end.call_rewards or {}).items():
            try:
                agent.tree.reward(bare_id(response_id), episode_reward(value))
            except UserError as error:
                raise EpisodeFailed("bad_reply", f"agent gave a reward to an unknown answer: {error}") from error
        exported = agent.tree.export(self.runner.trained_calls)
        if not exported.turns:
            raise EpisodeFailed("step_failed", "agent got only answers without tokens")
        path, last = active.current, exported.turns[exported.main]
        path.nodes, path.turns = exported.nodes, exported.turns
        path.path = _path_to(path.nodes, last.node)
        path.length = sum(len(path.nodes[index].tokens) for index in path.path)
        active.num_turns, active.finish, active.main_turn = len(path.turns), agent.finish, exported.main
        active.add_metrics({METRIC_NAMES.get(name, name): count for name, count in agent.tree.metrics.items()})
        active.add_metrics(agent.counts)
        active.add_metrics({f"untrained_{reason}": count for reason, count in exported.not_trained.items()})
        if (note := agent.tree.note()) is not None:
            active.add_event(REWRITES_HISTORY, self._host.kind.name, note)
        if end.reward is not None:
            active.end_reward = episode_reward(end.reward)
            path.turns[exported.main] = last._replace(reward=last.reward + active.end_reward)
        is_scored = end.reward is not None or agent.num_rewards > 0
        return replace(end, reward=0.0 if is_scored else None)

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
        found = super()._trajectory(active, path, finish, is_scored, error, end, role)
        if active.main_turn is not None and error is None:
            last = self.runner.tokenizer.decode(path.nodes[path.turns[active.main_turn].node].tokens.tolist())
            answer = end.answer if end is not None else None
            found.metadata |= {MAIN_TURN: active.main_turn, SCORED_TEXT: last if answer is None else answer}
            if self.runner.credit == "branch":
                found.metadata[BRANCH_CREDIT] = active.end_reward
            # Branches may divide the prompt of the main conversation into several nodes.
            prompt = itertools.takewhile(lambda index: not path.nodes[index].is_sampled, path.path)
            found.metadata["prompt_length"] = length = sum(len(path.nodes[index].tokens) for index in prompt)
            found.completion = self.runner.tokenizer.decode(path.tokens()[length:])
        return found

    def _close(self, active: RunningTrajectory) -> None:
        agent = active.agent
        if agent is not None:
            self._episodes.pop(agent, None)
            self._host.spawn(self._end_session(agent))
        super()._close(active)

    async def _end_session(self, agent: AgentSession) -> None:
        self._endpoint.end(agent)


def _path_to(nodes: list[Any], last: int) -> list[int]:
    """Return the nodes from a root to one of them."""
    path = [last]
    while (parent := nodes[path[-1]].parent) >= 0:
        path.append(parent)
    return path[::-1]
