"""`burnish <command>`: dispatch to the functions of a command, and turn user errors into one line and an exit status.

A command has two functions: one adds its arguments to a parser, the other runs it and returns the exit status. Its module is imported
when the command runs, so that `burnish --help` loads neither torch nor pydantic. A module with a table `COMMANDS` holds subcommands
(`burnish data`).
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from burnish import __version__
from burnish.config.errors import UserError, unknown_name_error

Commands = dict[str, tuple[str, str]]
"""The functions of each command (see `load_command`) and its summary."""
COMMANDS: Commands = {
    "train": ("burnish.cli.train", "train a policy with reinforcement learning"),
    "sft": ("burnish.cli.offline_training:sft", "train on demonstrations"),
    "prefer": ("burnish.cli.offline_training:prefer", "train on preferences: DPO, IPO, KTO, SimPO, ORPO"),
    "reward-model": (
        "burnish.cli.offline_training:reward_model",
        "train a reward model on pairs of answers, or on values of their steps",
    ),
    "stages": ("burnish.cli.stages", "run several of these commands in a row, each on the outputs of earlier ones"),
    "sample": ("burnish.cli.sample", "stream text from a model"),
    "solve": ("burnish.cli.solve", "search for the answer to one question: votes, verifiers, trees"),
    "export": ("burnish.cli.export:export", "write the model of a run as a plain Hugging Face directory"),
    "merge": ("burnish.cli.export:merge", "average the weights of several models"),
    "view": ("burnish.cli.view", "show runs in a browser while they train, or write the report of one"),
    "data": ("burnish.cli.data_commands", "make, clean and select files to train on"),
    "import": ("burnish.cli.import_recipe", "make a recipe from a verl or TRL script or config"),
    "eval": ("burnish.cli.eval", "measure accuracy, pass@k and length on a data set"),
    "serve": ("burnish.cli.serve", "serve a model with an OpenAI-compatible API"),
    "tinker": ("burnish.cli.tinker", "serve a model to the stock tinker client, for training and sampling"),
    "launch": ("burnish.cli.launch", "train on a Ray cluster, once its machines have joined"),
    "recipes": ("burnish.cli.recipes", "list the recipes that come with burnish, or print one of them"),
    "algorithms": ("burnish.cli.algorithms", "print the table of algorithms, or one of them"),
    "environments": ("burnish.cli.environments", "list environments and tools, or print one of them"),
    "doctor": ("burnish.cli.doctor", "report what this machine can run and what is missing"),
}
EXAMPLES = {
    "train": ("a recipe", "sort_digits rollout.n=8"),
    "sft": ("a recipe", "sft --shrink"),
    "prefer": ("a recipe", "dpo --shrink"),
    "reward-model": ("a recipe", "reward_model --shrink"),
    "stages": ("a recipe with stages", "r1_toy"),
    "sample": ("a model or a run and a prompt", "runs/sort_digits-0 '31524>'"),
    "solve": ("a model or a run and a question", "runs/sort_digits-0 '31524>' --strategy majority"),
    "export": ("a run and a folder to write", "runs/sort_digits-0 sorted"),
    "merge": ("a folder to write and the models", "merged runs/first runs/second"),
    "view": ("a run or a folder of runs", "runs"),
    "serve": ("a model or a run", "runs/sort_digits-0"),
    "tinker": ("a model", "path/to/model --name Qwen/Qwen3-8B"),
    "launch": ("a recipe", "sort_digits --address HEAD:6379 --nodes 2"),
}
"""What a command without arguments needs, and an example. `eval` reports it itself, because some of its options need no model."""

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
UNWRITABLE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that the program cannot fix: a full disk, a quota, a limit on file sizes, a read-only disk."""
BROKEN_PIPE = 141  # 128 + SIGPIPE


class Command(NamedTuple):
    """The two functions of a command."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status of the process.

    Without `argv`, this process is the `burnish` command and may fork. A program that passes `argv` stays one process.
    """
    try:
        status = dispatch(list(sys.argv[1:] if argv is None else argv), is_command=argv is None)
        sys.stdout.flush()  # a closed pipe must raise here, not while the interpreter shuts down
        return status
    except UserError as error:
        from burnish.config.yaml_text import printable

        print(f"burnish: error: {printable(str(error))}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Discard the buffered output, or the interpreter prints an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in UNWRITABLE_ERRNOS:
            raise
        print(f"burnish: error: {_write_error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second interrupt would print a traceback
        print("burnish: interrupted", file=sys.stderr)
        signal.signal(signal.SIGINT, before)
        return INTERRUPTED


def _write_error_text(error: OSError) -> str:
    """The message for a file that cannot be written."""
    action = "mount it for writing" if error.errno == errno.EROFS else "free disk space (or raise the quota)"
    path = error.filename if error.filename is not None else "a file"
    return f"cannot write {path}: {error.strerror}; {action} and run the same command again: finished work is kept"


def dispatch(argv: list[str], is_command: bool = False, table: Commands | None = None, program: str = "burnish") -> int:
    """Run the command that the arguments name, with the arguments after it. Subcommands are dispatched by their own table."""
    table = COMMANDS if table is None else table
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    top = top_parser(table, program)
    top.parse_args(argv[:at])  # --help and --version exit here
    if at == len(argv):
        top.print_help(sys.stderr)
        return USAGE_ERROR
    name, rest = argv[at], argv[at + 1 :]
    if name not in table:
        raise unknown_name_error("command" if table is COMMANDS else f"command of {program}", name, table)
    target, summary = table[name]
    subcommands = None if ":" in target else getattr(importlib.import_module(target), "COMMANDS", None)
    if subcommands is not None:
        return dispatch(rest, is_command, subcommands, f"{program} {name}")
    is_bare = all(word.startswith("-") and word not in ("-h", "--help") for word in rest)
    if is_bare and table is COMMANDS and name in EXAMPLES:
        wanted, example = EXAMPLES[name]
        raise UserError(
            f"burnish {name} needs {wanted}, such as: burnish {name} {example}   (see burnish {name} --help)"
        )
    parser = argparse.ArgumentParser(
        prog=f"{program} {name}",
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command = load_command(target)
    command.add_arguments(parser)
    # Intermixed, so that overrides may be on either side of an option: `train a.yaml --dry-run rollout.n=4`.
    args = parser.parse_intermixed_args(rest, argparse.Namespace(is_command=is_command))
    try:
        return command.run(args)
    except SystemExit as error:
        raise UserError(_exit_error_text(error)) from error


def load_command(target: str) -> Command:
    """The functions of a command. `module` has `add_arguments` and `run`; `module:NAME` has `add_NAME_arguments` and `run_NAME`."""
    module_name, _, name = target.partition(":")
    module = importlib.import_module(module_name)
    if not name:
        return Command(module.add_arguments, module.run)
    return Command(getattr(module, f"add_{name}_arguments"), getattr(module, f"run_{name}"))


def _exit_error_text(error: SystemExit) -> str:
    """The message for user code that has called `sys.exit()`."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{where.filename}, line {where.lineno} ({where.name}) called sys.exit({error.code!r}) before the command was done; "
        "a plug-in must return or raise an exception: remove that call and run the same command again"
    )


def print_note(text: str) -> None:
    """Print a line to stderr, for commands whose results go to stdout."""
    from burnish.config.yaml_text import printable

    print(printable(text), file=sys.stderr, flush=True)


def top_parser(table: Commands, program: str) -> argparse.ArgumentParser:
    """The parser of the options before the command."""
    width = max(map(len, table))
    listed = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in table.items())
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [-h] [--version] <command> ...",
        description="Reinforcement-learning post-training for language models.",
        epilog=f"commands:\n{listed}\n\n`{program} <command> --help` describes one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"burnish {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
