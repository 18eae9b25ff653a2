"""Agents for tests of whole runs. They use no package, so that their processes start fast."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from typing import Any


def ask(base_url: str, api_key: str, path: str = "/completions", before: float | None = None, **body: Any) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + api_key}
    headers |= {} if before is None else {"X-Reward": str(before)}
    data = json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(base_url + path, data, headers)) as answer:
        return json.load(answer)


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def chain(row: Any, base_url: str, api_key: str) -> float:
    """Two calls, of which the second continues the first."""
    text = row["prompt"]
    for turn in range(2):
        text += text_of(ask(base_url, api_key, prompt=text)) + f"{turn}>"
    return float(len(text) % 5) / 4


def branches(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """A dialogue of two calls and a call beside it, with a reward for each; the episode itself earns 1."""
    first = ask(base_url, api_key, prompt=row["prompt"])
    beside = ask(base_url, api_key, prompt="7>", before=0.5)  # the header rewards the first answer
    ask(base_url, api_key, "/rewards", id=beside["id"], reward=-float(len(text_of(beside)) % 3))
    ask(base_url, api_key, prompt=row["prompt"] + text_of(first) + "9>")
    return {"reward": 1.0, "success": True, "metrics": {"looked": 2}}


def sorts(row: Any, base_url: str, api_key: str, gives: str = "nothing") -> Any:
    """Leaves the reward to the config. A call that no other continues comes last."""
    first = text_of(ask(base_url, api_key, prompt=row["prompt"]))
    ask(base_url, api_key, prompt=row["prompt"] + first + "9>")
    ask(base_url, api_key, prompt="3>")
    return {"answer": row["answer"]} if gives == "answer" else None


def silent(row: Any) -> float:
    return 1.0


def leaves_a_mark(row: Any, base_url: str, api_key: str) -> float:
    """Says where it is, and waits for the end of the run."""
    ask(base_url, api_key, prompt=row["prompt"])
    with open(os.path.join(os.path.dirname(__file__), f"pid-{os.getpid()}"), "w"):
        pass
    time.sleep(1000)
    return 1.0
