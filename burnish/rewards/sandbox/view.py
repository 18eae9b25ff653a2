"""The file system a program sees: Python's standard library to read, a scratch directory to write, two devices.

A small tmpfs becomes the root by pivot_root, so that nothing else of the machine is there to be found: no /proc, no /etc, no
program to execute. Bind mounts show the library at its own path, read-only. Extension modules need system libraries that are not
in the view: the zygote has loaded them all before it came here. The scratch directory is a tmpfs of each program's own, with a
size and a number of files, which goes with the mount namespace. /tmp and /dev/shm lead there.

A Python that is installed below one of these three directories is bound into the scratch directory of each program, so that its library
has its own path there too.
"""

from __future__ import annotations

import os

from burnish.rewards.sandbox.kernel import (
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NODIRATIME,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_RELATIME,
    MS_REMOUNT,
    mount,
    pivot_root_here,
)

SCRATCH = "/scratch"
DEVICES = ("/dev/null", "/dev/urandom")  # not /dev/zero: mapping it gives shared memory that no limit counts
STANDARD_LIBRARY = os.path.dirname(os.__file__)
TEMPORARY = ("/tmp", "/dev/shm", SCRATCH)
LIBRARY = "/library"  # where the library is kept if its own path leads into the scratch directory
HARMLESS = MS_NOSUID | MS_NODEV | MS_NOEXEC
NUM_FILES = 4096
# Over which directory the new root is built does not matter: it is gone from view a moment later.
BUILD_AT = "/tmp"

_KEPT = (  # flags of a mount that a user namespace may not take off it
    (os.ST_NOEXEC, MS_NOEXEC),
    (os.ST_NOATIME, MS_NOATIME),
    (os.ST_NODIRATIME, MS_NODIRATIME),
    (os.ST_RELATIME, MS_RELATIME),
)


def path_in_scratch(library: str) -> str | None:
    """Where a library has to be in the scratch directory to be found at its own path; None if that leads elsewhere."""
    for folder in TEMPORARY:
        if library.startswith(folder + "/"):
            return SCRATCH + library.removeprefix(folder)
    return None


def build() -> None:
    """Replace the whole file system of this mount namespace by the view, read-only but for what programs mount on it."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    # Opened before the new root covers anything: they may lie under what it covers.
    sources = {path: os.open(path, os.O_PATH) for path in (STANDARD_LIBRARY, *DEVICES)}
    mount("tmpfs", BUILD_AT, "tmpfs", HARMLESS, "size=1m,mode=755")
    os.chdir(BUILD_AT)
    in_scratch = path_in_scratch(STANDARD_LIBRARY)
    library = f".{STANDARD_LIBRARY if in_scratch is None else LIBRARY}"
    os.makedirs(library)
    _show(f"/proc/self/fd/{sources[STANDARD_LIBRARY]}", library, HARMLESS)
    packages = f"{library}/site-packages"
    if os.path.isdir(packages):
        mount("tmpfs", packages, "tmpfs", HARMLESS | MS_RDONLY, "size=4k,mode=755")
    os.mkdir("." + SCRATCH)
    if in_scratch is not None:
        _show_library(library, "." + in_scratch)
    os.mkdir("dev")
    for device in DEVICES:
        os.close(os.open("." + device, os.O_CREAT | os.O_WRONLY))
        _show(f"/proc/self/fd/{sources[device]}", "." + device, MS_NOSUID | MS_NOEXEC)
    for other in ("tmp", "dev/shm"):
        os.symlink(SCRATCH, other)
    for descriptor in sources.values():
        os.close(descriptor)
    pivot_root_here()
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | HARMLESS)


def _show_library(library: str, target: str) -> None:
    """Bind the library, with what covers other packages in it, to its place in the scratch directory."""
    os.makedirs(target)
    _show(library, target, HARMLESS, MS_REC)


def _show(source: str, target: str, flags: int, how: int = 0) -> None:
    """Bind a file or directory to another place, read-only."""
    mount(source, target, None, MS_BIND | how)
    kept = sum(flag for bit, flag in _KEPT if os.statvfs(target).f_flag & bit)
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags | kept)


def add_scratch(num_bytes: int) -> None:
    """A scratch directory for the program that this mount namespace is for, and this process in it."""
    mount("tmpfs", SCRATCH, "tmpfs", HARMLESS, f"size={num_bytes},nr_inodes={NUM_FILES},mode=700")
    os.chdir(SCRATCH)
    in_scratch = path_in_scratch(STANDARD_LIBRARY)
    if in_scratch is not None:
        _show_library(LIBRARY, in_scratch)
