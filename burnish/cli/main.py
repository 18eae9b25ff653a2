"""`burnish <command>`: finds the command's module, and turns errors meant for people into one line and a status.

Each command is a file in this folder with `add_arguments(parser)` and `run(args) -> int`, imported only when it is asked
for: `burnish --help` loads neither torch nor pydantic. A command that is several has a `COMMANDS` of its own (`burnish data`).
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from burnish import __version__
from burnish.config.errors import UserError, unknown_name_error

Commands = dict[str, tuple[str, str]]
"""The module of each command, and what it is for."""
COMMANDS: Commands = {
    "train": ("burnish.cli.train", "train a policy with reinforcement learning"),
    "sft": ("burnish.cli.sft", "train on demonstrations"),
    "prefer": ("burnish.cli.prefer", "train on preferences: DPO, IPO, KTO, SimPO, ORPO"),
    "reward-model": ("burnish.cli.reward_model", "train a scorer on pairs of answers"),
    "stages": ("burnish.cli.stages", "run several of these commands in a row, each from what the last one made"),
    "sample": ("burnish.cli.sample", "stream text from a model"),
    "export": ("burnish.cli.export", "write the model of a run as a plain Hugging Face directory"),
    "merge": ("burnish.cli.merge", "average the weights of several models"),
    "view": ("burnish.cli.view", "write the report of a run, finished or not"),
    "data": ("burnish.cli.data", "make, clean and select files to train on"),
    "eval": ("burnish.cli.eval", "measure accuracy, pass@k and length on a data set"),
    "serve": ("burnish.cli.serve", "answer OpenAI's API with a model"),
    "launch": ("burnish.cli.launch", "train on a Ray cluster, once its machines are there"),
    "algorithms": ("burnish.cli.algorithms", "print the table of algorithms, or one of them"),
    "doctor": ("burnish.cli.doctor", "tell what this machine can do and what is missing for what"),
}
EXAMPLES = {
    "train": ("a recipe", "recipes/sort_digits.yaml rollout.n=8"),
    "sft": ("a recipe", "recipes/sft.yaml --shrink"),
    "prefer": ("a recipe", "recipes/dpo.yaml --shrink"),
    "reward-model": ("a recipe", "recipes/reward_model.yaml --shrink"),
    "stages": ("a recipe with stages", "recipes/r1_toy.yaml"),
    "sample": ("a model or a run and a prompt", "runs/sort_digits-0 '31524>'"),
    "export": ("a run and a folder to write", "runs/sort_digits-0 sorted"),
    "merge": ("a folder to write and the models", "merged runs/first runs/second"),
    "view": ("a run", "runs/sort_digits-0"),
    "serve": ("a model or a run", "runs/sort_digits-0"),
    "launch": ("a recipe", "recipes/sort_digits.yaml --address HEAD:6379 --nodes 2"),
}
"""What a command that is given nothing asks for, and an example of it. (`eval` says it itself: some of its options need no model.)"""

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
UNWRITABLE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""A full disk, a quota, a limit on the size of files, a disk that cannot be written: nothing that the program could mend."""
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
        from burnish.config.yaml_text import printable

        print(f"burnish: error: {printable(str(error))}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # The reader (`| head`) is gone. What is still buffered goes nowhere, or the interpreter complains on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in UNWRITABLE_ERRNOS:
            raise
        print(f"burnish: error: {_write_error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would end this line with a traceback
        print("burnish: interrupted", file=sys.stderr)
        signal.signal(signal.SIGINT, before)
        return INTERRUPTED


def _write_error_text(error: OSError) -> str:
    """What is said of a file that the system refuses to write."""
    do = "mount it for writing" if error.errno == errno.EROFS else "make room (or raise the quota)"
    path = error.filename if error.filename is not None else "a file"
    return f"cannot write {path}: {error.strerror}; {do} and run the same command again: what was done is kept"


def dispatch(argv: list[str], is_command: bool = False, table: Commands | None = None, program: str = "burnish") -> int:
    """Split the arguments at the command, and hand the rest to its module; one that has a table itself is split again."""
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
    module_name, summary = table[name]
    module = importlib.import_module(module_name)
    if (inner := getattr(module, "COMMANDS", None)) is not None:
        return dispatch(rest, is_command, inner, f"{program} {name}")
    is_bare = all(word.startswith("-") and word not in ("-h", "--help") for word in rest)
    if is_bare and table is COMMANDS and name in EXAMPLES:
        wanted, example = EXAMPLES[name]
        raise UserError(
            f"burnish {name} needs {wanted}, such as: burnish {name} {example}   (burnish {name} --help tells all)"
        )
    parser = argparse.ArgumentParser(
        prog=f"{program} {name}",
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    # Intermixed, so that overrides may stand on either side of an option: `train a.yaml --dry-run rollout.n=4`.
    args = parser.parse_intermixed_args(rest, argparse.Namespace(is_command=is_command))
    try:
        status: int = module.run(args)
    except SystemExit as error:
        raise UserError(_exit_error_text(error)) from error
    return status


def _exit_error_text(error: SystemExit) -> str:
    """What is said of an exit that no command asks for: code that a config names has called `sys.exit()`."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{where.filename}, line {where.lineno} ({where.name}) called sys.exit({error.code!r}) before the command was done; "
        "code that a config names must return or raise an exception: remove that call and run the same command again"
    )


def top_parser(table: Commands, program: str) -> argparse.ArgumentParser:
    """The parser of what stands before the command."""
    width = max(map(len, table))
    listed = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in table.items())
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [-h] [--version] <command> ...",
        description="Reinforcement-learning post-training for language models.",
        epilog=f"commands:\n{listed}\n\n`{program} <command> --help` tells more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"burnish {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
