"""From the machine into the sandbox: user, mount, pid, network, IPC and UTS namespaces with an unprivileged uid.

Root makes the view with its own rights and then enters a user namespace in which uid 1000 is `nobody` outside; another user enters
one in which uid 1000 is that user, and makes the view with the rights it has there. Either way the process has every capability over
its own namespaces and none over anything outside, and the programs it starts have none at all.
"""

from __future__ import annotations

import os

from burnish.rewards.sandbox import kernel, view
from burnish.rewards.sandbox.kernel import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
)

INSIDE = 1000  # the uid and gid that programs see
NOBODY = 65534  # what they are outside when root starts them
OWN = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET
"""What every program gets anew, besides a pid namespace."""
HOST_NAME = "sandbox"


def enter() -> None:
    """Move this process, which must have one thread, into the sandbox; its children start in a new pid namespace."""
    every = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWCGROUP | OWN
    if os.geteuid() != 0:
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare(every, "user, mount, pid, network, ipc, uts, cgroup")
        _write_maps(os.getpid(), uid, gid, may_set_groups=False)
        view.build()
        return
    kernel.unshare(CLONE_NEWNS, "mount, as root")
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    view.build()
    _enter_as_nobody(every, processes)
    os.close(processes)
    os.setgroups([])
    os.setresgid(INSIDE, INSIDE, INSIDE)
    os.setresuid(INSIDE, INSIDE, INSIDE)


def _enter_as_nobody(flags: int, processes: int) -> None:
    """Enter a user namespace whose one user a child that stays root outside has written down."""
    asked, ask = os.pipe()
    process, child = os.getpid(), os.fork()
    if child == 0:
        try:
            os.close(ask)
            if os.read(asked, 1):
                _write_maps(process, NOBODY, NOBODY, may_set_groups=True, processes=processes)
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    os.close(asked)
    try:
        kernel.unshare(flags, "user, mount, pid, network, ipc, uts, cgroup")
        os.write(ask, b"!")
    finally:
        os.close(ask)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        raise OSError(status, f"write the uid map: {os.strerror(abs(status))}")


def _write_maps(process: int, uid: int, gid: int, may_set_groups: bool, processes: int | None = None) -> None:
    """Say who the one user of a process's user namespace is outside; `processes` is /proc where the path is gone."""
    folder = f"{process}" if processes is not None else f"/proc/{process}"
    files = {"uid_map": f"{INSIDE} {uid} 1", "gid_map": f"{INSIDE} {gid} 1"}
    if not may_set_groups:
        files = {"setgroups": "deny"} | files
    for name, text in files.items():
        descriptor = os.open(f"{folder}/{name}", os.O_WRONLY, dir_fd=processes)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def own() -> None:
    """For the first process of a program's pid namespace: the other namespaces of its own."""
    kernel.unshare(OWN, "of a program")
    kernel.set_host_name(HOST_NAME)
