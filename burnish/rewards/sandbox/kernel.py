"""The few system calls that Python does not offer, each an OSError that names the step when the kernel refuses."""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND = 32, 1024, 2048, 4096
MS_REC, MS_PRIVATE, MS_RELATIME = 16384, 1 << 18, 1 << 21
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522
MAX_CAPABILITIES = 64

libc = ctypes.CDLL(None, use_errno=True)
if sys.platform.startswith("linux"):  # elsewhere this module is imported, by the reward that then refuses to start
    libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)


def _check(result: int, step: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")


def unshare(flags: int, what: str) -> None:
    """Move this process (its children, for a pid namespace) into new namespaces."""
    _check(libc.unshare(flags), f"new namespaces ({what})")


def enter_pid_namespace(descriptor: int) -> None:
    """Have later children start in this pid namespace."""
    _check(libc.setns(descriptor, CLONE_NEWPID), "back to the own pid namespace")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _check(libc.mount(*texts, flags, options.encode()), f"mount {kind or source or ''} on {target}")


def pivot_root_here() -> None:
    """Make the working directory, a mount point, the root of this mount namespace, and let go of the old root."""
    _check(libc.pivot_root(b".", b"."), "pivot_root")
    _check(libc.umount2(b".", MNT_DETACH), "let go of the old root")
    os.chdir("/")


def set_host_name(name: str) -> None:
    """The host name of this UTS namespace."""
    encoded = name.encode()
    _check(libc.sethostname(encoded, len(encoded)), "sethostname")


def prctl(option: int, first: int = 0, second: int = 0, *, step: str) -> None:
    """prctl(2)."""
    _check(libc.prctl(option, first, second, 0, 0), step)


def drop_capabilities() -> None:
    """Give up every capability, for good: none to hold, none to gain by executing something."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, step="clear ambient capabilities")
    for capability in range(MAX_CAPABILITIES):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the last one this kernel knows
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _check(libc.capset(header, (ctypes.c_uint32 * 6)()), "drop capabilities")
    prctl(PR_SET_NO_NEW_PRIVS, 1, step="no_new_privs")
