"""The worker pool with answers and scorers that hang, crash, raise or use up memory: what is counted, and that no process survives."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.rewards import worker_pool
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.run.supervisor.processes import descendants

PLUGIN = """
import ctypes, os, subprocess, sys, time
from pathlib import Path

def evaluates(data_source, solution_str, ground_truth, extra_info):
    return float(eval(solution_str) == ground_truth)

def executes(data_source, solution_str, ground_truth, extra_info):
    scope = {"os": os, "sys": sys, "time": time, "ctypes": ctypes, "subprocess": subprocess, "extra": extra_info}
    exec(solution_str, scope)
    return scope.get("score", 1.0)

def together(prompts, completions, **columns):
    for completion in completions:
        exec(completion)
    return [1.0] * len(completions)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(PLUGIN)
    return tmp_path


def request(completion: str, answer: object = 4, **extra: object) -> ScoreRequest:
    return ScoreRequest(completion[:20], "p", completion, "s", answer, extra)


def reward(*parts: str, **fields: object) -> Reward:
    return Reward.model_validate({"parts": list(parts), "workers": 2} | fields)


def processes_with(mark: str) -> list[int]:
    """The processes that have this text in their command line or environment, zombies aside."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and mark.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or is another user's
    return [pid for pid in found if pid != os.getpid()]


def gone(mark: str, within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while processes_with(mark) and time.monotonic() < end:
        time.sleep(0.02)
    return not processes_with(mark)


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_a_tower_of_powers_is_incorrect_and_counted():
    with Rewards(reward("math", timeout_s=2.0)) as rewards:
        tower, right = rewards.score([request(r"\boxed{9^{9^{9^{9}}}}"), request(r"\boxed{4}")])
        assert (tower.reward, tower.accuracy, tower.timed_out, tower.error) == (0.0, 0.0, True, None)
        assert (right.reward, right.timed_out) == (1.0, False)
        assert rewards.counters["answer_timeout"] == 1


def test_a_hanging_call_is_killed_and_its_batch_goes_on(folder):
    asked = [request("2+2") for _ in range(40)]
    asked[7] = request("9**9**9")
    asked[20] = request("__import__('time').sleep(60)")
    with Rewards(reward("mine.py:evaluates", timeout_s=2.0), base=folder) as rewards:
        scores = rewards.score(asked)
        assert [i for i, s in enumerate(scores) if s.timed_out] == [7, 20]
        assert [s.reward for s in scores] == [0.0 if i in (7, 20) else 1.0 for i in range(40)]
        assert rewards.counters == {"answer_timeout": 2, "scorer_failed": 0, "scorer_retried": 0, "worker_restarts": 2}


def test_a_regular_expression_that_backtracks_for_ever_is_killed():
    parts = [{"name": "format", "options": {"pattern": "(a+)+b"}}, {"name": "exact", "weight": 2.0}]
    with Rewards(Reward.model_validate({"parts": parts, "timeout_s": 2.0})) as rewards:
        (score,) = rewards.score([request("a" * 40, answer="a" * 40)])
    assert (score.reward, score.accuracy, score.timed_out) == (2.0, 1.0, True)
    assert score.parts == {"format": 0.0, "exact": 1.0}


@pytest.mark.parametrize(
    ("code", "said", "workers"),
    [
        ("os._exit(3)", "exited with status 3", 1),
        ("ctypes.string_at(0)", "killed by SIGSEGV", 2),
        ("sys.exit('bye')", "SystemExit: bye", 2),
        ("1 / 0", "ZeroDivisionError", 1),
        ("bytearray(100 * 2**30)", "MemoryError", 2),
        ("score = float('nan')", "must be finite, got nan", 1),
    ],
)
def test_a_scorer_that_fails_twice_reports_itself_and_is_never_a_zero(folder, code, said, workers):
    with Rewards(reward("mine.py:executes", workers=workers), base=folder) as rewards:
        failed, fine = rewards.score([request(code), request("score = 0.5")])
        assert (failed.reward, failed.accuracy, failed.timed_out) == (None, None, False)
        assert said in (failed.error or "")
        assert "'executes'" in (failed.error or "")
        assert repr(code) in (failed.error or "")
        assert (fine.reward, fine.error) == (0.5, None)
        counters = rewards.counters
        assert (counters["scorer_failed"], counters["scorer_retried"], counters["answer_timeout"]) == (1, 1, 0)


@pytest.mark.parametrize("how", ["raise RuntimeError", "os._exit(1)"])
def test_a_scorer_that_fails_once_is_forgiven(folder, how):
    code = f"mark = extra['folder'] + '/tried'\nif not os.path.exists(mark):\n    open(mark, 'w').close()\n    {how}"
    with Rewards(reward("mine.py:executes"), base=folder) as rewards:
        (score,) = rewards.score([request(code, folder=str(folder))])
        assert (score.reward, score.error) == (1.0, None)
        assert (rewards.counters["scorer_failed"], rewards.counters["scorer_retried"]) == (0, 1)


def test_the_retry_runs_in_another_process(folder):
    code = "open(extra['folder'] + '/pids', 'a').write(f'{os.getpid()} ')\nraise RuntimeError"
    with Rewards(reward("mine.py:executes"), base=folder) as rewards:
        rewards.score([request(code, folder=str(folder))])
    first, second = (folder / "pids").read_text().split()
    assert first != second


def test_the_deadline_of_a_batch_function_is_for_its_call(folder):
    with Rewards(reward("mine.py:together", timeout_s=2.0), base=folder) as rewards:
        scores = rewards.score([request("pass"), request("import time; time.sleep(60)")])
        assert [(s.reward, s.timed_out) for s in scores] == [(0.0, True)] * 2
        assert rewards.score([request("pass")])[0].reward == 1.0
        assert rewards.counters["answer_timeout"] == 2


def test_a_forged_reply_is_refused_and_replies_are_not_unpickled(folder):
    forge = "import struct\nbody = {body}\nos.write(int(sys.argv[1]), struct.pack('!I', len(body)) + body)"
    answers = [request(forge.format(body=b)) for b in (b"not json", b'{"serial": 99, "results": [[5, 5, {}]]}', b"[]")]
    with Rewards(reward("mine.py:executes"), base=folder) as rewards:
        for score in rewards.score(answers):
            assert score.reward is None
            assert "unreadable reply" in (score.error or "")
        assert rewards.score([request("score = 0.5")])[0].reward == 0.5


def test_deadlines_hold_while_nobody_polls(folder):
    with Rewards(reward("mine.py:executes", timeout_s=2.0, workers=1), base=folder) as rewards:
        rewards.score([request("pass")])
        rewards.submit([request("time.sleep(60)"), request("pass")])
        give_up = time.monotonic() + 120
        while rewards._outcomes.qsize() < 2 and time.monotonic() < give_up:
            time.sleep(0.02)
        assert sorted((s.reward, s.timed_out) for s in rewards.poll(0.0)) == [(0.0, True), (1.0, False)]


@pytest.fixture(scope="module")
def can_leave_network() -> bool:
    """Whether this kernel lets a process drop the network; if so, connecting must fail."""
    probe = (
        "import socket, sys\n"
        "from burnish.rewards.worker_limits import leave_network\n"
        "listening = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(listening.getsockname(), 1).close()\n"
        "if not leave_network(): sys.exit(77)\n"
        "try: socket.create_connection(listening.getsockname(), 1)\n"
        "except OSError: sys.exit(0)\n"
        "sys.exit(1)\n"
    )
    status = subprocess.run([sys.executable, "-c", probe], check=False).returncode
    assert status in (0, 77)
    return status == 0


def test_isolated_workers_are_in_another_network_and_the_users_are_not(folder, can_leave_network):
    if not can_leave_network:
        pytest.skip("this kernel lets nobody leave the network")
    here = os.readlink("/proc/self/ns/net")
    for part, isolated in (("exact", True), ("mine.py:executes", False)):
        with Rewards(reward(part, workers=1), base=folder) as rewards:
            rewards.score([request("pass")])
            (pid,) = worker_pids()
            assert (os.readlink(f"/proc/{pid}/ns/net") != here) is isolated


def worker_pids() -> list[int]:
    """The scoring processes started by this one."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if b"burnish.rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_verifier_process_limits_itself(folder):
    with Rewards(reward("exact", workers=1, memory_gib=1.5), base=folder) as rewards:
        rewards.score([request("pass")])
        (pid,) = worker_pids()
        limits = {
            line[:26].strip(): line[26:].split()[:2] for line in Path(f"/proc/{pid}/limits").read_text().splitlines()
        }
        assert limits["Max address space"] == [str(int(1.5 * 2**30))] * 2
        assert limits["Max core file size"] == ["0", "0"]
        assert int(limits["Max cpu time"][0]) < 60
        assert os.getsid(pid) == pid
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"


def test_a_worker_killed_from_outside_is_replaced(folder):
    with Rewards(reward("exact", workers=1)) as rewards:
        rewards.score([request("4")])
        os.kill(worker_pids()[0], signal.SIGKILL)
        assert rewards.score([request("4")])[0].reward == 1.0
        assert rewards.counters["worker_restarts"] == 1
        assert rewards.counters["scorer_failed"] == 0


def test_close_leaves_no_process_not_even_a_scorers_child(folder, monkeypatch):
    mark = f"BURNISH_TEST_MARK={folder}"
    monkeypatch.setenv("BURNISH_TEST_MARK", str(folder))
    with Rewards(reward("mine.py:executes", "exact", timeout_s=30), base=folder) as rewards:
        rewards.score([request("subprocess.Popen(['sleep', '100'])")])
        rewards.submit([request("while True: pass")])
        time.sleep(0.1)
        assert len(processes_with(mark)) >= 5
        workers = worker_pids()
        assert len(workers) == 4
    assert gone(mark)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]  # a zombie would still be there
    rewards.close()


def test_nothing_survives_a_parent_that_is_killed(folder, monkeypatch):
    monkeypatch.setenv("BURNISH_TEST_MARK", str(folder))
    program = (
        "import sys, time; from pathlib import Path\n"
        "from burnish.config.data import Reward; from burnish.rewards.scoring import Rewards\n"
        "from burnish.rewards.score_types import ScoreRequest\n"
        "rewards = Rewards(Reward(parts=['mine.py:executes', 'exact'], timeout_s=60), Path(sys.argv[1]))\n"
        "ask = lambda code: ScoreRequest('1', 'p', code, 's', 4, {})\n"
        "rewards.score([ask(\"subprocess.Popen(['sleep', '100'])\")])\n"
        "rewards.submit([ask('9**9**9')]); time.sleep(0.1); print('busy', flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"busy\n"
    mark = f"BURNISH_TEST_MARK={folder}"
    assert len(processes_with(mark)) >= 6
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(mark)


def test_scoring_never_loads_torch():
    code = "import sys, burnish.rewards.scoring, burnish.rewards.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_workers_that_cannot_start_end_the_run_with_the_reason(folder):
    (folder / "picky.py").write_text(
        "import sys\nif 'burnish.rewards.worker_pool' not in sys.modules:\n    raise OSError('no licence here')\n"
        "def f(completions):\n    return [1.0]\n"
    )
    with Rewards(reward("picky.py:f"), base=folder) as rewards:
        for _ in range(2):
            with pytest.raises(UserError, match="no licence here"):
                rewards.score([request("1")])


# --- workers that are killed or stopped during a call ----------------------------------------------------------------

SLOW_PLUGIN = """
import os, time
from pathlib import Path
from typing import Any

def slowly(data_source, solution_str, ground_truth, extra_info):
    Path(__file__).with_name(f"at-{os.getpid()}").write_text(solution_str)
    time.sleep(0.2)
    return float(len(solution_str))
"""


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 2)])
def test_a_call_whose_process_is_lost_is_made_again(tmp_path: Path, number: int, workers: int) -> None:
    (tmp_path / "mine.py").write_text(SLOW_PLUGIN)
    config = Reward(parts=["mine.py:slowly"], workers=workers, timeout_s=4.0)
    with Rewards(config, base=tmp_path) as rewards:
        rewards.submit([ScoreRequest(str(k), "p", "x" * k, "s", "1", {}) for k in range(6)])
        until = time.monotonic() + 120
        while not (begun := list(tmp_path.glob("at-*"))) and time.monotonic() < until:
            time.sleep(0.01)
        victim = int(begun[0].name.removeprefix("at-"))
        os.kill(victim, number)
        scores = {}
        while rewards.pending:
            scores |= {score.id: score for score in rewards.poll(30)}
        assert {id: score.reward for id, score in scores.items()} == {str(k): float(k) for k in range(6)}
        counters = rewards.counters
        assert counters["answer_timeout"] == counters["scorer_failed"] == 0
        assert counters["worker_restarts"] == counters["scorer_retried"] == 1
        assert victim not in descendants(os.getpid())


def test_a_process_that_ends_before_it_hears_its_task_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(SLOW_PLUGIN)
    begin, begun = worker_pool.subprocess.Popen, list[int]()

    def begin_dead(*args: Any, **options: Any) -> Any:
        started = begin(*args, **options)
        if not begun:
            started.kill()
            started.wait(10)
        begun.append(started.pid)
        return started

    monkeypatch.setattr(worker_pool.subprocess, "Popen", begin_dead)
    with Rewards(Reward(parts=["mine.py:slowly"], workers=1), base=tmp_path) as rewards:
        assert [score.reward for score in rewards.score([ScoreRequest("0", "p", "xx", "s", "1", {})])] == [2.0]
    assert len(begun) == 2
