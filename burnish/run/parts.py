"""One folder filled by several processes: each writes its part, the first makes them a whole.

They meet in the file system and nowhere else: a thread may write while training uses the network, and no two kinds of
message can come in each other's way. A process that has written its files leaves a list of them, with sizes and
checksums, or the reason why it could not; the first process waits for all lists, with a deadline. The folder has a
temporary name until it is whole, so what a killed run leaves is swept away like any other torn write.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.run.contents import Part, Snapshot, Sums
from burnish.run.files import TEMPORARY, atomic_write, commit_directory

if TYPE_CHECKING:
    from torch import Tensor

LISTS = "part-*.json"
DEADLINE_S = 1800.0
POLL_S = 0.05


def write_part(path: Path, snapshot: Snapshot) -> None:
    """This process's files of the folder `path` to be. The first process is told what is in them, or why there are none."""
    folder = shared_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        sums = snapshot.write(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk may refuse this too; the first process does not wait for ever
            _tell(folder, snapshot.part, {"error": f"{type(error).__name__}: {error}"})
        raise
    _tell(folder, snapshot.part, {"files": sums})


@contextmanager
def whole_folder(path: Path, part: Part) -> Iterator[tuple[Path, Sums]]:
    """For the first process, after its own part: the folder with everyone's files in it, which becomes `path`."""
    folder = shared_folder(path)
    sums = _gather(folder, part)
    for file in folder.glob(LISTS):
        file.unlink()
    yield folder, sums
    commit_directory(folder, path)


def part_of(tensors: Iterable[Tensor]) -> Part:
    """Which of the processes that hold these tensors this is: the only one, unless one of them is spread."""
    from burnish.core.local import is_spread

    if not any(is_spread(tensor) for tensor in tensors):
        return Part()
    from torch import distributed

    return Part(distributed.get_rank(), distributed.get_world_size())


def shared_folder(path: Path) -> Path:
    """The temporary name that every process knows."""
    return path.with_name(f"{TEMPORARY}parts-{path.name}")


def _tell(folder: Path, part: Part, said: dict[str, Any]) -> None:
    atomic_write(folder / f"part-{part.index:05d}.json", json.dumps(said))


def _gather(folder: Path, part: Part) -> Sums:
    until = time.monotonic() + DEADLINE_S
    waiting = set(range(part.count))
    sums: Sums = {}
    while waiting:
        for rank in sorted(waiting):
            file = folder / f"part-{rank:05d}.json"
            if not file.exists():
                continue
            said = json.loads(file.read_text())
            if "error" in said:
                raise UserError(f"process {rank} of {part.count} could not write its part of {folder}: {said['error']}")
            sums |= said["files"]
            waiting.discard(rank)
        if waiting and time.monotonic() > until:
            raise UserError(
                f"{folder}: no word from processes {sorted(waiting)} of {part.count} after {DEADLINE_S:.0f} s; are they alive, and "
                "do they see the same folder?"
            )
        if waiting:
            time.sleep(POLL_S)
    return sums
