"""Episodes to watch, for `burnish sample`: the model's tokens as they are sampled, and what the environment answers.

One episode is played at a time, by the same runner as in training. The printer hears tokens from the engine, and replies from the
environment, whose host or factory it wraps. The episode of an agent, which calls the model itself and may do so in several conversations at
once, is printed when it has ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from burnish.cli.main import print_note
from burnish.config.data import Data, Reward, Source, Template
from burnish.config.environment import AGENT, GAME_TURNS, SINGLE_TURN, Environment, check_turns, replaces_environment
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.records import Record, name_to_record
from burnish.config.rollout import Rollout, Sampling
from burnish.config.yaml_text import printable
from burnish.core.trajectory import EPISODE_METRICS, EVENTS, LAST_WORDS, Trajectory
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample, validation_prompts
from burnish.data.row import Message, Row, TextOrMessages
from burnish.data.template import render
from burnish.distributed.engine_builder import build_engine
from burnish.distributed.roles import build_environment_driver, build_scorers
from burnish.environments.base import (
    AgentTask,
    Answer,
    Done,
    End,
    Episode,
    EpisodeFailed,
    MakeEnvironment,
    Observation,
    Turn,
)
from burnish.environments.host import EnvironmentHost, Session
from burnish.environments.registry import check_template_for_turns, environment_class
from burnish.evaluation.model_source import fit_max_tokens
from burnish.gateway.completion_text import TextStream
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.scoring import apply_score, score_request
from burnish.rollout.validation import sampling_options
from burnish.trainers.episode_rows import episode_entries, opening_text

TASK_PREFIX = "task:"
AGENT_ROWS = 8
"""Model calls of one agent that are sampled at once."""
COLOURS = {"label": "2", "environment": "36", "reward": "33", "event": "31"}
"""ANSI codes, used in a terminal only. The model's text has the terminal's own colour."""


class SampleSettings(Record):
    """What an episode depends on. Keys begin with `environment.` on the command line."""

    environment: Annotated[Environment, BeforeValidator(name_to_record)] = Environment()
    """What answers the model."""
    template: Template = Template()
    """How messages become text."""
    sampling: Sampling = Sampling()
    """How tokens are drawn."""


def episode_settings(
    name: str | None, overrides: Sequence[str], run: dict[str, Any], template: Template | None, sampling: dict[str, Any]
) -> SampleSettings:
    """Return the settings: those of the run, then those of the command. A game has its usual turns unless they are given.

    None in `sampling` means not given. `template` is that of the command, if it gives one.
    """
    keys = {text.partition("=")[0] for text in overrides}
    of_run = run.get("environment", {})
    named = [text.partition("=")[2] for text in overrides if text.startswith("environment.name=")]
    wanted = named[-1] if named else name
    laid: dict[str, Any] = {}
    if of_run and wanted in (None, of_run.get("name")) and not replaces_environment(overrides):
        laid["environment"] = of_run
    elif wanted is not None:
        laid["environment.name"] = wanted
        if wanted in GAME_TURNS and "environment.max_turns" not in keys:
            laid["environment.max_turns"] = GAME_TURNS[wanted]
    laid["template"] = (template or Template.model_validate(run.get("data", {}).get("template") or {})).model_dump()
    rollout = run.get("rollout", {})
    brought = {key: rollout[key] for key in ("max_tokens", "stop") if key in rollout}
    laid |= {f"sampling.{key}": value for key, value in brought.items()}
    laid |= {f"sampling.{key}": value for key, value in sampling.items() if value is not None}
    texts = [f"{key}={json.dumps(value)}" for key, value in laid.items()]
    found = load(SampleSettings, None, [*texts, *overrides]).config
    environment_class(found.environment.name, Path.cwd())  # an unknown name is an error before the model is loaded
    try:
        check_turns(found.environment)
    except ValueError as error:
        raise UserError(str(error)) from error
    return found


def episode_prompts(
    settings: SampleSettings,
    tokenizer: Tokenizer,
    run: dict[str, Any],
    prompt: TextOrMessages | None,
    data: str | None,
    first: int,
    num: int,
    seed: int,
) -> list[Prompt]:
    """Return the rows to play: the typed prompt, or `num` rows from `first` on of the data, the game's task or the run's data."""
    name = settings.environment.name
    if prompt is not None:
        if name in GAME_TURNS:
            raise UserError(
                f"environment {name} plays the rows of its task, not a prompt: leave the prompt out, or give --environment {SINGLE_TURN}"
            )
        row = Row("prompt", prompt, "sample", None)
        text, tokens, pictures = render(row, tokenizer, settings.template)
        return [Prompt(row, text, tokens, pictures=pictures)]
    source = _source(name, data, run)
    section = Data(validation=[source], template=settings.template, max_prompt_tokens=sys.maxsize)
    found = validation_prompts([source], tokenizer, section, seed, first + num)
    if len(found) <= first:
        raise UserError(f"--row {first}: the data has {len(found)} rows, counted from 0")
    return found[first:]


def _source(name: str, data: str | None, run: dict[str, Any]) -> Source:
    if data is not None:
        is_task = data.startswith(TASK_PREFIX)
        return Source(task=data.removeprefix(TASK_PREFIX)) if is_task else Source(path=data)
    if name in GAME_TURNS:
        return Source(task=name)
    of_run = run.get("data", {})
    sources = (of_run.get("validation") or []) + (of_run.get("train") or [])
    if not sources:
        raise UserError(
            f"what is to be played in environment {name}? give a prompt, or --data with a file or task:NAME (and --row)"
        )
    return Source.model_validate({**sources[0], "weight": 1.0, "limit": None})


def play(
    policy: PolicyModel,
    settings: SampleSettings,
    prompts: Sequence[Prompt],
    n: int,
    seed: int,
    base: Path,
    reward: Reward | None = None,
) -> None:
    """Play `n` episodes of each prompt, one after the other, and print them. `reward` scores those without a reward of their own."""
    environment, tokenizer = settings.environment, policy.tokenizer
    if environment.max_turns == 1 and GAME_TURNS.get(environment.name) != 1:
        print_note(
            f"environment.max_turns=1 ends each episode in {environment.name} after the first answer; set it to play more turns"
        )
    for text in check_template_for_turns(environment, tokenizer, settings.template, base):
        print_note(text)
    longest = max(len(prompt.tokens) for prompt in prompts)
    max_tokens, note = fit_max_tokens(settings.sampling.max_tokens, longest, policy.max_positions, environment)
    if note is not None:
        print_note(note)
    options = sampling_options(settings.sampling.model_copy(update={"max_tokens": max_tokens}), tokenizer.eos_ids)
    printer = EpisodePrinter(tokenizer)
    is_native, is_agent = isinstance(policy.module, Decoder), environment.name == AGENT
    if not is_native and not is_agent:
        print_note(f"each answer is printed when it is complete: {policy.note}")
    rollout = Rollout(max_rows=AGENT_ROWS if is_agent else 1)
    engine = build_engine(policy, rollout, printer.hear if is_native and not is_agent else None)
    runner = build_environment_driver(environment, policy, engine, seed, base, settings.template)
    if not is_agent:
        watch(runner, printer)
    try:
        total = len(prompts) * n
        for number, (prompt, sample) in enumerate(((p, k) for p in prompts for k in range(n)), 1):
            printer.begin(f"episode {number} of {total}, {prompt.row.id}" if total > 1 else "")
            earlier = {(prompt.row.id, k) for k in range(sample * max(1, len(runner.roles)))}
            draw = PromptSample(prompt, 0)
            played = list(runner.run([draw], sample + 1, options, "eval", earlier))
            if reward is not None:
                score(played, draw, reward, policy, base)
            for t in played if is_agent else ():
                printer.conversation(t, prompt)
            printer.end(played)
    finally:
        runner.close()


def score(played: Sequence[Trajectory], draw: PromptSample, reward: Reward, policy: PolicyModel, base: Path) -> None:
    """Score the trajectories that their environment left to the configured reward."""
    unscored = {t.id: t for t in played if t.reward is None and t.error is None}
    if not unscored:
        return
    with Rewards(reward, base) as rewards:
        rewards.attach_scorers(build_scorers(reward, policy.tokenizer, base))
        rewards.check([draw.prompt.row], "answer_key=")
        rewards.submit([score_request(t, draw) for t in unscored.values()])
        while rewards.pending:
            for found in rewards.poll(None):
                apply_score(unscored[found.id], found)


def watch(runner: RolloutRunner, printer: EpisodePrinter) -> None:
    """Let the printer see every call of the environment."""
    if runner.host is not None:
        runner.host = WatchedHost(runner.host, printer)
    elif runner.make_environment is not None:
        runner.make_environment = watched_factory(runner.make_environment, printer, runner.tokenizer)


class WatchedHost(EnvironmentHost):
    """A host whose sessions tell the printer what they are asked and what they reply."""

    def __init__(self, host: EnvironmentHost, printer: EpisodePrinter) -> None:
        super().__init__(host.kind, host.make_workers)
        self.printer = printer

    def open(self) -> Session:
        return _WatchedSession(self.kind, self, self.printer)


class _WatchedSession(Session):
    def __init__(self, kind: Any, host: EnvironmentHost, printer: EpisodePrinter) -> None:
        super().__init__(kind, host)
        self.printer = printer
        self.row_prompt: str | list[Message] = ""

    async def call(
        self,
        method: Literal["start", "step", "end", "play"],
        argument: Episode | Answer | AgentTask | str,
        on_open: Callable[[], None] | None = None,
    ) -> Observation | End:
        if isinstance(argument, Episode):
            self.row_prompt = argument.prompt
        elif isinstance(argument, Answer):
            self.printer.answered(argument.raw_text, argument.finish == "length")
        try:
            reply = await super().call(method, argument, on_open)
        except EpisodeFailed as error:
            self.printer.failed(error)
            raise
        self.printer.replied(reply, self.row_prompt if method == "start" else None)
        return reply


def watched_factory(make: MakeEnvironment, printer: EpisodePrinter, tokenizer: Tokenizer) -> MakeEnvironment:
    """Return a factory of environments on tokens that tell the printer what they reply."""

    class Watched:
        def __init__(self, prompt: Prompt) -> None:
            self.inner = make(prompt)

        def __getattr__(self, name: str) -> Any:  # `gives_rewards` and `correct_at`
            return getattr(self.inner, name)

        def start(self) -> Turn:
            turn = self.inner.start()
            printer.show("environment", "prompt", tokenizer.decode(turn.tokens, skip_special=False))
            return turn

        def observe(self, completion: list[int], text: str) -> Turn | Done:
            printer.answered(text, False)
            reply = self.inner.observe(completion, text)
            printer.rewarded(reply.reward or 0.0)
            if isinstance(reply, Turn):
                printer.show("environment", "environment", tokenizer.decode(reply.tokens, skip_special=False))
            return reply

    return Watched


class EpisodePrinter:
    """Prints one episode at a time: the model's answers token by token, and everything else when it happens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        shown = {token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)}
        self.shown_ids = frozenset(shown - set(tokenizer.eos_ids))
        """Control tokens such as `[TOOL_CALLS]` are part of an answer; the end of a turn is not."""
        self.role: str | None = None
        self._request: str | None = None
        self._stream = TextStream(tokenizer, self.shown_ids)

    def begin(self, title: str) -> None:
        """A new episode begins."""
        self.role, self._request = None, None
        if title:
            self._write(f"=== {title} ===\n", "label")

    def hear(self, request: str, token: int) -> None:
        """A token was sampled."""
        if request != self._request:
            self._request, self._stream = request, TextStream(self.tokenizer, self.shown_ids)
            self._label(f"model{self._of_role()}")
        self._write(self._stream.push(token))

    def answered(self, text: str, is_cut: bool) -> None:
        """The model's answer is complete. An engine without a listener has not shown it yet."""
        if self._request is None:
            self._label(f"model{self._of_role()}")
            self._write(text)
        self._finish_answer(" (cut off at max_tokens)" if is_cut else "")

    def replied(self, reply: Observation | End, opening: str | list[Message] | None) -> None:
        """The environment has replied. `opening` is the prompt of the row, at the start of an episode."""
        self._finish_answer()
        for event in reply.events:
            self._write(f"! {event.kind} in {event.what}: {event.message}\n", "event")
        if isinstance(reply, End):
            self.rewarded(reply.reward or 0.0)
            for role, reward in (reply.rewards or {}).items():
                self._write(f"reward of {role} {reward:+.3g}\n", "reward")
            if reply.text:
                self.show("environment", "last words", reply.text)
            return
        self.rewarded(reply.reward)
        self.role = reply.role
        if opening is not None and reply.messages is None:
            self.show("environment", "prompt", opening if isinstance(opening, str) else _messages_text(opening))
        elif opening is not None:
            self.show("environment", f"prompt{self._of_role()}", _messages_text(reply.messages or ()))
        else:
            text = reply.text if reply.text is not None else _messages_text(reply.messages or ())
            what = "new conversation" if reply.new_conversation else "environment"
            self.show("environment", what + (f", to {reply.role}" if reply.role is not None else ""), text)
        if opening is not None and reply.tools:
            names = [str(tool.get("function", tool).get("name")) for tool in reply.tools]
            self._write(f"tools: {', '.join(names)}\n", "label")

    def rewarded(self, reward: float) -> None:
        """The last answer got a reward."""
        if reward:
            self._write(f"reward {reward:+.3g}\n", "reward")

    def failed(self, error: EpisodeFailed) -> None:
        """The environment failed."""
        self._finish_answer()
        self._write(f"! {error.kind}: {error.message}\n", "event")

    def conversation(self, t: Trajectory, prompt: Prompt) -> None:
        """Print the episode of an agent: its conversations, rewards of single answers, what it said last and what went wrong."""
        for event in t.metadata.get(EVENTS, ()):
            self._write(f"! {event['kind']} in {event['what']}: {event['message']}\n", "event")
        if not t.turns:
            return
        self.show("environment", "prompt", opening_text(t, prompt, self.tokenizer))
        for entry in episode_entries(t, self.tokenizer):
            if "branch" in entry:
                after = entry["after"]
                place = (
                    "a new conversation" if after is None else f"after turn {after}" if after else "after the prompt"
                )
                self._label(f"branch {entry['branch']}, {place}")
            is_model = entry["who"] == "model"
            self.show("" if is_model else "environment", "model" if is_model else "agent", entry["text"])
            self.rewarded(entry.get("reward", 0.0))
        if LAST_WORDS in t.metadata:
            self.show("environment", "last words", t.metadata[LAST_WORDS])

    def end(self, played: Sequence[Trajectory]) -> None:
        """Print the outcome of an episode: one line, or one for each player."""
        self._finish_answer()
        for t in played:
            reward = (
                "no reward (the environment leaves it to the reward of a recipe)"
                if t.reward is None
                else f"reward {t.reward:.3f}"
            )
            verdict = {None: "", 0.0: ", no success", 1.0: ", success"}.get(t.accuracy, f", accuracy {t.accuracy}")
            turns = f"{len(t.turns)} turn{'' if len(t.turns) == 1 else 's'}"
            why = {"turns": ", out of turns", "length": ", out of tokens", "error": ""}.get(t.finish, "")
            outcome = f"failed: {t.error}" if t.error is not None else f"{reward}{verdict}"
            who = f"{t.role}: " if t.role is not None else ""
            self._write(f"--- {who}{outcome}, {turns}{why} ---\n", "reward")
        for name, value in (played[0].metadata.get(EPISODE_METRICS, {}) if played else {}).items():
            self._write(f"{name} {value:g}\n", "label")

    def show(self, colour: str, label: str, text: str) -> None:
        """Print a labelled text."""
        self._label(label)
        self._write(text, colour)
        self._write("\n")

    def _of_role(self) -> str:
        return f", {self.role}" if self.role is not None else ""

    def _label(self, text: str) -> None:
        self._write(f"--- {text} ---\n", "label")

    def _finish_answer(self, note: str = "") -> None:
        if self._request is not None:
            self._write(self._stream.finish() + note + "\n")
        self._request = None

    def _write(self, text: str, colour: str = "") -> None:
        """Print a text. In a terminal it must not control the terminal; a file or pipe gets it unchanged."""
        if not text:
            return
        if sys.stdout.isatty():
            text = printable(text)
            text = f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if colour else text
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def _messages_text(messages: Sequence[Message]) -> str:
    """Return messages as text; the role stands before each message that is not the user's."""
    texts = [str(m["content"]) if m["role"] == "user" else f"{m['role']}: {m['content']}" for m in messages]
    return "\n".join(texts)
