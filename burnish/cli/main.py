"""`burnish <command>`: finds the command's module, and turns errors meant for people into one line and a status.

Each command is a file in this folder with `add_arguments(parser)` and `run(args) -> int`, imported only when it is asked
for: `burnish --help` loads neither torch nor pydantic.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from burnish import __version__
from burnish.config.errors import UserError, unknown

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("burnish.cli.train", "train a policy with reinforcement learning"),
    "sft": ("burnish.cli.sft", "train on demonstrations"),
    "sample": ("burnish.cli.sample", "stream text from a model"),
    "export": ("burnish.cli.export", "write the model of a run as a plain Hugging Face directory"),
    "view": ("burnish.cli.view", "write the report of a run, finished or not"),
    "data": ("burnish.cli.data", "prepare published data sets as files to train on"),
    "eval": ("burnish.cli.eval", "measure accuracy, pass@k and length on a data set"),
    "serve": ("burnish.cli.serve", "answer OpenAI's API with a model"),
    "launch": ("burnish.cli.launch", "train on a Ray cluster, once its machines are there"),
    "algorithms": ("burnish.cli.algorithms", "print the table of algorithms, or one of them"),
    "doctor": ("burnish.cli.doctor", "tell what this machine can do and what is missing for what"),
}

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the process's exit status.

    Without `argv` this process is the command, and may fork. A program that gives one stays one process.
    """
    try:
        status = dispatch(list(sys.argv[1:] if argv is None else argv), is_command=argv is None)
        sys.stdout.flush()  # a closed pipe must show here, not while the interpreter shuts down
        return status
    except UserError as error:
        print(f"burnish: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("burnish: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) is gone. What is still buffered goes nowhere, or the interpreter complains on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def dispatch(argv: list[str], is_command: bool = False) -> int:
    """Split the arguments at the command, and hand the rest to its module."""
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    top = top_parser()
    top.parse_args(argv[:at])  # --help and --version exit here
    if at == len(argv):
        top.print_help(sys.stderr)
        return USAGE_ERROR
    name, rest = argv[at], argv[at + 1 :]
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    module_name, summary = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(
        prog=f"burnish {name}",
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    # Intermixed, so that overrides may stand on either side of an option: `train a.yaml --dry-run rollout.n=4`.
    args = parser.parse_intermixed_args(rest, argparse.Namespace(is_command=is_command))
    status: int = module.run(args)
    return status


def top_parser() -> argparse.ArgumentParser:
    """The parser of what stands before the command."""
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="burnish",
        usage="burnish [-h] [--version] <command> ...",
        description="Reinforcement-learning post-training for language models.",
        epilog=f"commands:\n{table}\n\n`burnish <command> --help` tells more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"burnish {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
