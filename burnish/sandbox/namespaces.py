"""Linux namespaces of the sandbox: the file system that a program sees, and the way into the namespaces.

The system calls here are those that Python does not offer. Each raises an OSError that names the step if the kernel refuses.

File system: a small tmpfs becomes the root by pivot_root, so that nothing else of the machine can be found: no /proc, no /etc, no program
to execute. Bind mounts show Python's standard library at its own path, read-only. Extension modules need system libraries that are not
visible there; the zygote has loaded them all before. Each program has a scratch directory: a tmpfs with a limited size and number of files,
which goes with the mount namespace. /tmp and /dev/shm lead there. A Python that is installed below one of these three directories is bound
into the scratch directory of each program, so that its library is at its own path there too. A toolchain
(burnish.sandbox.toolchain) adds its folders and the system's shared libraries, read-only, and may be executed.

Users: root builds the file system with its own privileges and then enters a user namespace in which uid 1000 is `nobody` outside. Another
user enters a namespace in which uid 1000 is that user, and builds the file system with the privileges it has there. Either way the process
has every capability over its own namespaces and none outside, and the programs it starts have none at all.
"""

from __future__ import annotations

import ctypes
import os
import sys

from burnish.sandbox.toolchain import LIBRARY_FOLDERS, TOOLCHAIN_MOUNT, Toolchain

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

SCRATCH = "/scratch"
DEVICES = ("/dev/null", "/dev/urandom")  # not /dev/zero: mapping it gives shared memory that no limit counts
STANDARD_LIBRARY = os.path.dirname(os.__file__)
TEMP_DIRECTORIES = ("/tmp", "/dev/shm", SCRATCH)
LIBRARY_MOUNT = "/library"  # where the library is mounted if its own path leads into the scratch directory
SAFE_MOUNT_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC
MAX_SCRATCH_FILES = 4096
BUILD_AT = "/tmp"  # the new root is built over any directory; it is gone from view a moment later
_LOCKED_MOUNT_FLAGS = (  # flags of a mount that a user namespace may not remove
    (os.ST_NOEXEC, MS_NOEXEC),
    (os.ST_NOATIME, MS_NOATIME),
    (os.ST_NODIRATIME, MS_NODIRATIME),
    (os.ST_RELATIME, MS_RELATIME),
)

INNER_ID = 1000  # the uid and gid that programs see
NOBODY = 65534  # the uid and gid of programs outside, if root starts them
PROGRAM_NAMESPACES = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET
"""The namespaces that are new for every program, besides a pid namespace."""
HOST_NAME = "sandbox"

libc = ctypes.CDLL(None, use_errno=True)
if sys.platform.startswith("linux"):  # on other systems the code reward imports this module and then refuses to start
    libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)


def _check_syscall(result: int, step: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")


def unshare(flags: int, what: str) -> None:
    """Move this process into new namespaces (for a pid namespace: its later children)."""
    _check_syscall(libc.unshare(flags), f"new namespaces ({what})")


def enter_pid_namespace(descriptor: int) -> None:
    """Start later children in this pid namespace."""
    _check_syscall(libc.setns(descriptor, CLONE_NEWPID), "back to the own pid namespace")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _check_syscall(libc.mount(*texts, flags, options.encode()), f"mount {kind or source or ''} on {target}")


def pivot_root_here() -> None:
    """Make the working directory, which is a mount point, the root of this mount namespace, and detach the old root."""
    _check_syscall(libc.pivot_root(b".", b"."), "pivot_root")
    _check_syscall(libc.umount2(b".", MNT_DETACH), "detach the old root")
    os.chdir("/")


def set_host_name(name: str) -> None:
    """Set the host name of this UTS namespace."""
    encoded = name.encode()
    _check_syscall(libc.sethostname(encoded, len(encoded)), "sethostname")


def prctl(option: int, first: int = 0, second: int = 0, *, step: str) -> None:
    """prctl(2)."""
    _check_syscall(libc.prctl(option, first, second, 0, 0), step)


def drop_capabilities() -> None:
    """Drop every capability permanently, including those that executing a file could give."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, step="clear ambient capabilities")
    for capability in range(MAX_CAPABILITIES):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # beyond the last one that this kernel knows
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _check_syscall(libc.capset(header, (ctypes.c_uint32 * 6)()), "drop capabilities")
    prctl(PR_SET_NO_NEW_PRIVS, 1, step="no_new_privs")


# --- the file system of a program ------------------------------------------------------------------------------------


def path_in_scratch(library: str) -> str | None:
    """Where a library must be in the scratch directory to be found at its own path; None if its path does not lead there."""
    for folder in TEMP_DIRECTORIES:
        if library.startswith(folder + "/"):
            return SCRATCH + library.removeprefix(folder)
    return None


def build_root(toolchain: Toolchain | None = None) -> None:
    """Replace the whole file system of this mount namespace; it is read-only except for what programs mount on it."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    shown = {} if toolchain is None else {**_library_mounts(), **toolchain.mounts()}
    # Open these before the new root covers anything: they may lie below it.
    sources = {path: os.open(path, os.O_PATH) for path in (STANDARD_LIBRARY, *DEVICES, *shown.values())}
    mount("tmpfs", BUILD_AT, "tmpfs", SAFE_MOUNT_FLAGS, "size=1m,mode=755")
    os.chdir(BUILD_AT)
    in_scratch = path_in_scratch(STANDARD_LIBRARY)
    library = f".{STANDARD_LIBRARY if in_scratch is None else LIBRARY_MOUNT}"
    os.makedirs(library)
    _bind_read_only(f"/proc/self/fd/{sources[STANDARD_LIBRARY]}", library, SAFE_MOUNT_FLAGS)
    packages = f"{library}/site-packages"
    if os.path.isdir(packages):
        mount("tmpfs", packages, "tmpfs", SAFE_MOUNT_FLAGS | MS_RDONLY, "size=4k,mode=755")
    os.mkdir("." + SCRATCH)
    if in_scratch is not None:
        _bind_library(library, "." + in_scratch)
    os.mkdir("dev")
    for device in DEVICES:
        os.close(os.open("." + device, os.O_CREAT | os.O_WRONLY))
        _bind_read_only(f"/proc/self/fd/{sources[device]}", "." + device, MS_NOSUID | MS_NOEXEC)
    for other in ("tmp", "dev/shm"):
        os.symlink(SCRATCH, other)
    for target, source in shown.items():
        _show(f"/proc/self/fd/{sources[source]}", target)
    if toolchain is not None:
        _link_system_folders()
        # A program finds its own folder through /proc. There is none here, but its pid is known: 1.
        os.makedirs("proc/1")
        os.symlink(f"{TOOLCHAIN_MOUNT}/{toolchain.executable}", "proc/1/exe")
        os.symlink("1", "proc/self")
    for descriptor in sources.values():
        os.close(descriptor)
    pivot_root_here()
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | SAFE_MOUNT_FLAGS)


def _library_mounts() -> dict[str, str]:
    """The folders of shared libraries that exist and are not links to another."""
    return {path: path for path in LIBRARY_FOLDERS if os.path.exists(path) and not os.path.islink(path)}


def _link_system_folders() -> None:
    """Links such as /lib -> usr/lib. The target of an absolute link is the same here."""
    for path in LIBRARY_FOLDERS:
        if os.path.islink(path) and not os.path.lexists("." + path):
            os.makedirs(os.path.dirname("." + path), exist_ok=True)
            os.symlink(os.readlink(path), "." + path)


def _show(source: str, target: str) -> None:
    """Bind a file or folder of a toolchain, read-only; programs in it may be executed."""
    inside = "." + target
    if os.path.isdir(source):
        os.makedirs(inside, exist_ok=True)  # the standard library may lie in a folder of shared libraries
    else:
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        os.close(os.open(inside, os.O_CREAT | os.O_WRONLY))
    _bind_read_only(source, inside, MS_NOSUID | MS_NODEV)


def _bind_library(library: str, target: str) -> None:
    """Bind the library into the scratch directory, including the empty mount that hides site-packages."""
    os.makedirs(target)
    _bind_read_only(library, target, SAFE_MOUNT_FLAGS, MS_REC)


def _bind_read_only(source: str, target: str, flags: int, how: int = 0) -> None:
    """Bind a file or directory to another path, read-only."""
    mount(source, target, None, MS_BIND | how)
    locked = sum(flag for bit, flag in _LOCKED_MOUNT_FLAGS if os.statvfs(target).f_flag & bit)
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags | locked)


def mount_scratch(num_bytes: int) -> None:
    """Mount the scratch directory of this mount namespace's program, and change into it."""
    mount("tmpfs", SCRATCH, "tmpfs", SAFE_MOUNT_FLAGS, f"size={num_bytes},nr_inodes={MAX_SCRATCH_FILES},mode=700")
    os.chdir(SCRATCH)
    in_scratch = path_in_scratch(STANDARD_LIBRARY)
    if in_scratch is not None:
        _bind_library(LIBRARY_MOUNT, in_scratch)


# --- entering the namespaces -----------------------------------------------------------------------------------------


def enter_sandbox(toolchain: Toolchain | None = None) -> None:
    """Move this process, which must have one thread, into the sandbox. Its children start in a new pid namespace."""
    all_namespaces = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWCGROUP | PROGRAM_NAMESPACES
    if os.geteuid() != 0:
        uid, gid = os.geteuid(), os.getegid()
        unshare(all_namespaces, "user, mount, pid, network, ipc, uts, cgroup")
        _write_id_maps(os.getpid(), uid, gid, may_set_groups=False)
        build_root(toolchain)
        return
    unshare(CLONE_NEWNS, "mount, as root")
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    build_root(toolchain)
    _enter_as_nobody(all_namespaces, processes)
    os.close(processes)
    os.setgroups([])
    os.setresgid(INNER_ID, INNER_ID, INNER_ID)
    os.setresuid(INNER_ID, INNER_ID, INNER_ID)


def _enter_as_nobody(flags: int, processes: int) -> None:
    """Enter a user namespace. A child that stays root outside writes its id map."""
    request_reader, request_writer = os.pipe()
    process, child = os.getpid(), os.fork()
    if child == 0:
        try:
            os.close(request_writer)
            if os.read(request_reader, 1):
                _write_id_maps(process, NOBODY, NOBODY, may_set_groups=True, processes=processes)
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    os.close(request_reader)
    try:
        unshare(flags, "user, mount, pid, network, ipc, uts, cgroup")
        os.write(request_writer, b"!")
    finally:
        os.close(request_writer)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        raise OSError(status, f"write the uid map: {os.strerror(abs(status))}")


def _write_id_maps(process: int, uid: int, gid: int, may_set_groups: bool, processes: int | None = None) -> None:
    """Map the only user of a process's user namespace to an outside uid and gid. `processes` is an open /proc if its path is gone."""
    folder = f"{process}" if processes is not None else f"/proc/{process}"
    files = {"uid_map": f"{INNER_ID} {uid} 1", "gid_map": f"{INNER_ID} {gid} 1"}
    if not may_set_groups:
        files = {"setgroups": "deny"} | files
    for name, text in files.items():
        descriptor = os.open(f"{folder}/{name}", os.O_WRONLY, dir_fd=processes)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def enter_program_namespaces() -> None:
    """In the first process of a program's pid namespace: enter the program's other namespaces."""
    unshare(PROGRAM_NAMESPACES, "of a program")
    set_host_name(HOST_NAME)
