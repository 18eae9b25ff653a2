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
from dataclasses import replace
from typing import Any

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request
from burnish.core.random_keys import fold
from burnish.core.trajectory import Trajectory
from burnish.environments.base import AgentTask, End, EpisodeFailed
from burnish.environments.host import HostReply, Reply
from burnish.gateway.endpoint import RecordingEndpoint
from burnish.gateway.session import AgentSession, Sampled, SampleRequest, SessionLimits, bare_id
from burnish.rollout.finished_trajectory import episode_reward
from burnish.rollout.in_flight import InFlightTrajectories
from burnish.rollout.running_trajectory import PartialTurn, RunningTrajectory

WATCH_INTERVAL_S = 0.25
"""How often a running agent is checked for its deadline."""
REWRITES_HISTORY = "agent_rewrites_history"
"""Kind of the event of an agent none of whose calls continues an answer, so that every step is computed anew. The user is told once."""
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

    def __iter__(self) -> Iterator[RunningTrajectory]:
        yield from self.waiting  # the calls of an episode are parts of it

    def drop(self, active: RunningTrajectory) -> None:
        """Forget an episode whose calls are not in the engine."""
        active.is_dropped = True
        del self.waiting[active]
        for call in [call for call in self.paused if self._owner(call) is active]:
            self.paused.remove(call)
            del self._samples[call]
        self._close(active)

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
        async with runner.agent_slots():
            if active.is_dropped:
                return End()
            await self._endpoint.start()
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

    def _submit(self, sample: SampleRequest) -> None:
        """Hand a model call to the runner's thread. Runs in the event loop."""
        self._replies.put(HostReply(sample, SAMPLE))
        self._interrupt()

    def _take_reply(self, ticket: Any, reply: Reply) -> list[Trajectory]:
        if not isinstance(ticket, SampleRequest):
            return super()._take_reply(ticket, reply)
        active = self._episodes.get(ticket.session)
        if active is not None and not active.is_dropped and ticket.is_wanted:
            self._add_call(active, ticket)
        return []

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
        path.opening = self._shared_opening(sample.tokens)
        path.append(path.opening)
        self._samples[call] = sample
        self.paused.append(call)

    def _request(self, active: RunningTrajectory) -> Request:
        return replace(super()._request(active), may_continue=True)

    def _take_turn(self, active: RunningTrajectory, turn: PartialTurn, completion: Completion) -> list[Trajectory]:
        """Hand the sampled tokens of a model call to its session."""
        sample = self._samples.pop(active)
        is_cut = completion.finish == "length"
        sample.complete(Sampled(turn.tokens, turn.logp, turn.version, "length" if is_cut else "stop"))
        return []

    def _owner(self, call: RunningTrajectory) -> RunningTrajectory | None:
        return self._episodes.get(self._samples[call].session)

    # --- the end -----------------------------------------------------------------------------------------------------------

    def _handle(self, active: RunningTrajectory, reply: Reply) -> list[Trajectory]:
        """Build the trajectory of an episode from its token tree."""
        if isinstance(reply, End) and active.agent is not None:
            try:
                self._read_tree(active, active.agent, reply)
            except EpisodeFailed as error:
                reply = error
        return super()._handle(active, reply)

    def _read_tree(self, active: RunningTrajectory, agent: AgentSession, end: End) -> None:
        if not agent.tree.answers:
            raise EpisodeFailed("no_calls", f"agent ended without a model call; it was given {agent.base_url}")
        for response_id, value in (end.call_rewards or {}).items():
            try:
                agent.tree.reward(bare_id(response_id), episode_reward(value))
            except UserError as error:
                raise EpisodeFailed("bad_reply", f"agent gave a reward to an unknown answer: {error}") from error
        exported = agent.tree.export(self.runner.trained_calls)
        path = active.current
        path.nodes, path.turns = exported.nodes, exported.turns
        path.path = _path_to(path.nodes, path.turns[-1].node)
        path.length = sum(len(path.nodes[index].tokens) for index in path.path)
        active.num_turns, active.finish = len(path.turns), agent.finish
        active.add_metrics(agent.tree.metrics | {name: float(count) for name, count in agent.counts.items()})
        if (note := agent.tree.note()) is not None:
            active.add_event(REWRITES_HISTORY, self._host.kind.name, note)

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
