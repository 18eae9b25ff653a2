"""`burnish eval DIR DATA [key=value ...]`: accuracy with its interval, pass@k and length; the completions as a file."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.evaluation.evaluate import Result
    from burnish.evaluation.settings import EvalConfig
    from burnish.evaluation.statistics import Estimate

LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; every setting also has a dotted key, explained by --help."""
    from burnish.config.explain import help_text
    from burnish.evaluation.settings import EvalConfig

    add = parser.add_argument
    add("model", type=Path, metavar="DIR", help="a Hugging Face model directory, or a run (its best checkpoint)")
    add("data", metavar="DATA", help="a jsonl, parquet or csv file, a glob, or task:NAME")
    add("overrides", nargs="*", metavar="key=value", help="further settings, such as reward.timeout_s=30")
    add("--n", type=int, help="samples of each prompt (default 1)")
    add("--temperature", type=float, help="0 is greedy, the default; above 0 for several samples")
    add("--top-p", type=float, help="keep the smallest set of tokens with this probability")
    add("--top-k", type=int, help="keep the k most likely tokens")
    add("--max-tokens", type=int, help="most new tokens of one completion (default 256, of a run its own)")
    add("--limit", type=int, help="most prompts (default: all rows of a file, 1000 problems of a task)")
    add("--reward", action="append", metavar="NAME", help="what counts as right; may be repeated, the first decides")
    add("--template", choices=("auto", "chat", "plain"), help="how a prompt becomes text")
    add("--system", help="a system message (chat templates)")
    add("--prompt-key", metavar="COLUMN", help="column of the prompt in plain rows (default question)")
    add("--answer-key", metavar="COLUMN", help="column of the expected answer (default answer)")
    add("--out", type=Path, metavar="FILE", help="completions, .jsonl or .parquet (default eval-<model>-<data>.jsonl)")
    add("--force", action="store_true", help="replace the file of completions")
    add("--seed", type=int, help="which problems a task generates, and all sampling noise (default 0)")
    add("--device", help="auto, cpu, cuda, cuda:1")
    add("--dtype", choices=("float64", "float32", "bfloat16", "float16"), help="type of the arithmetic")
    add("--max-rows", type=int, help="most sequences decoded at once (default 256)")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(EvalConfig)


def run(args: argparse.Namespace) -> int:
    """Measure and print; status 1 when not one completion could be scored."""
    from burnish.evaluation.completions import check_target, default_target, write_completions
    from burnish.evaluation.settings import settings
    from burnish.evaluation.subject import find_subject

    target = args.out or default_target(args.model, args.data)
    check_target(target, args.force)
    subject = find_subject(args.model)
    config, _, base = settings(args.data, flags(args), args.overrides, subject.config)
    if subject.note is not None:
        say(f"{subject.note}; what it says of template, reward, seed and max_tokens holds unless the command differs")
    result = measure(config, base, subject.path)
    write_completions(target, result.rows)
    print(table(result, config.sampling.n))
    print(f"completions  {target}")
    if result.num_failed:
        say(f"{result.num_failed} of {result.num_samples} samples could not be scored; first: {result.first_error}")
    return int(result.num_failed == result.num_samples)


def flags(args: argparse.Namespace) -> dict[str, Any]:
    """The options by the dotted keys they stand for."""
    return {
        "seed": args.seed,
        "limit": args.limit,
        "max_rows": args.max_rows,
        "model.device": args.device,
        "model.dtype": args.dtype,
        "data.template.kind": args.template,
        "data.template.system": args.system,
        "data.source.prompt_key": args.prompt_key,
        "data.source.answer_key": args.answer_key,
        "sampling.n": args.n,
        "sampling.temperature": args.temperature,
        "sampling.top_p": args.top_p,
        "sampling.top_k": args.top_k,
        "sampling.max_tokens": args.max_tokens,
        "reward.parts": args.reward,
    }


def measure(config: EvalConfig, base: Path, model: Path) -> Result:
    """Load everything, sample and score; what is wrong with the data is found before the first token."""
    from burnish.data.prompts import validation_prompts
    from burnish.evaluation.evaluate import evaluate
    from burnish.evaluation.subject import fit_max_tokens
    from burnish.models.policy import load_policy
    from burnish.rewards.rewards import Rewards
    from burnish.rollout.measure import sampling_options

    with Rewards(config.reward, base) as rewards:
        policy = load_policy(config.model, model, None, config.seed)
        positions = policy.max_positions
        data = config.prompts(positions)
        prompts = validation_prompts(data.validation, policy.tokenizer, data, config.seed, config.limit, base)
        longest = max(len(p.tokens) for p in prompts)
        max_tokens, note = fit_max_tokens(config.sampling.max_tokens, longest, positions)
        n, plural = config.sampling.n, "s" if config.sampling.n > 1 else ""
        say(f"{model}: {policy.note}; {len(prompts):,} prompts, {n} sample{plural} of each")
        if note is not None:
            say(note)
        sampling = config.sampling.model_copy(update={"max_tokens": max_tokens})
        options = sampling_options(sampling, policy.tokenizer.eos_ids)
        with Progress() as progress:
            return evaluate(policy, rewards, prompts, n, options, progress, config.seed, config.max_rows)


def table(result: Result, n: int) -> str:
    """The numbers a person wants, a line each."""
    label = f"mean@{n}" if n > 1 else "accuracy"
    rows = [("prompts", f"{result.num_prompts:,}" + (f" x {n} samples" if n > 1 else ""))]
    rows.append(
        (label, interval(result.accuracy) if result.accuracy else "- (nothing that was scored says right or wrong)")
    )
    rows += [(f"  {name}", interval(estimate)) for name, estimate in result.by_source.items()]
    rows += [(f"pass@{k}", f"{value:.3f}") for k, value in result.pass_at.items() if n > 1]
    if result.reward_mean is not None and (result.accuracy is None or result.reward_mean != result.accuracy.mean):
        rows.append(("mean reward", f"{result.reward_mean:.3f}"))
    rows.append(("mean length", f"{result.length_mean:.1f} tokens"))
    rows.append(("truncated", f"{result.truncated:.1%}"))
    rows += [("timed out", f"{result.num_timed_out} answers, counted as wrong")] if result.num_timed_out else []
    rows += [("failed", f"{result.num_failed} samples, not counted")] if result.num_failed else []
    width = max(11, *(len(name) for name, _ in rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def interval(estimate: Estimate) -> str:
    """`0.402  (95% interval 0.372 to 0.433)`."""
    return f"{estimate.mean:.3f}  (95% interval {estimate.low:.3f} to {estimate.high:.3f})"


def say(text: str) -> None:
    """A note beside the result, which alone goes to stdout."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """How far it is, on stderr: one line rewritten in a terminal, now and then a line elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (REDRAW_EVERY_S if self._is_terminal else LINE_EVERY_S):
            return
        self._last = now
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            say(text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
