"""Launch scripts are read as bash would expand them, without running anything."""

from __future__ import annotations

import pytest

from burnish.config.errors import UserError
from burnish.config.importing.shell_script import ShellCommands, read_commands


def read(text: str, **environment: str) -> ShellCommands:
    return read_commands(text, "run.sh", {"HOME": "/home/me", **environment}, "/repo/scripts")


def words(text: str, **environment: str) -> list[str]:
    return read(text, **environment).commands[-1].words[1:]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run a=1 'b=$x' \"c=2 3\" # d=4", ["a=1", "b=$x", "c=2 3"]),
        ("run a=1 \\\n  b=2 \\\n  c='x'\"y\"z", ["a=1", "b=2", "c=xyz"]),
        ("x=5\nrun a=$x b=${x} c=\"${x}m\"", ["a=5", "b=5", "c=5m"]),
        ("run a=${x:-7} b=${HOME:-no} c=${x:-\"$HOME/d e\"}", ["a=7", "b=/home/me", "c=/home/me/d", "e"]),
        (": ${x:=3}\nrun a=$x", ["a=3"]),
        ("n=4\nrun a=$((1024 * n)) b=$(( (n + 1) / 2 ))", ["a=4096", "b=2"]),
        ("A=(x=1 'y=2 3')\nA+=(z=4)\nrun \"${A[@]}\" n=${#A[@]}", ["x=1", "y=2 3", "z=4", "n=3"]),
        ("more='a=1 b=2'\nrun $more \"$more\"", ["a=1", "b=2", "a=1 b=2"]),
        ("m=org/name.tar.gz\nrun ${m##*/} ${m%.*} ${m%%.*} ${m#*/}", ["name.tar.gz", "org/name.tar", "org/name", "name.tar.gz"]),
        ("run a=1 2>&1 > log.txt\n", ["a=1"]),
        ("X=1 Y=2 run a=1 \"$@\"", ["a=1"]),
        ("cat <<EOF\nrun b=1\nEOF\nrun a=1", ["a=1"]),
        ("D=$(cd \"$(dirname \"$0\")\" && pwd)\nrun a=$D b=$(pwd)/x", ["a=/repo/scripts", "b=./x"]),
        ("export A=1 B='2 3'\nrun a=$A \"b=$B\"", ["a=1", "b=2 3"]),
    ],
)  # fmt: skip
def test_words_are_expanded_as_bash_does(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('if [ "$x" = vllm ]; then y=1; else y=2; fi\nrun $y', ["2"]),
        ("x=3\nif [[ $x -gt 5 ]]; then\n  y=1\nelif [[ $x == 3 ]]\nthen\n  y=2\nelse\n  y=3\nfi\nrun $y", ["2"]),
        ('if [ -z "$x" ] && [[ $# -eq 0 && 2 > 1 || a == b ]]; then y=1; fi\nrun n$y', ["n"]),
        ('if [ -z "$x" ] && [[ $# -eq 0 && a != b ]]\nthen\n y=1\nelse y=2\nfi\nrun n$y', ["n1"]),
        ('if [ -f x ] || [ a = a ]; then y=1; fi\nif ! [ a = a ]; then y=2; fi\nrun n$y', ["n1"]),
        ('if [ a = b ]; then if [ c = c ]; then y=1; else y=2; fi; elif [ d = d ]; then y=3; else y=4; fi\nrun n$y', ["n3"]),
        ('[ -z "$x" ] && y=1\n[ -n "$x" ] && y=2\nrun $y', ["1"]),
        ("x=b\ncase \"$x\" in\n a) y=1 ;;\n b|c) y=2 ;;\n *) y=3 ;;\nesac\nrun $y", ["2"]),
        ("x=q\ncase $x in a) y=1 ;; *) y=3 ;; esac\nrun $y", ["3"]),
        ("main() {\n  run a=1\n}\n", ["a=1"]),
        ("for m in one two; do\n  run $m\ndone", ["one"]),
    ],
)  # fmt: skip
def test_branches_are_taken_where_their_tests_are_known(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_what_is_not_evaluated_is_noted() -> None:
    found = read("a=$(date +%s)\nif [ -f x ]; then b=1; fi\nsource env.sh\nrun $a $b $NEVER ${HOST:?say it}", A="1")
    assert found.commands[-1].words == ["run"]
    assert found.notes == [
        "$(date +%s) is not run: it is left empty",
        "line 2: `-f x` is not evaluated, and what depends on it is left out",
        "line 3: source env.sh is not read",
        "b is not set in the script: give it as an environment variable (b=... burnish import ...)",
        "NEVER is not set in the script: give it as an environment variable (NEVER=... burnish import ...)",
        "HOST must be given: say it",
    ]
    assert words("run a=$SIZE", SIZE="8") == ["a=8"]
    assert read("run a=$SIZE", SIZE="8").notes == ["SIZE=8 is taken from the environment"]


@pytest.mark.parametrize("text", ["run 'a", 'run "a', "run $((1", "A=(x"])
def test_what_is_never_closed_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(UserError, match=r"run.sh, line 2: .* (never closed|no closing parenthesis)"):
        read(f"\n{text}")


def test_values_that_would_fill_the_memory_are_refused() -> None:
    with pytest.raises(UserError, match="the variable A grows beyond"):
        read("A=0123456789\n" + "A=$A$A\n" * 40)
    with pytest.raises(UserError, match="nested too deeply"):
        read("run " + "${x:-" * 2000 + "}" * 2000)


def test_arguments_of_the_script_are_noted() -> None:
    script = read("lr=$1\nrun a=$lr b=${2:-3} $@")
    assert script.commands[-1].words == ["run", "a=", "b=3"]
    assert script.notes == [
        "$1 is an argument of the script or of a function in it, which is not known: it is left empty"
    ]
