"""Limits of a program, and how its process is confined to them before the first line of the program runs.

The seccomp filter refuses system calls that a program has no use for. It closes most of the kernel surface that namespaces leave open
(mounts, tracing, keyrings, io_uring, bpf), and every socket that is not a Unix socket. Calls that are not named pass: the standard library
needs hundreds of them, and isolation does not depend on this list.

The limits on memory and CPU time do depend on the filter, because they count what processes have (burnish.sandbox.confined_process). So it
refuses memory that stays allocated while no process maps it, or that no count shows: memfd, System V shared memory, shared mappings without
a file, pages given to a pipe, huge pages. It refuses to change the action of SIGCHLD, because the kernel drops the CPU time of children
that end while it is ignored.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import math
import os
import platform
import resource
import signal
import struct
from dataclasses import dataclass

from burnish.sandbox import namespaces

MIB = 1 << 20
OWN_PROCESSES = 6  # the sandbox's own; they run as the same user, so the kernel counts them together with the program's
SPARE_PROCESSES = 16  # how many more the kernel allows a program, until the supervisor sees the excess and ends it
PROCESSES_PER_SESSION = 4  # its supervisor, the program and two that it may have started

NAMESPACE_FLAGS = (
    namespaces.CLONE_NEWNS
    | namespaces.CLONE_NEWCGROUP
    | namespaces.CLONE_NEWUTS
    | namespaces.CLONE_NEWIPC
    | namespaces.CLONE_NEWUSER
    | namespaces.CLONE_NEWPID
    | namespaces.CLONE_NEWNET
)

AUDIT_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machines whose system call numbers are listed here, with the kernel's AUDIT_ARCH_* constant for each."""

REFUSED_SYSCALLS: dict[str, tuple[int | None, int | None]] = {  # numbers on x86_64 and aarch64
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
CLONE = (56, 220)
# clone3 is refused as absent (ENOSYS), so that libc uses clone: its flags are behind a pointer, which no filter can read.
CLONE3 = (435, 435)
SOCKET = (41, 198)
AF_UNIX = 1
MMAP = (9, 222)
MAP_SHARED_ANONYMOUS = 0x21
MAP_HUGETLB = 0x40000
SIGACTION = (13, 134)
SIGCHLD = 17

# Classic BPF: operation codes, return values, and the offsets of the call's number, machine and arguments.
LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
AT_NUMBER, AT_MACHINE, AT_ARGUMENT = 0, 4, 16
AT_FOURTH_ARGUMENT = AT_ARGUMENT + 3 * 8
X32_SYSCALL_BIT = 0x40000000  # x32 on x86_64 has the same calls under other numbers
SECCOMP_MODE_FILTER = 2


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _instruction(RETURN, ERRNO | error)


def seccomp_program(machine: str) -> bytes:
    """The filter for a machine, as BPF byte code."""
    column = list(AUDIT_ARCHES).index(machine)
    lines = [
        _instruction(LOAD, AT_MACHINE),
        _instruction(JUMP_EQUAL, AUDIT_ARCHES[machine], 1, 0),
        _instruction(RETURN, KILL),
        _instruction(LOAD, AT_NUMBER),
        _instruction(JUMP_AT_LEAST, X32_SYSCALL_BIT, 0, 1),
        _refuse(errno.ENOSYS),
        _instruction(JUMP_EQUAL, CLONE3[column], 0, 1),
        _refuse(errno.ENOSYS),
    ]
    for numbers in REFUSED_SYSCALLS.values():
        number = numbers[column]
        if number is not None:
            lines += [_instruction(JUMP_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    lines += [
        _instruction(JUMP_EQUAL, CLONE[column], 0, 4),
        _instruction(LOAD, AT_ARGUMENT),
        _instruction(JUMP_ANY_BIT, NAMESPACE_FLAGS, 0, 1),
        _refuse(errno.EPERM),
        _instruction(RETURN, ALLOW),
        _instruction(JUMP_EQUAL, SOCKET[column], 0, 4),
        _instruction(LOAD, AT_ARGUMENT),
        _instruction(JUMP_EQUAL, AF_UNIX, 1, 0),
        _refuse(errno.EACCES),
        _instruction(RETURN, ALLOW),
        _instruction(JUMP_EQUAL, SIGACTION[column], 0, 4),
        _instruction(LOAD, AT_ARGUMENT),
        _instruction(JUMP_EQUAL, SIGCHLD, 0, 1),
        _refuse(errno.EPERM),
        _instruction(RETURN, ALLOW),
        _instruction(JUMP_EQUAL, MMAP[column], 0, 5),
        _instruction(LOAD, AT_FOURTH_ARGUMENT),
        _instruction(JUMP_ANY_BIT, MAP_HUGETLB, 2, 0),
        _instruction(AND, MAP_SHARED_ANONYMOUS),
        _instruction(JUMP_EQUAL, MAP_SHARED_ANONYMOUS, 0, 1),
        _refuse(errno.EPERM),
        _instruction(RETURN, ALLOW),
    ]
    return b"".join(lines)


class _SeccompProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_seccomp_filter() -> bool:
    """Filter this process and all it starts from now on; False on a machine whose call numbers are not listed here."""
    machine = platform.machine()
    if machine not in AUDIT_ARCHES:
        return False
    code = seccomp_program(machine)
    filter_ = _SeccompProgram(len(code) // 8, code)
    namespaces.prctl(namespaces.PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(filter_), step="seccomp filter")
    return True


@dataclass(frozen=True)
class Limits:
    """The limits of a program. They hold for it and all its children together, unless the field says otherwise."""

    memory_bytes: int = 2048 * MIB
    """Memory of all processes together, and address space of each process."""
    processes: int = 32
    """Processes and threads. A program with more is ended at once, so that a fork bomb costs no time."""
    scratch_bytes: int = 64 * MIB
    """Size of the scratch directory, and of any single file."""
    output_bytes: int = 4 * MIB
    """Limit for standard output, and again for standard error."""
    open_files: int = 64
    """Open files of one process."""
    max_sessions: int = 0
    """How many sessions may be open in this sandbox besides the program. The kernel counts the processes of all of them together."""


def confine(limits: Limits, cpu_s: float, is_isolated: bool) -> None:
    """Set all limits on this process, permanently. The processes it starts inherit them."""
    # Without a user namespace the kernel would count all processes of the user on the machine, so only the supervisor counts then.
    others = limits.max_sessions * PROCESSES_PER_SESSION + OWN_PROCESSES + SPARE_PROCESSES
    processes = limits.processes + others if is_isolated else resource.RLIM_INFINITY
    for which, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, math.ceil(cpu_s) + 1),
        (resource.RLIMIT_FSIZE, limits.scratch_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(which)[1]
        lower = (
            value if hard == resource.RLIM_INFINITY else hard if value == resource.RLIM_INFINITY else min(value, hard)
        )
        resource.setrlimit(which, (lower, lower))
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)
    namespaces.drop_capabilities()
    install_seccomp_filter()


def arrange_descriptors(kept: dict[int, int], empty: tuple[int, ...]) -> None:
    """Close all descriptors but `kept` (wanted number: current descriptor), and open /dev/null under the `empty` numbers."""
    lowest = max(*kept, *empty, *kept.values()) + 1
    devnull = os.open(os.devnull, os.O_RDWR)
    moved = {}
    for number, descriptor in (*kept.items(), *((number, devnull) for number in empty)):
        moved[number] = fcntl.fcntl(descriptor, fcntl.F_DUPFD, lowest)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number, inheritable=False)
    edges = [-1, *sorted(moved), _max_descriptors()]
    for below, above in itertools.pairwise(edges):
        if below + 1 < above:  # some versions of Python take an empty range from 0 for everything
            os.closerange(below + 1, above)


def _max_descriptors() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if hard == resource.RLIM_INFINITY else max(soft, hard)
