"""Where sampler and trainer disagree: profiles of the log-prob gap by position and by probability.

The profiles are metrics such as `mismatch/by_position/3/abs`; a bucket is named by its lower bound. A run without them has no
such charts on its page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from burnish.report.run_files import Series

PROFILE_METRIC = r"mismatch/by_(position|probability)/([^/]+)/(abs|signed|tokens)"
PROFILE_TITLES = {
    "position": "Mean log-prob gap by position in the completion",
    "probability": "Mean log-prob gap by the sampler's probability",
}
MAX_AXIS_LABELS = 10  # names that fit under an axis


def is_profile(name: str) -> bool:
    """Whether a metric is one bucket of a profile. `profile_charts` shows those."""
    return re.fullmatch(PROFILE_METRIC, name) is not None


def profile_charts(series: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Return one chart per profile: the mean |gap| of each bucket, at the first and the last step that have the profile.

    A chart has a `title`, `series` of [place, value], the `places` under its axis, and a `hint` for each place.
    """
    charts = []
    for kind, title in PROFILE_TITLES.items():
        buckets = _buckets(series, kind)
        steps = [step for values in buckets.values() if "abs" in values for step in values["abs"]]
        if not steps:
            continue
        shown = dict.fromkeys((min(steps), max(steps)))
        ends = sorted(
            (end for end, values in buckets.items() if shown.keys() & values.get("abs", {}).keys()), key=float
        )
        lines = {
            f"step {step}": [
                [place, buckets[end]["abs"][step]] for place, end in enumerate(ends) if step in buckets[end]["abs"]
            ]
            for step in shown
        }
        last = max(steps)
        hints = [
            f"{_bucket_text(kind, end)}: {buckets[end].get('tokens', {}).get(last, 0):,.0f} tokens" for end in ends
        ]
        charts.append({"title": title, "series": lines, "places": _axis_labels(ends), "hints": hints})
    return charts


def _buckets(series: Mapping[str, Series], kind: str) -> dict[str, dict[str, dict[int, float]]]:
    """Return the values of one profile by bucket, figure (abs, signed, tokens) and step."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for name, line in series.items():
        if (match := re.fullmatch(PROFILE_METRIC, name)) and match[1] == kind:
            found.setdefault(match[2], {})[match[3]] = dict(zip(line.steps, line.values, strict=True))
    return found


def _axis_labels(ends: list[str]) -> list[str]:
    """Return the labels under the axis. If there are many, every second one is empty."""
    return [end if len(ends) <= MAX_AXIS_LABELS or k % 2 == 0 else "" for k, end in enumerate(ends)]


def _bucket_text(kind: str, end: str) -> str:
    """Describe a bucket in words."""
    low = float(end)
    if kind == "position":
        return f"position {end}" if low == 0 else f"positions {end} to {2 * int(end)}"
    return f"probability {low:g} to {10 * low:g}" if low else "probability below 1e-06"
