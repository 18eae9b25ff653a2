"""`burnish solve DIR "question" --strategy NAME`: search for an answer, show the search while it runs, and print what it chose."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from burnish.cli.main import print_note
from burnish.cli.sample import check_policy, loaded_policy, read_prompt, with_images
from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.config.data import Template
    from burnish.config.rollout import Sampling
    from burnish.core.engine import Engine
    from burnish.data.prompt_stream import PromptSample
    from burnish.evaluation.strategies.search_program import SearchProgram
    from burnish.evaluation.strategies.solve_settings import SolveSettings
    from burnish.evaluation.strategies.solving import Solution
    from burnish.models.policy import PolicyModel

MAX_TOKENS = 1024
REDRAW_EVERY_S = 0.1
LINE_EVERY_S = 2.0
RUNNING_SHARE = 4
"""The texts that are being written have at most 1 / RUNNING_SHARE of the lines."""
SETTINGS = ("strategy.", "strategy=", "budget=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from burnish.config.explain import help_text
    from burnish.evaluation.strategies.solve_settings import DEFAULT_READER, READERS, SolveSettings

    add = parser.add_argument
    add(
        "model",
        type=Path,
        metavar="DIR",
        help="a Hugging Face model directory, an adapter, a run (its best checkpoint), or an id of the hub (org/name)",
    )
    add(
        "words",
        nargs="*",
        metavar="QUESTION strategy.key=value",
        help="the question; - reads it from stdin. Options of the strategy",
    )
    add("--strategy", metavar="NAME", help="how answers are sampled and one is chosen (default majority; list below)")
    add("--budget", type=int, metavar="TOKENS", help="most tokens that the search may sample")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    add("--top-p", type=float, default=1.0, help="keep the smallest set of tokens with this probability (default 1)")
    add("--top-k", type=int, default=0, help="keep the k most likely tokens; 0, the default, is off")
    add(
        "--max-tokens",
        type=int,
        help=f"most new tokens of one answer (default {MAX_TOKENS}, or what the model has room for)",
    )
    add("--stop", action="append", metavar="TEXT", help="end answers at this text; may be repeated")
    add("--seed", type=int, default=0, help="the same seed gives the same search (default 0)")
    add(
        "--reward",
        metavar="NAME",
        help=f"how the answer in a completion is read: {', '.join(READERS)} (default: as the run's reward does; else {DEFAULT_READER}: "
        "in \\boxed{}, an <answer> block or after ####)",
    )
    add(
        "--template", choices=("auto", "chat", "plain"), help="how the question becomes text (default: that of the run)"
    )
    add("--system", help="a system message (chat templates)")
    add(
        "--image",
        action="append",
        metavar="FILE",
        help="an image for the model to see; may be repeated. It stands at the mark <image> of the question, or before it",
    )
    add("--tree", action="store_true", help="print every node with its whole text")
    add("--json", action="store_true", help="print one JSON object with the answer, votes, cost and tree")
    add("--max-rows", type=int, default=256, help="most sequences decoded at once (default 256)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="type of the arithmetic (default: that of the run; else bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(SolveSettings)


def run(args: argparse.Namespace) -> int:
    """Print the result to stdout and everything else to stderr."""
    from burnish.evaluation.model_source import find_model
    from burnish.evaluation.strategies.solve_settings import check_strategy, reader_reward

    if args.tree and args.json:
        raise UserError("--json has every node with its whole text; leave --tree out")
    if args.max_rows < 1:
        raise UserError(f"--max-rows {args.max_rows}: expected 1 or more")
    question, settings, sampling = settings_of(args)
    check_strategy(settings.strategy, sampling.temperature)
    refuse_task(settings)
    reader_reward(args.reward, option="--reward")  # a wrong name is reported before a model is loaded
    subject = find_model(args.model, print_note)
    text = read_prompt(question)
    policy = loaded_policy(args, subject)
    draw = drawn(policy, with_images(text, args.image), template_of(args, subject.config))
    check_policy(policy, draw.prompt.tokens if not draw.prompt.pictures else ())
    reward = reader_reward(args.reward, subject.config.get("reward"), "--reward")
    solution = search(args, policy, draw, settings, sampling, reward, template_of(args, subject.config))
    print_solution(args, text, settings, solution)
    if solution.error is not None:
        raise UserError(f"strategy {settings.strategy.name} has chosen no answer: {solution.error}")
    return 0


def refuse_task(settings: SolveSettings) -> None:
    """Refuse the verifier of generated tasks, which reads columns of their rows."""
    from burnish.evaluation.strategies.registry import strategy_verifier

    verifier = strategy_verifier(settings.strategy)
    if verifier is not None and verifier.name == "task":
        raise UserError(
            "strategy.verifier=task checks rows of the tasks countdown and proofs, and a typed question has no columns; use likelihood, "
            "self_certainty, a reward model or a function of yours"
        )


def settings_of(args: argparse.Namespace) -> tuple[str, SolveSettings, Sampling]:
    """The question, the strategy with its options, and the sampling options."""
    from burnish.config.loading import load
    from burnish.config.rollout import Sampling
    from burnish.evaluation.strategies.solve_settings import SolveSettings

    overrides = [word for word in args.words if word.startswith(SETTINGS)]
    questions = [word for word in args.words if word not in overrides]
    if len(questions) > 1:
        raise UserError(f"got two questions, {questions[0]!r} and {questions[1]!r}; put a question in quotes")
    if not questions:
        raise UserError('burnish solve needs a question: burnish solve DIR "What is 17 + 25?"')
    for option in ("strategy", "budget"):
        if (value := getattr(args, option)) is not None:
            overrides.append(f"{option}={value}")
    settings = load(SolveSettings, None, overrides).config
    names = ("temperature", "top_p", "top_k", "max_tokens", "stop")
    values = {"max_tokens": MAX_TOKENS}
    values |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    sampling = load(Sampling, None, [f"{name}={json.dumps(value)}" for name, value in values.items()]).config
    return questions[0], settings, sampling


def template_of(args: argparse.Namespace, config: dict[str, Any]) -> Template:
    """The template of the run, with what the command changes."""
    from burnish.config.data import Template

    of_run = config.get("template") or config.get("data", {}).get("template") or {}
    given = {"kind": args.template, "system": args.system}
    return Template.model_validate({**of_run, **{name: value for name, value in given.items() if value is not None}})


def drawn(policy: PolicyModel, content: Any, template: Template) -> PromptSample:
    """The question as a prompt."""
    from burnish.data.prompt_pool import Prompt
    from burnish.data.prompt_stream import PromptSample
    from burnish.data.row import Row
    from burnish.data.template import render, template_kind

    row = Row("question", content, "", None)
    text, tokens, pictures = render(row, policy.tokenizer, template)
    is_chat = template_kind(policy.tokenizer, template) == "chat"
    return PromptSample(Prompt(row, text, list(tokens), is_chat=is_chat, pictures=pictures), 0)


def search(
    args: argparse.Namespace,
    policy: PolicyModel,
    draw: PromptSample,
    settings: SolveSettings,
    sampling: Sampling,
    reward: Any,
    template: Template,
) -> Solution:
    """Run the strategy and show its progress."""
    from burnish.evaluation.strategies.solving import solve_prompts
    from burnish.rollout.validation import sampling_options

    with SearchDisplay(sys.stderr) as display:
        (solution,) = solve_prompts(
            policy,
            engine_of(args, policy, display),
            [draw],
            settings,
            sampling_options(sampling, policy.tokenizer.eos_ids),
            reward,
            args.seed,
            template,
            Path.cwd(),
            display.on_step,
            print_note if args.max_tokens is not None else lambda _: None,
        )
    return solution


def engine_of(args: argparse.Namespace, policy: PolicyModel, display: SearchDisplay) -> Engine:
    """The engine, which tells the display of every token if it is the native one."""
    from burnish.config.rollout import Rollout
    from burnish.distributed.engine_builder import build_engine
    from burnish.models.decoder import Decoder

    listener = display.on_token if isinstance(policy.module, Decoder) else None
    return build_engine(policy, Rollout(max_rows=args.max_rows), listener)


def print_solution(args: argparse.Namespace, question: str, settings: SolveSettings, solution: Solution) -> None:
    """Print the result: text for people, or one JSON object."""
    from burnish.config.loading import to_plain_values
    from burnish.evaluation.strategies.solving import solution_text

    if args.json:
        plain = to_plain_values(settings)
        print(json.dumps({"question": question, **plain, "seed": args.seed, **solution.plain()}, ensure_ascii=False))
        return
    text = solution_text(solution, shutil.get_terminal_size((120, 24)).columns - 1, args.tree)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


class SearchDisplay:
    """Shows a search while it runs: a block that is redrawn in a terminal, or a line every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._program: SearchProgram | None = None
        self._running: dict[str, list[int]] = {}
        """Tokens of requests that have not ended, by the request's id."""
        self._num_lines = 0
        self._next = 0.0
        self._last_line = ""

    def on_token(self, request: str, token: int) -> None:
        """A token was sampled."""
        self._running.setdefault(request, []).append(token)
        self._show()

    def on_step(self, program: SearchProgram) -> None:
        """The search has changed."""
        self._program = program
        running = set(program.running)
        self._running = {request: tokens for request, tokens in self._running.items() if request in running}
        self._show(is_last=program.is_done)

    def _show(self, is_last: bool = False) -> None:
        began = time.monotonic()
        if self._program is None or (began < self._next and not is_last):
            return
        self._write_state(self._program)
        now = time.monotonic()
        # A large tree takes long to draw, and may cost the search a tenth of its time at most.
        self._next = now + max(REDRAW_EVERY_S if self._is_terminal else LINE_EVERY_S, 9 * (now - began))

    def _write_state(self, program: SearchProgram) -> None:
        if self._is_terminal:
            size = shutil.get_terminal_size()
            self._redraw(search_block(program, self._running, size.columns - 1, size.lines - 2))
            return
        from burnish.evaluation.strategies.search_text import progress_text

        line = progress_text(program.search, tokens_so_far(program, self._running))
        if line != self._last_line:
            self._last_line = line
            self._write(line + "\n")

    def _redraw(self, lines: list[str]) -> None:
        above = f"\x1b[{self._num_lines}F" if self._num_lines else ""
        self._write(above + "".join(f"\r{line}\x1b[K\n" for line in lines) + "\x1b[J")
        self._num_lines = len(lines)

    def _write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()

    def __enter__(self) -> SearchDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._num_lines:  # the result follows in the block's place
            self._write(f"\x1b[{self._num_lines}F\x1b[J")


def tokens_so_far(program: SearchProgram, running: Mapping[str, Sequence[int]]) -> int:
    """The tokens of a search, with those of requests that have not ended."""
    return program.search.cost.tokens + sum(map(len, running.values()))


def search_block(program: SearchProgram, running: Mapping[str, Sequence[int]], width: int, height: int) -> list[str]:
    """A search as lines for a terminal: how far it is, what is being written, then the votes, or the tree if answers branch."""
    from burnish.evaluation.strategies.search_runner import tree_record
    from burnish.evaluation.strategies.search_text import (
        clipped,
        progress_text,
        running_lines,
        tree_lines,
        votes_lines,
        votes_so_far,
    )

    found = program.search
    lines = [clipped(progress_text(found, tokens_so_far(program, running)), width)]
    lines += running_lines(found, running, width, max(0, height // RUNNING_SHARE))
    height -= len(lines) - 1
    branches = any(node.parent is not None and node.parent.parent is not None for node in found.nodes)
    has_scores = any(node.score is not None for node in found.nodes)
    if not branches and not has_scores:
        return lines + [f"  {line}" for line in votes_lines(votes_so_far(found), width - 2, max(1, height - 2))]
    done = [node for node in tree_record(found, program.choice) if node["parent"] is None or node["tokens"]]
    known = {node["node"] for node in done}
    latest = [node for node in done if node["parent"] is None or node["parent"] in known]
    return lines + tree_lines(latest, width, max(2, height - 1))
