"""The file system a program sees: Python's standard library to read, a scratch directory to write, two devices.

A small tmpfs becomes the root by pivot_root, so that nothing else of the machine is there to be found: no /proc, no /etc, no
program to execute. Bind mounts show the library at its own path, read-only. Extension modules need system libraries that are not
in the view: the zygote has loaded them all before it came here. The scratch directory is a tmpfs of each program's own, with a
size and a number of files, which goes with the mount namespace.
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


def build() -> None:
    """Replace the whole file system of this mount namespace by the view, read-only but for what programs mount on it."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    # Opened before the new root covers anything: they may lie under what it covers.
    sources = {path: os.open(path, os.O_PATH) for path in (STANDARD_LIBRARY, *DEVICES)}
    mount("tmpfs", BUILD_AT, "tmpfs", HARMLESS, "size=1m,mode=755")
    os.chdir(BUILD_AT)
    _show(sources[STANDARD_LIBRARY], "." + STANDARD_LIBRARY, HARMLESS, is_folder=True)
    packages = f".{STANDARD_LIBRARY}/site-packages"
    if os.path.isdir(packages):
        mount("tmpfs", packages, "tmpfs", HARMLESS | MS_RDONLY, "size=4k,mode=755")
    for device in DEVICES:
        _show(sources[device], "." + device, MS_NOSUID | MS_NOEXEC, is_folder=False)
    os.mkdir("." + SCRATCH)
    for other in ("tmp", "dev/shm"):
        os.symlink(SCRATCH, other)
    for descriptor in sources.values():
        os.close(descriptor)
    pivot_root_here()
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | HARMLESS)


def _show(source: int, target: str, flags: int, is_folder: bool) -> None:
    """Bind what a descriptor stands for to a new place, read-only."""
    if is_folder:
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(f"/proc/self/fd/{source}", target, None, MS_BIND)
    kept = sum(flag for bit, flag in _KEPT if os.statvfs(target).f_flag & bit)
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags | kept)


def add_scratch(num_bytes: int) -> None:
    """A scratch directory for the program that this mount namespace is for, and this process in it."""
    mount("tmpfs", SCRATCH, "tmpfs", HARMLESS, f"size={num_bytes},nr_inodes={NUM_FILES},mode=700")
    os.chdir(SCRATCH)
