"""Drivers that follow a script, under a real supervisor: `python -m tests.run.scripted_drivers <folder> <restarts> <deadline> <script> ...`.

There is one script per driver: words with commas between. `step` makes a step, `measure` validates before the first step,
`hold` waits for the file `release`, and the last word says how the driver ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from burnish.run.display import Display
from burnish.run.journal import Journal
from burnish.run.supervisor import processes, supervisor
from burnish.run.supervisor.liveness import HEARTBEAT_FILE, Heartbeat, HeartbeatDisplay

supervisor.MAX_STOPPED_S = 3.0  # far more than a busy machine needs between two signals of a test
supervisor.STACK_DUMP_S = 0.3
supervisor.POLL_S = 0.1
processes.ORPHAN_GRACE_S = 0.3


FOREVER_S = 3600


def drive(folder: Path, words: list[str]) -> int:
    """Run one driver."""
    with open(folder / "drivers", "a") as file:
        file.write(f"{os.getpid()}\n")
    if words == ["early"]:
        os.kill(os.getpid(), signal.SIGKILL)
    journal, heartbeat = Journal(folder / "journal"), Heartbeat(folder / HEARTBEAT_FILE)
    display: Display = HeartbeatDisplay(folder / "log.txt", heartbeat, open(os.devnull, "w"))  # noqa: SIM115
    done = max((event["step"] for event in journal.events if event["event"] == "step"), default=0)
    if journal.num_events:
        journal.rewind(done)
    display.start("toy", 100, done)
    for word in words:
        if word == "step":
            done += 1
            journal.append("step", step=done)
            display.step(done, {})
        elif word == "measure":
            journal.append("step", step=0)
        elif word == "slow":
            for k in range(55):
                time.sleep(0.1)
                display.phase(f"slowly {k}")
        elif word == "hold":
            display.phase("about to hold")
            while not (folder / "release").exists():
                time.sleep(0.02)
        else:
            display.phase(f"about to {word}")
            end(word)
    journal.append("complete", step=done)
    return 0


def end(word: str) -> None:
    """End the driver as the word says."""
    if word.isdecimal():
        sys.exit(int(word))
    if word == "exit":
        os._exit(0)
    if word == "bug":
        raise ZeroDivisionError("a bug")
    if word == "crash":
        ctypes.string_at(0)
    if word == "hang":
        time.sleep(FOREVER_S)
    if word == "orphan":
        # A child in a new session, which is not signalled when its parent ends.
        sleep = f"import time; time.sleep({FOREVER_S})"
        child = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
        Path("orphan").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), getattr(signal, f"SIG{word.upper()}"))
    time.sleep(FOREVER_S)


def main() -> int:
    folder = Path(sys.argv[1])
    status = supervisor.supervise(folder, int(sys.argv[2]), float(sys.argv[3]))
    if status is not None:
        assert not {"torch", "numpy"} & set(sys.modules)
        return status
    number = len((folder / "drivers").read_text().splitlines()) if (folder / "drivers").exists() else 0
    return drive(folder, sys.argv[4:][number].split(","))


if __name__ == "__main__":
    sys.exit(main())
