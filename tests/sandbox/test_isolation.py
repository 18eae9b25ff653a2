"""The sandbox as root, as an ordinary user and without namespaces, and what happens when the sandbox itself breaks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import burnish
from burnish.config.data import Reward
from burnish.rewards.code_reward import ProgramRunner, check_sandbox, parse_tests
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.sandbox.client import RunResult, Sandbox, SandboxError
from burnish.sandbox.confined_process import CannotKill, SetupFailed
from burnish.sandbox.limits import Limits
from burnish.sandbox.namespaces import path_in_scratch
from burnish.sandbox.zygote import is_exhaustion
from tests.sandbox.leftovers import settles

ROOT = str(Path(burnish.__file__).parents[1])
NOBODY = 65534

AS_A_USER = """
import os, sys
sys.path.append({root!r})
from burnish.sandbox.client import Sandbox
from burnish.sandbox.limits import Limits
assert os.getuid() == {uid}
with Sandbox(Limits()) as sandbox:
    ended = sandbox.run_stdio("import os; print(os.getuid(), os.path.exists('/etc'), 'SECRET' in os.environ)", "", 10.0)
    assert (ended.reason, ended.status, ended.output) == ("ended", 0, "1000 False False\\n"), ended
    tests = {{"asserts": ["assert f(1) == 2", "assert f(1) == 3"], "entry_point": "f"}}
    ended = sandbox.run_calls({{"program": "def f(x): return x + 1"}}, tests, 10.0)
    assert [v.get("outcome") for v in ended.verdicts] == ["passed", "failed", None], ended
    bomb = sandbox.run_stdio("import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: pass", "", 1.0)
    assert bomb.reason in ("time", "cpu", "processes"), bomb
with Sandbox(Limits(memory_bytes=1 << 29)) as sandbox:
    hog = "import os, time\\nfor _ in range(20):\\n    if os.fork() == 0:\\n        x = b'x' * (60 << 20); time.sleep(99)\\ntime.sleep(99)"
    assert sandbox.run_stdio(hog, "", 10.0).reason == "memory"
    hidden = "import threading\\ndef go():\\n    " + hog.replace("\\n", "\\n    ") + "\\nthreading.Thread(target=go).start()"
    assert sandbox.run_stdio(hidden, "", 10.0).reason == "memory"
with Sandbox(Limits(), is_isolated=False) as sandbox:
    unreadable = "import os\\nos.makedirs('a/b/c')\\nos.chmod('a/b', 0)\\nos.chmod('a', 0)\\nprint(os.getcwd())"
    ended = sandbox.run_stdio(unreadable, "", 10.0)
    assert ended.status == 0 and not os.path.exists(ended.output.strip()), ended
print("done")
"""

# The seccomp filter of programs forbids namespaces, so it turns this system into one without them.
WITHOUT_NAMESPACES = """
import sys
sys.path.append({root!r})
from burnish.config.errors import UserError
from burnish.rewards.code_reward import check_sandbox
from burnish.sandbox import limits as seccomp, namespaces as kernel
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1, step="test")
assert seccomp.install_seccomp_filter()
try:
    check_sandbox(True)
except UserError as error:
    print(error)
check_sandbox(False)
print("unsafe runs")
"""


def reachable_python(uid: int) -> str | None:
    """A Python that another user can start and that is new enough."""
    for path in (sys.executable, getattr(sys, "_base_executable", ""), "/usr/bin/python3"):
        check = [path, "-c", "import sys; assert sys.version_info >= (3, 11)"]
        try:
            if (
                subprocess.run(check, user=uid, group=uid, extra_groups=[], cwd="/", capture_output=True).returncode
                == 0
            ):
                return path
        except OSError:
            continue
    return None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; others run every test as themselves")
def test_an_ordinary_user_has_the_same_sandbox() -> None:
    python = reachable_python(NOBODY)
    if python is None:
        pytest.skip("no Python 3.11 that user nobody can start")
    program = AS_A_USER.format(root=ROOT, uid=NOBODY)
    done = subprocess.run(
        [python, "-B", "-c", program], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", env={"SECRET": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if "max_user_namespaces" in done.stderr:
        pytest.skip("this system gives ordinary users no user namespaces")
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


IN_A_TEMPORARY_FOLDER = """
import os, sys
sys.path.append({root!r})
from burnish.sandbox.client import Sandbox
from burnish.sandbox.limits import Limits
assert os.__file__.startswith({folder!r}), os.__file__
program = '''
import os, wave
library = os.path.dirname(os.__file__)
print(os.listdir(library + "/site-packages"), bool(os.statvfs(library).f_flag & os.ST_RDONLY), os.path.exists("{folder}/bin"))
open("/tmp/file", "w")
print(os.path.exists("/scratch/file") and os.path.exists("/dev/shm/file"))
'''
with Sandbox(Limits()) as sandbox:
    for _ in range(2):
        ended = sandbox.run_stdio(program, "", 30.0)
        assert ended.output == "[] True False\\nTrue\\n", ended
print("done")
"""


def test_a_python_in_a_temporary_folder_runs_programs() -> None:
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    library = Path(os.__file__).parent
    left_out = shutil.ignore_patterns(
        "site-packages", "dist-packages", "test", "tests", "__pycache__", "config-*", "*.a"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        copied = Path(folder, "lib", library.name)
        shutil.copytree(library, copied, ignore=left_out)
        (copied / "site-packages").mkdir()
        (copied / "site-packages" / "secret.py").touch()
        Path(folder, "bin").mkdir()
        python = shutil.copy(executable, Path(folder, "bin"))
        script = IN_A_TEMPORARY_FOLDER.format(root=ROOT, folder=folder)
        done = subprocess.run([python, "-B", "-S", "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_a_library_below_a_temporary_folder_has_a_place_in_the_scratch_directory() -> None:
    assert path_in_scratch("/scratch/me/lib/python3.12") == "/scratch/me/lib/python3.12"
    assert path_in_scratch("/dev/shm/lib/python3.12") == "/scratch/lib/python3.12"
    assert path_in_scratch("/tmpfs/lib/python3.12") is None


def test_without_namespaces_code_rewards_refuse_to_start_and_say_what_to_do() -> None:
    script = WITHOUT_NAMESPACES.format(root=ROOT)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "new namespaces" in done.stdout
    assert "Operation not permitted" in done.stdout
    assert "--cap-add SYS_ADMIN" in done.stdout
    assert "reward.sandbox=unsafe" in done.stdout
    assert done.stdout.endswith("unsafe runs\n")


def test_unsafe_is_what_it_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("seen")
    program = f"print(open({str(tmp_path / 'file')!r}).read())"
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\nprint('seen')"
    tests = json.dumps({"stdio": [{"input": "", "output": "seen"}]})
    requests = [ScoreRequest(text, "p", f"```python\n{text}\n```", "s", tests, {}) for text in (program, daemon)]
    memory_gib = 1 + os.getpid() * 1e-8  # a value that only the command lines of this sandbox and its forks contain
    fields = {"parts": ["code"], "workers": 1, "memory_gib": memory_gib}
    with Rewards(Reward.model_validate(fields | {"sandbox": "unsafe"})) as rewards:
        assert [s.reward for s in rewards.score(requests)] == [1.0, 1.0]
        assert settles(memory_gib, 1) == 1  # the sandbox itself: no daemon
    assert settles(memory_gib, 0) == 0
    assert "as you" in caplog.text
    with Rewards(Reward.model_validate(fields)) as rewards:
        scores = rewards.score(requests)
    assert [s.reward for s in scores] == [0.0, 1.0]
    assert "FileNotFoundError" in scores[0].details["code"]


def test_unsafe_without_a_part_that_runs_programs_is_refused() -> None:
    with pytest.raises(ValueError, match="has no effect"):
        Reward.model_validate({"parts": ["number"], "sandbox": "unsafe"})


@pytest.mark.parametrize("is_isolated", [True, False])
def test_limits_hold_with_and_without_namespaces(is_isolated: bool) -> None:
    with Sandbox(Limits(memory_bytes=1 << 29, output_bytes=1 << 16), is_isolated) as sandbox:
        assert sandbox.run_stdio("print('x' * 100_000)", "", 10.0).reason == "output"
        assert sandbox.run_stdio("import time; time.sleep(99)", "", 0.3).reason == "time"
        assert "MemoryError" in sandbox.run_stdio("bytearray(1 << 30)", "", 10.0).errors
        children = "import os, time\nfor _ in range(40): os.fork() or time.sleep(99)\ntime.sleep(99)"
        ended = sandbox.run_stdio(children, "", 10.0)
        assert ended.reason == "processes"
        assert sandbox.run_stdio("print(1)", "", 10.0).output == "1\n"


def test_sockets_of_the_machine_are_out_of_reach() -> None:
    name = f"burnish-reach-{os.getpid()}"
    program = (
        f"import socket\ns = socket.socket(socket.AF_UNIX)\ntry: s.connect('\\0{name}'); print('reached')\n"
        "except OSError as error: print(type(error).__name__)"
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        with Sandbox(Limits()) as sandbox:
            assert sandbox.run_stdio(program, "", 10.0).output == "ConnectionRefusedError\n"
        with Sandbox(Limits(), is_isolated=False) as sandbox:  # shows that the program itself is right
            assert sandbox.run_stdio(program, "", 10.0).output == "reached\n"


def test_a_sandbox_that_dies_is_an_error_and_the_next_program_has_a_new_one() -> None:
    with Sandbox(Limits(), slack_s=1.0) as sandbox:
        sandbox.start()
        assert sandbox._process is not None
        (zygote,) = Path(f"/proc/{sandbox._process.pid}/task/{sandbox._process.pid}/children").read_text().split()
        os.kill(sandbox._process.pid, signal.SIGKILL)
        while Path(f"/proc/{zygote}").exists():  # it dies with its parent, and until then it could still run a program
            time.sleep(0.01)
        with pytest.raises(SandboxError):
            sandbox.run_stdio("print(1)", "", 5.0)
        assert sandbox.run_stdio("print(1)", "", 5.0).output == "1\n"


def test_a_sandbox_that_hangs_is_an_error_in_time() -> None:
    with Sandbox(Limits(), slack_s=0.2) as sandbox:
        sandbox.start()
        assert sandbox._process is not None
        (zygote,) = Path(f"/proc/{sandbox._process.pid}/task/{sandbox._process.pid}/children").read_text().split()
        os.kill(int(zygote), signal.SIGSTOP)
        with pytest.raises(SandboxError, match="does not answer"):
            sandbox.run_stdio("print(1)", "", 0.2)
        end = time.monotonic() + 60.0
        while Path(f"/proc/{zygote}").exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert not Path(f"/proc/{zygote}").exists()


class Meddled(Sandbox):
    """A sandbox that does something to the supervisor of each program as soon as the program has started."""

    def __init__(self, meddle: Callable[[int], object]) -> None:
        super().__init__(Limits(), slack_s=1.0)
        self._meddle = meddle

    def _receive_end(self, deadline: float) -> RunResult:
        assert self._process is not None
        (zygote,) = children(self._process.pid)
        (supervisor,) = children(zygote)
        self._meddle(supervisor)
        return super()._receive_end(deadline)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


SLOW = "import time\ntime.sleep(2)\nprint(input())"
ECHO = {"stdio": [{"input": "1", "output": "1"}]}


@pytest.mark.parametrize(
    ("num_kills", "outcome"), [(1, "passed"), (2, "failed: the sandbox broke twice while the program ran (the sandbox failed: the")]
)  # fmt: skip
def test_a_sandbox_that_breaks_while_a_program_runs_is_no_failure_of_the_scorer(num_kills: int, outcome: str) -> None:
    kills = iter([signal.SIGKILL] * num_kills)
    runner = ProgramRunner(timeout_s=30.0)
    with Meddled(lambda supervisor: os.kill(supervisor, next(kills, signal.SIGCONT))) as runner.sandbox:
        outcomes, _ = runner.outcomes(SLOW, parse_tests(ECHO), stops_early=True)
        assert outcomes[0].startswith(outcome)
        assert next(kills, None) is None


def test_past_its_deadline_a_program_is_out_of_time_whatever_holds_the_sandbox_up() -> None:
    runner = ProgramRunner(timeout_s=1.0)
    with Meddled(lambda supervisor: os.kill(supervisor, signal.SIGSTOP)) as runner.sandbox:
        runner.sandbox.start()
        outcomes, is_late = runner.outcomes(SLOW, parse_tests(ECHO), stops_early=True)
    assert (outcomes, is_late) == (["failed: out of time"], True)


def test_the_kernel_ends_a_program_before_its_supervisor_when_memory_runs_out() -> None:
    seen: list[tuple[int, list[int]]] = []

    def score(process: int) -> int:
        return int(Path(f"/proc/{process}/oom_score_adj").read_text())

    with Meddled(
        lambda supervisor: seen.append((score(supervisor), [score(child) for child in children(supervisor)]))
    ) as sandbox:
        sandbox.run_calls({"program": SLOW}, {"asserts": ["assert 1"]}, 10.0)
    ((own, of_programs),) = seen
    assert of_programs == [1000, 1000]  # the program's and the grader's
    assert own < 1000


WITH_LITTLE_MEMORY = """
import os, pathlib, sys
sys.path.append({root!r})
pathlib.Path({group!r}, "cgroup.procs").write_text(str(os.getpid()))
from burnish.rewards.code_reward import ProgramRunner, parse_tests
runner = ProgramRunner(timeout_s=60.0)
greedy = '''
import os, time
with open("x", "wb") as f: f.write(bytes(60 << 20))
for _ in range(25):
    if os.fork() == 0:
        kept = b"x" * (8 << 20)
        time.sleep(1)
        os._exit(0)
while True: os.wait()
'''
with runner.sandbox:
    for tests in ({{"stdio": [{{"input": "", "output": "1"}}]}}, {{"asserts": ["assert f() == 1"]}}):
        print(runner.outcomes(greedy, parse_tests(tests), stops_early=True)[0][0])
    print(runner.outcomes("print(1)", parse_tests({{"stdio": [{{"input": "", "output": "1"}}]}}), stops_early=True)[0][0])
"""


@pytest.fixture
def group_with_little_memory() -> Iterator[Path]:
    """A memory cgroup of 120 MiB, of either version."""
    named = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    parents = [Path("/sys/fs/cgroup/memory" + named.get("memory", "")), Path("/sys/fs/cgroup")]
    for parent in parents:
        group = parent / f"burnish-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        limits = [group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()]
        if limits:
            limits[0].write_text(str(120 << 20))
            yield group
        group.rmdir()
        if limits:
            return
    pytest.skip("no memory cgroup can be made here")


@pytest.mark.slow  # 3 s on two idle cores
def test_a_program_that_exhausts_the_machine_has_failed_and_its_scorer_has_not(group_with_little_memory: Path) -> None:
    script = WITH_LITTLE_MEMORY.format(root=ROOT, group=str(group_with_little_memory))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    outcomes = done.stdout.splitlines()
    assert len(outcomes) == 3, done.stderr
    assert [outcome.partition(":")[0] for outcome in outcomes] == ["failed", "failed", "passed"], outcomes


def test_only_failures_that_a_program_can_cause_are_blamed_on_it() -> None:
    caused = [MemoryError(), OSError(errno.ENOMEM, ""), BlockingIOError(errno.EAGAIN, ""), CannotKill("")]
    assert all(map(is_exhaustion, caused))
    assert not any(map(is_exhaustion, [ValueError(), SetupFailed(""), PermissionError(errno.EPERM, ""), KeyError("")]))


def test_without_namespaces_what_a_program_leaves_in_its_directory_is_removed() -> None:
    deep = "import os\nprint(os.getcwd())\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')\nopen('file', 'w')\nos.symlink('/', 'root')"
    with Sandbox(Limits(), is_isolated=False) as sandbox:
        ended = sandbox.run_stdio(deep, "", 10.0)
    folder = Path(ended.output.strip())
    assert ended.status == 0, ended
    assert not list(folder.parent.glob(folder.name + "*"))


def test_the_check_before_a_run_passes_here() -> None:
    check_sandbox(True)
