"""A program of the user's that runs in the sandbox on text of the model, such as Lean: its folders are shown there read-only.

The sandbox has nothing to execute otherwise. A toolchain adds the folders that the program needs, and the system's shared libraries. All limits of
the sandbox hold: no network, no other file, time, memory, processes, output.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

TOOLCHAIN_MOUNT = "/toolchain"
LIBRARY_FOLDERS = ("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/lib32", "/etc/ld.so.cache")
"""Where the dynamic linker finds shared libraries. Those that exist are shown at their own path."""


@dataclass(frozen=True)
class Toolchain:
    """A folder with a program in it."""

    folder: str
    """The program's installation. It is `/toolchain` in the sandbox."""
    executable: str
    """The program, relative to the folder."""
    data: tuple[str, ...] = ()
    """Further folders that it reads. They are `/toolchain-data/0`, `/toolchain-data/1`, ... in the sandbox."""
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the program's environment. `{data}` stands for the paths of `data` in the sandbox, joined by colons."""

    def mounts(self) -> dict[str, str]:
        """The folders to show: the path in the sandbox, and the path outside."""
        return {TOOLCHAIN_MOUNT: self.folder, **dict(zip(self.data_paths(True), self.data, strict=True))}

    def data_paths(self, is_isolated: bool) -> list[str]:
        """Where the program finds `data`."""
        return (
            [f"{TOOLCHAIN_MOUNT}-data/{number}" for number in range(len(self.data))] if is_isolated else list(self.data)
        )

    def program_path(self, is_isolated: bool) -> str:
        """Where the program is."""
        return f"{TOOLCHAIN_MOUNT if is_isolated else self.folder}/{self.executable}"

    def launcher(self, is_isolated: bool, file_name: str) -> str:
        """The Python program for `Sandbox.run_stdio`: it writes its standard input to a file and becomes the program, with the file's name last.

        The process is replaced, not forked, so its pid stays 1 and `/proc/1/exe` of the sandbox is right for it.
        """
        path = self.program_path(is_isolated)
        data = ":".join(self.data_paths(is_isolated))
        environment = {name: value.replace("{data}", data) for name, value in self.environment.items()}
        return LAUNCHER.format(
            path=path, file=file_name, environment=environment, arguments=[path, *self.arguments, file_name]
        )

    def as_json(self) -> str:
        """For the command line of the zygote."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Toolchain:
        """The toolchain of `as_json`."""
        record = json.loads(text)
        return Toolchain(**{**record, "data": tuple(record["data"]), "arguments": tuple(record["arguments"])})


LAUNCHER = """\
import os, sys
with open({file!r}, "w", encoding="utf-8") as out:
    out.write(sys.stdin.read())
for number in (0, 1, 2):
    os.set_inheritable(number, True)
os.execve({path!r}, {arguments!r}, dict(os.environ, **{environment!r}))
"""
