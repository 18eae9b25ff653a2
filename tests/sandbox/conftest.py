"""Skips the sandbox tests on systems without namespaces. It asks the kernel directly, not the code under test."""

import subprocess
import sys

import pytest

ASK = """
import ctypes, os
flags = 0x10000000 | 0x20000000 | 0x40000000 | 0x20000  # user, pid, network, mount
libc = ctypes.CDLL(None, use_errno=True)
raise SystemExit(0 if libc.unshare(flags) == 0 else os.strerror(ctypes.get_errno()))
"""


@pytest.fixture(autouse=True, scope="session")
def namespaces() -> None:
    """Skip all tests here if the system gives this user no namespaces."""
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=300)
    if asked.returncode != 0:
        pytest.skip(f"this system gives no namespaces: {asked.stderr.strip()}")
