"""Sessions of untrusted Python that keep their variables between cells."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

import pytest

from burnish.sandbox.client import RunLost
from burnish.sandbox.limits import MIB, Limits
from burnish.sandbox.sessions import CellResult, Session, SessionSandbox, TooManySessions

LIMITS = Limits(memory_bytes=256 * MIB, scratch_bytes=MIB, max_sessions=20)


def in_sandbox(play: Callable[[SessionSandbox], Awaitable[None]], is_isolated: bool = True) -> None:
    async def run() -> None:
        sandbox = SessionSandbox(LIMITS, is_isolated, max_running=2)
        try:
            await play(sandbox)
        finally:
            sandbox.close()

    asyncio.run(run())


async def output(session: Session, code: str, wall_s: float = 10.0) -> str:
    cell = await session.run(code, wall_s)
    assert cell.ended == "done", cell
    return cell.output


@pytest.mark.parametrize("is_isolated", [True, False])
def test_variables_stay_in_a_session_and_do_not_reach_another(is_isolated: bool) -> None:
    async def play(sandbox: SessionSandbox) -> None:
        first, second = sandbox.new_session(), sandbox.new_session()
        assert await output(first, "x = 2\nopen('note', 'w').write('hi')\nx + 1") == "3\n"
        assert await output(first, "x *= 5; print('said')\nx") == "said\n10\n"
        assert await output(first, "open('note').read()") == "'hi'\n"
        cell = await second.run("x", 10.0)
        assert (cell.ended, cell.raised) == ("done", "NameError")
        assert await output(second, "import os\nos.path.exists('note')") == "False\n"
        assert sandbox.num_open == 2
        first.close()
        second.close()
        assert sandbox.num_open == 0

    in_sandbox(play, is_isolated)


def test_errors_show_the_lines_of_the_cell_or_the_last_line_only() -> None:
    async def play(sandbox: SessionSandbox) -> None:
        session = sandbox.new_session()
        cell = await session.run("def f():\n    return 1 / 0\nf()", 10.0)
        assert cell.raised == "ZeroDivisionError"
        assert cell.output == (
            "Traceback (most recent call last):\n"
            '  File "cell1.py", line 3, in <module>\n    f()\n'
            '  File "cell1.py", line 2, in f\n    return 1 / 0\n           ~~^~~\n'
            "ZeroDivisionError: division by zero\n"
        )
        cell = await session.run("f()", 10.0, has_traceback=False)
        assert cell.output == "ZeroDivisionError: division by zero\n"
        cell = await session.run("1 +", 10.0, has_traceback=False)
        assert (cell.raised, cell.output) == ("SyntaxError", "SyntaxError: invalid syntax\n")

    in_sandbox(play)


def test_a_session_sees_neither_files_nor_network_nor_processes_of_the_machine() -> None:
    async def play(sandbox: SessionSandbox) -> None:
        session = sandbox.new_session()
        await output(session, "import os, socket")
        assert await output(session, "os.getuid(), os.getpid(), os.path.exists('/etc'), os.path.exists('/proc')") == (
            "(1000, 1, False, False)\n"
        )
        cell = await session.run("socket.socket()", 10.0)
        assert cell.raised == "PermissionError"
        assert await output(session, "[n for n in os.environ if n not in ('HOME', 'LANG', 'PATH', 'TMPDIR')]") == (
            "['PYTHONHASHSEED']\n"
        )

    in_sandbox(play)


def test_a_cell_that_is_out_of_time_is_interrupted_and_the_variables_stay() -> None:
    async def play(sandbox: SessionSandbox) -> None:
        session = sandbox.new_session()
        await output(session, "x = 7")
        cell = await session.run("while True: pass", 0.2)
        assert (cell.ended, cell.is_session_over) == ("interrupted", False)
        assert await output(session, "x") == "7\n"

    in_sandbox(play)


ENDINGS = {
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(99)": "time",
    "import os; os._exit(0)": "exited",
    "import os; os.close(3)": "exited",
    "import os; os.write(3, b'nonsense' * 100)": "exited",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass": "processes",
    "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = b'x' * (60 << 20); time.sleep(99)\ntime.sleep(99)": "memory",
}


def test_a_cell_that_passes_a_limit_ends_its_session_and_no_other() -> None:
    async def play(sandbox: SessionSandbox) -> None:
        other = sandbox.new_session()
        await output(other, "x = 1")
        for code, ended in ENDINGS.items():
            session = sandbox.new_session()
            cell = await session.run(code, 0.2 if ended == "time" else 10.0)
            assert (cell.ended, cell.is_session_over, session.is_closed) == (ended, True, True), code
            assert await output(other, "x") == "1\n"

    in_sandbox(play)


def test_too_much_output_loses_its_middle() -> None:
    async def play(sandbox: SessionSandbox) -> None:
        cell = await sandbox.new_session().run("print('a' * 50_000 + 'b')", 10.0, max_output_bytes=10)
        assert cell == CellResult("done", None, "aaaaa\n... (49992 bytes left out) ...\naaab\n")

    in_sandbox(play)


def test_whatever_a_cell_leaves_running_is_stopped_between_cells() -> None:
    code = "import os, threading\ndef spin():\n    while True: pass\nif os.fork() == 0: spin()\nthreading.Thread(target=spin, daemon=True).start()"

    async def play(sandbox: SessionSandbox) -> None:
        session = sandbox.new_session()
        await output(session, code)
        assert sandbox._process is not None
        processes = _descendants(sandbox._process.pid)
        assert len(processes) == 4  # the zygote, the supervisor, the program and its child
        end = time.monotonic() + 20
        while [_state(pid) for pid in processes].count("T") < 2 and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert [_state(pid) for pid in processes].count("T") == 2
        assert await output(session, "1 + 1") == "2\n"

    in_sandbox(play)


def test_a_session_that_is_closed_during_a_cell_leaves_no_process() -> None:
    async def play(sandbox: SessionSandbox) -> None:
        session = sandbox.new_session()
        await output(session, "import time")
        assert sandbox._process is not None
        before = _descendants(sandbox._process.pid)
        assert len(before) == 3  # the zygote inside its namespace, the supervisor, the program
        cell = asyncio.create_task(session.run("time.sleep(60)", 99.0))
        await asyncio.sleep(0.05)
        cell.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cell
        end = time.monotonic() + 20
        while len(_descendants(sandbox._process.pid)) > 1 and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert len(_descendants(sandbox._process.pid)) == 1

    in_sandbox(play)


def test_a_zygote_that_dies_loses_its_sessions_and_is_started_again() -> None:
    async def play(sandbox: SessionSandbox) -> None:
        session = sandbox.new_session()
        await output(session, "x = 1")
        assert sandbox._process is not None
        os.kill(sandbox._process.pid, signal.SIGKILL)

        async def run_until_lost() -> None:
            while True:  # the kernel takes a moment to end the processes of the zygote's namespace
                await session.run("x", 5.0)

        with pytest.raises(RunLost):
            await run_until_lost()
        assert await output(sandbox.new_session(), "1 + 1") == "2\n"

    in_sandbox(play)


def test_more_sessions_than_the_limit_are_refused() -> None:
    async def play(sandbox: SessionSandbox) -> None:
        sandbox.num_open = LIMITS.max_sessions
        with pytest.raises(TooManySessions, match="20 sessions of Python are open"):
            await sandbox.new_session().run("1", 1.0)

    in_sandbox(play)


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _descendants(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    return children + [below for child in children for below in _descendants(child)]
