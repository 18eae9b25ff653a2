"""`UserError`, the exception for mistakes that the user can fix, and helpers for its messages.

The command line prints a `UserError` without a traceback and exits with status 2. Any other exception that escapes is a bug and keeps its
traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit


class UserError(Exception):
    """A mistake that the user can fix. The message says what is wrong, where, and what to do."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in a notebook in place of a traceback, as the command line shows the message alone."""
        return [f"burnish: error: {self}"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or the empty string."""
    names = list(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or difflib.get_close_matches(
        name.lower(), names, n=1, cutoff=0.5
    )
    return f"; did you mean {match[0]!r}?" if match else ""


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LOCAL_FOLDERS = (
    "model",
    "models",
    "checkpoint",
    "checkpoints",
    "ckpt",
    "ckpts",
    "data",
    "dataset",
    "datasets",
    "runs",
    "out",
    "outputs",
)
"""First parts of paths that are meant to be local."""
LOCAL_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".gz", ".txt", ".yaml", ".py")


def is_hub_id(text: str, roots: Iterable[Path] = (Path(),)) -> bool:
    """Whether a text looks like an id of the Hugging Face hub (`Qwen/Qwen2.5-0.5B`) and not like a local path.

    `roots` are the folders of local paths. A text whose first part exists in one of them is a local path.
    """
    owner, _, name = text.partition("/")
    if not HUB_ID.fullmatch(text) or owner in LOCAL_FOLDERS or name.endswith(LOCAL_SUFFIXES):
        return False
    return not any((root / owner).is_dir() for root in roots)


def is_server_url(url: str) -> bool:
    """Whether `url` is the address of an HTTP server: scheme and host, optionally a port and a path, nothing else."""
    try:
        parts = urlsplit(url)
        has_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or an IPv6 address has no closing bracket
        return False
    return has_server and not (parts.query or parts.fragment or parts.username)


def hub_dataset_hint(path: str, roots: Iterable[Path] = (Path(),)) -> str:
    """The command that downloads what looks like the id of a data set on the hub (`openai/gsm8k`); empty for other paths."""
    if not is_hub_id(path, roots):
        return ""
    folder = f"data/{path.partition('/')[2]}"
    return (
        ". It looks like an id of the Hugging Face hub, but burnish reads local files of data: "
        f"`hf download {path} --repo-type dataset --local-dir {folder}` fetches it (older versions: huggingface-cli download), then give "
        f"path: {folder}/**/*.parquet"
    )


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a table, with the nearest name and the list of all."""
    names = sorted(known)
    return UserError(f"unknown {kind} {name!r}{did_you_mean(name, names)} (known: {', '.join(names)})")
