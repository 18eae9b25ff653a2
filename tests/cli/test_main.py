"""The command dispatcher: lazy imports, error output and exit statuses."""

import errno
import os
import runpy
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

import pytest

from burnish import __version__
from burnish.cli import main as cli
from burnish.config.errors import UserError
from burnish.config.recipe_names import recipe_names
from burnish.run.durable_files import name_file_in_errors


def command(monkeypatch: pytest.MonkeyPatch, run) -> None:
    """Make `burnish probe` run a function of the parsed arguments."""

    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("recipe", nargs="?")
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--dry-run", action="store_true")

    monkeypatch.setitem(cli.COMMANDS, "probe", ("probe", "probe things"))
    module = SimpleNamespace(add_arguments=add_arguments, run=run)
    monkeypatch.setattr(cli.importlib, "import_module", {"probe": module}.__getitem__)


def raising(error: BaseException):
    def run(args: Namespace) -> int:
        raise error

    return run


def test_help_loads_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys\nfrom burnish.cli.main import main\ntry: main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
        "print(sorted({'torch', 'pydantic', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in done.stdout
        assert summary in done.stdout


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"burnish {__version__}\n"
    monkeypatch.setattr(sys, "argv", ["burnish", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("burnish", run_name="__main__")
    assert capsys.readouterr().out == f"burnish {__version__}\n"


def test_no_command_is_an_error_that_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "doctor" in capsys.readouterr().err


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["algoritms"]) == 2
    assert "burnish: error: unknown command 'algoritms'; did you mean 'algorithms'?" in capsys.readouterr().err


def test_arguments_and_options_may_be_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Namespace] = []

    def run(args: Namespace) -> int:
        seen.append(args)
        return 7

    command(monkeypatch, run)
    assert cli.main(["probe", "a.yaml", "--dry-run", "rollout.n=4", "seed=1"]) == 7
    expected = Namespace(recipe="a.yaml", overrides=["rollout.n=4", "seed=1"], dry_run=True, is_command=False)
    assert seen == [expected]


def test_a_user_error_is_one_message_and_status_2(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, raising(UserError("a.yaml: no such file")))
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr() == ("", "burnish: error: a.yaml: no such file\n")


@pytest.mark.parametrize("code", [0, None, 3])
def test_an_exit_that_a_plug_in_asks_for_is_an_error_that_names_it(monkeypatch, capsys, code: int | None) -> None:
    def run(args: Namespace) -> int:
        sys.exit(code)

    command(monkeypatch, run)
    assert cli.main(["probe"]) == 2
    said = capsys.readouterr().err
    assert f"{__file__}, line " in said
    assert f"(run) called sys.exit({code}) before the command was done" in said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_file_that_cannot_be_written_is_one_line_with_its_name(monkeypatch, capsys, tmp_path, number: int) -> None:
    def run(args: Namespace) -> int:
        with name_file_in_errors(tmp_path / "log"):
            raise OSError(number, "no")

    command(monkeypatch, run)
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err.startswith(
        f"burnish: error: cannot write {tmp_path / 'log'}: {os.strerror(number)}; "
    )
    command(monkeypatch, raising(FileNotFoundError(errno.ENOENT, "a bug", "x")))
    with pytest.raises(FileNotFoundError):
        cli.main(["probe"])


@pytest.mark.parametrize("name", [*cli.EXAMPLES, "eval"])
def test_a_command_without_arguments_says_what_it_needs_in_a_line(name: str, capsys) -> None:
    for words in ([], ["--shrink"]) if name == "train" else ([],):
        assert cli.main([name, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"burnish: error: burnish {name} needs a ")
        assert f": burnish {name} " in line
    if name in cli.EXAMPLES and "recipe" in cli.EXAMPLES[name][0]:
        assert cli.EXAMPLES[name][1].split()[0] in recipe_names()


def test_what_would_steer_a_terminal_is_shown_in_an_error(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, raising(UserError("row \x1b]0;owned\x07\x1b[2J: the chat template says \r\u202e")))
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == "burnish: error: row ␛]0;owned␇␛[2J: the chat template says ␍<202E>\n"


def test_values_of_rows_in_the_tables_of_a_run_do_not_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from burnish.cli.data_options import print_result
    from burnish.cli.train import _print_table

    values = {"step": 1, "validation/mode/accuracy/level=\x1b[31m": 0.5}
    _print_table("mode", "accuracy", values, values)
    print_result(["shared: \x1b[31m"])
    *_, row, said = capsys.readouterr().out.splitlines()
    assert row.split() == ["level=␛[31m", "0.500", "->", "0.500"]
    assert said == "shared: ␛[31m"


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_a_closed_pipe_is_quiet() -> None:
    # The reader is gone before anything is written, so the first flush already fails.
    code = "import sys\nsys.stdin.readline()\nfrom burnish.cli.main import main\nsys.exit(main(['algorithms']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_a_command_of_several_has_a_table_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data"]) == 2
    assert "decontaminate" in capsys.readouterr().err
    assert cli.main(["data", "filtre"]) == 2
    assert "unknown command of burnish data 'filtre'; did you mean 'filter'?" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        cli.main(["data", "filter", "--help"])
    assert capsys.readouterr().out.startswith("usage: burnish data filter")
