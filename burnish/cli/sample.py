"""`burnish sample DIR "prompt"`: print text from a model while it is sampled.

With an environment, that of a run or `--environment NAME`, it plays whole episodes (`burnish.cli.sample_episodes`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli.main import print_note
from burnish.config.environment import SINGLE_TURN
from burnish.config.errors import UserError
from burnish.config.yaml_text import printable

if TYPE_CHECKING:
    from burnish.config.rollout import Sampling
    from burnish.core.engine import Request
    from burnish.evaluation.model_source import ModelSource
    from burnish.models.policy import PolicyModel
    from burnish.models.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        type=Path,
        metavar="DIR",
        help="a Hugging Face model directory, a run (its best checkpoint), or an id of the hub (org/name)",
    )
    add(
        "words",
        nargs="*",
        metavar="PROMPT environment.key=value",
        help="the prompt; - reads it from stdin. An environment may take its prompts from data instead. Settings of the environment",
    )
    add("--n", type=int, default=1, help="samples, printed one after the other (default 1)")
    add(
        "--environment",
        metavar="NAME",
        help="play episodes in this environment, or '{agent: FILE.py:FUNCTION}' (default: that of the run; single_turn: none; "
        "`burnish environments` lists them)",
    )
    add("--episodes", type=int, help="with an environment: how many rows to play, one after the other (default 1)")
    add(
        "--data",
        metavar="SOURCE",
        help="with an environment: a file or task:NAME whose rows to play (default: the game's or run's)",
    )
    add("--row", type=int, help="with an environment: the first row to play, counted from 0 (default 0)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    add("--top-p", type=float, default=1.0, help="keep the smallest set of tokens with this probability (default 1)")
    add("--top-k", type=int, default=0, help="keep the k most likely tokens; 0, the default, is off")
    add(
        "--max-tokens",
        type=int,
        help="most new tokens of an answer (default 256; in a run's environment, those of the run)",
    )
    add("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    add("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    add(
        "--template",
        choices=("auto", "chat", "plain"),
        help="auto, the default: chat if the tokenizer has a chat template; in a run's environment, that of the run",
    )
    add(
        "--prerendered",
        action="store_true",
        help="the prompt contains its special tokens: parse them and apply no template",
    )
    add("--system", help="a system message (chat templates)")
    add(
        "--image",
        action="append",
        metavar="FILE",
        help="an image for the model to see; may be repeated. It stands at the mark <image> of the prompt, or before the prompt",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="type of the arithmetic (default: that of the run; else bfloat16 on a GPU, float32 on a CPU)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the completions to stdout and everything else to stderr."""
    from burnish.config.loading import load
    from burnish.config.rollout import Sampling
    from burnish.evaluation.model_source import find_model

    if args.n < 1:
        raise UserError(f"--n {args.n}: expected 1 or more")
    if args.n > 1 and args.temperature == 0:
        raise UserError(f"--n {args.n} at --temperature 0: greedy samples are identical; raise the temperature")
    values = {key: getattr(args, key) for key in Sampling.model_fields}
    given = [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
    sampling = load(Sampling, None, given).config
    prompt, overrides = split_words(args.words)
    if args.environment is not None and args.environment.startswith("{"):  # a whole section
        overrides, args.environment = [f"environment={args.environment}", *overrides], None
    subject = find_model(args.model, print_note)
    environment = args.environment or subject.config.get("environment", {}).get("name", SINGLE_TURN)
    if environment != SINGLE_TURN or overrides:
        return run_episodes(args, subject, prompt, overrides, values)
    unused = [name for name in ("episodes", "data", "row") if getattr(args, name) is not None]
    if unused:
        raise UserError(f"--{unused[0]} is for episodes with an environment: give --environment NAME")
    if prompt is None:
        raise UserError("burnish sample needs a prompt, or --environment NAME to play episodes")
    text = read_prompt(prompt)
    policy = loaded_policy(args, subject)
    asked = requests(args, policy, sampling, text)
    check_policy(policy, asked[0].tokens if not asked[0].pictures else ())
    stream(policy, asked)
    return 0


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The prompt, if there is one, and the settings of the environment."""
    overrides = [word for word in words if word.startswith(("environment.", "environment="))]
    prompts = [word for word in words if word not in overrides]
    if len(prompts) > 1:
        raise UserError(f"got two prompts, {prompts[0]!r} and {prompts[1]!r}; put a prompt with spaces in quotes")
    return (prompts[0] if prompts else None), overrides


def loaded_policy(args: argparse.Namespace, subject: ModelSource) -> PolicyModel:
    """The model of the command."""
    from burnish.evaluation.model_source import sampling_model
    from burnish.models.policy import load_policy

    if subject.note is not None:
        print_note(subject.note)
    return load_policy(sampling_model(subject, args.dtype, args.device), subject.path, None, args.seed)


def check_policy(policy: PolicyModel, tokens: Sequence[int]) -> None:
    """Refuse a model without probabilities."""
    from burnish.models.policy import check_finite

    check_finite(policy, tokens)


def run_episodes(
    args: argparse.Namespace, subject: ModelSource, prompt: str | None, overrides: list[str], sampling: dict[str, Any]
) -> int:
    """Play episodes and print them to stdout, everything else to stderr."""
    from burnish.cli.sample_episodes import episode_prompts, episode_settings, play
    from burnish.config.data import Reward, Template

    if args.image and prompt is None:
        raise UserError("--image belongs to a prompt: give one")
    if args.prerendered:
        raise UserError("--prerendered: the messages of an environment are rendered with the template; leave it out")
    if prompt is not None and (args.data is not None or args.row is not None or args.episodes is not None):
        raise UserError("a prompt is one row: give either a prompt, or --data, --row and --episodes")
    num, first = args.episodes or 1, args.row or 0
    if num < 1 or first < 0:
        raise UserError(f"--episodes {num} --row {first}: expected at least one episode, and rows counted from 0")
    is_given = args.template is not None or args.system is not None
    template = Template(kind=args.template or "auto", system=args.system) if is_given else None
    settings = episode_settings(args.environment, overrides, subject.config, template, sampling)
    policy = loaded_policy(args, subject)
    text = None if prompt is None else with_images(read_prompt(prompt), args.image)
    prompts = episode_prompts(settings, policy.tokenizer, subject.config, text, args.data, first, num, args.seed)
    check_policy(policy, prompts[0].tokens if not prompts[0].pictures else ())
    of_run = subject.config.get("reward")
    reward = Reward.model_validate(of_run) if of_run and prompt is None else None  # a typed prompt has no answer
    play(policy, settings, prompts, args.n, args.seed, Path.cwd(), reward)
    return 0


def read_prompt(argument: str) -> str:
    """The prompt, from stdin for `-`, without the line break that `echo` adds."""
    text = sys.stdin.read().removesuffix("\n") if argument == "-" else argument
    if not text.strip():
        raise UserError("the prompt is empty" + (" (read from stdin)" if argument == "-" else ""))
    return text


def with_images(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """The prompt with the images of `--image`, at the marks `<image>` of the text, or before it if it has none."""
    if not images:
        return text
    from burnish.data.media_columns import inline_media

    found: list[dict[str, Any]] = inline_media({"prompt": text, "images": list(images)}, ("prompt",), "--image", None)[
        "prompt"
    ]
    return found


def requests(args: argparse.Namespace, policy: PolicyModel, sampling: Sampling, text: str) -> list[Request]:
    """One request per sample, each with its own random key."""
    from burnish.config.data import Template
    from burnish.core.engine import Request
    from burnish.core.random_keys import sample_key
    from burnish.data.row import Row
    from burnish.data.template import render
    from burnish.evaluation.model_source import fit_max_tokens
    from burnish.rollout.validation import sampling_options

    row = Row("prompt", with_images(text, args.image), "sample", None)
    if args.prerendered and (args.template == "chat" or args.system is not None):
        raise UserError(
            "--prerendered: the prompt is not rendered again, so --template chat and --system have no effect"
        )
    template = Template(kind="prerendered" if args.prerendered else args.template or "auto", system=args.system)
    _, rendered, pictures = render(row, policy.tokenizer, template)
    tokens = tuple(rendered)
    max_tokens, note = fit_max_tokens(sampling.max_tokens, len(tokens), policy.max_positions)
    if note is not None:
        print_note(note)
    options = sampling_options(sampling.model_copy(update={"max_tokens": max_tokens}), policy.tokenizer.eos_ids)
    keys = (sample_key(args.seed, "eval", row.id, 0, sample) for sample in range(args.n))
    return [Request(str(sample), tokens, options, key, pictures=pictures) for sample, key in enumerate(keys)]


def stream(policy: PolicyModel, requests: list[Request]) -> None:
    """Sample all completions at once and print them in order, the first unfinished one token by token."""
    from burnish.config.rollout import Rollout
    from burnish.distributed.engine_builder import build_engine
    from burnish.models.decoder import Decoder

    printer = CompletionPrinter(policy.tokenizer, len(requests))
    is_native = isinstance(policy.module, Decoder)
    if not is_native:
        print_note(f"each completion is printed when it is complete: {policy.note}")
    engine = build_engine(policy, Rollout(max_rows=min(len(requests), 256)), printer.hear if is_native else None)
    engine.submit(requests)
    for completion in engine.stream():
        if not is_native:
            for token in completion.tokens.tolist():
                printer.hear(completion.id, token)
        printer.end(completion.id)


class CompletionPrinter:
    """Prints several completions one after the other, although their tokens arrive interleaved."""

    def __init__(self, tokenizer: Tokenizer, num_samples: int) -> None:
        from burnish.gateway.completion_text import TextStream

        self.streams = [TextStream(tokenizer) for _ in range(num_samples)]
        self.waiting = [""] * num_samples  # text of samples that cannot be printed yet
        self.has_ended = [False] * num_samples
        self.turn = 0
        self._write(self._header())

    def hear(self, name: str, token: int) -> None:
        """A token was sampled."""
        self._take(int(name), self.streams[int(name)].push(token))

    def end(self, name: str) -> None:
        """A sample has ended. If it was the current one, print what the next ones have so far."""
        self._take(int(name), self.streams[int(name)].finish())
        self.has_ended[int(name)] = True
        while self.turn < len(self.streams) and self.has_ended[self.turn]:
            self.turn += 1
            self._write("\n")
            if self.turn < len(self.streams):
                self._write(self._header() + self.waiting[self.turn])

    def _take(self, index: int, text: str) -> None:
        if index == self.turn:
            self._write(text)
        else:
            self.waiting[index] += text

    def _header(self) -> str:
        total = len(self.streams)
        return f"--- sample {self.turn + 1} of {total} ---\n" if total > 1 else ""

    def _write(self, text: str) -> None:
        if text:
            if sys.stdout.isatty():  # a model's text must not control a terminal; a file or pipe gets it unchanged
                text = printable(text)
            encoding = sys.stdout.encoding or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)
