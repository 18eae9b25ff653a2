"""The folder of a measurement, for tests of what lists it."""

from __future__ import annotations

import json
from pathlib import Path

CHART = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"/>'


def make_scaling(folder: Path, name: str = "toy") -> Path:
    """A measurement as `burnish eval --scaling` leaves it, but for the text of its page."""
    accuracy = {"mean": 0.5, "low": 0.4, "high": 0.6}
    point = {"strategy": "majority", "budget": 4, "estimate": "exact", "accuracy": accuracy, "tokens": 40.0}
    point |= {"times_one_answer": 4.0, "verifier_calls": 0.0, "verifier_tokens": None, "num_failed": 0, "wall_s": None}
    point |= {"cache_hit_rate": None, "is_oracle": False, "versus_majority": None}
    numbers = {"name": name, "model": "<m>", "num_questions": 5, "points": [point]}
    folder.mkdir(parents=True)
    found = numbers | {"envelope": [{"strategy": "majority", "budget": 4}]}
    (folder / "scaling.json").write_text(json.dumps(found))
    (folder / "scaling.svg").write_text(CHART)
    (folder / "scaling.html").write_text(f"<p>page of {name}")
    return folder
