"""What an evaluation in an environment adds to its result: turns, what went wrong, what the environment measured, and each player's games.

The rows are those of `burnish.evaluation.completions.episode_row`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.evaluation.statistics import Estimate, mean_at_k

Row = dict[str, Any]


@dataclass(frozen=True)
class PlayerResult:
    """The games of one player of a game of several."""

    num_games: int
    """Games in which the player had a turn, without failed ones."""
    won: Estimate
    """Share of the games with a reward above 0."""
    drawn: Estimate
    """Share of the games with the reward 0."""
    reward: Estimate


@dataclass(frozen=True)
class EpisodeResult:
    """The episodes of an evaluation."""

    turns: float
    """Mean number of the model's turns. In a game of several players: of each player."""
    most_turns: int
    out_of_turns: float
    """Share of the episodes that `environment.max_turns` ended."""
    events: dict[str, int]
    """How often something went wrong, by kind."""
    metrics: dict[str, float]
    """Mean of each number that the environment measured, over the episodes that have it."""
    measured: dict[str, float]
    """Share of the episodes that have each of these numbers."""
    players: dict[str, PlayerResult] = field(default_factory=dict)
    """Only in a game of several players: by role."""


def summarise_episodes(rows: Sequence[Row]) -> EpisodeResult | None:
    """Summarise the rows of an environment; None if completions were not answered."""
    rows = [row for row in rows if "num_turns" in row]
    if not rows:
        return None
    counts = [row["num_turns"] for row in rows]
    events, measured = defaultdict[str, float](float), defaultdict[str, list[float]](list)
    for row in rows:
        for event in row["events"]:
            events[event["kind"]] += 1 / row.get("players", 1)  # the players of a game hold the same events
        for name, value in row["metrics"].items():
            measured[name].append(value)
    return EpisodeResult(
        turns=sum(counts) / len(counts),
        most_turns=max(counts),
        out_of_turns=sum(row["finish"] == "turns" for row in rows) / len(rows),
        events={kind: round(count) for kind, count in sorted(events.items())},
        metrics={name: sum(values) / len(values) for name, values in sorted(measured.items())},
        measured={name: len(values) / len(rows) for name, values in sorted(measured.items())},
        players=_players(rows),
    )


def _players(rows: Sequence[Row]) -> dict[str, PlayerResult]:
    by_role: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if "role" in row and row["reward"] is not None:
            by_role.setdefault(row["role"], {}).setdefault(row["id"], []).append(row["reward"])
    return {role: _player(list(groups.values())) for role, groups in sorted(by_role.items())}


def _player(groups: list[list[float]]) -> PlayerResult:
    return PlayerResult(
        num_games=sum(map(len, groups)),
        won=mean_at_k([[float(reward > 0) for reward in group] for group in groups]),
        drawn=mean_at_k([[float(reward == 0) for reward in group] for group in groups]),
        reward=mean_at_k(groups),
    )


def episode_lines(found: EpisodeResult) -> list[tuple[str, str]]:
    """Return the lines of the result text: names and values."""
    most = f"most {found.most_turns}"
    cut = f"; {found.out_of_turns:.1%} ran out of turns" if found.out_of_turns else ""
    lines = [("turns", f"{found.turns:.2f} on average ({most}{cut})")]
    for name, mean in found.metrics.items():
        share = found.measured[name]
        lines.append((f"  {name}", f"{mean:.3f}" + ("" if share == 1 else f" (in {share:.1%} of the episodes)")))
    if found.events:
        lines.append(("events", ", ".join(f"{kind} {count:,}" for kind, count in found.events.items())))
    return lines


def player_table(players: dict[str, PlayerResult]) -> str:
    """Return the table of a game's players: shares of won and drawn games, and the mean reward."""
    head = ["by role", "games", "won", "drawn", "lost", "mean reward"]
    body = [head]
    for role, one in players.items():
        lost = 1 - one.won.mean - one.drawn.mean
        reward = f"{one.reward.mean:.3f}  (95% interval {one.reward.low:.3f} to {one.reward.high:.3f})"
        shares = [f"{share:.3f}" for share in (one.won.mean, one.drawn.mean, abs(lost))]
        body.append([f"  {role}", f"{one.num_games:,}", *shares, reward])
    widths = [max(len(row[k]) for row in body) for k in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in body
    )


def episodes_json(found: EpisodeResult) -> dict[str, Any]:
    """Return the numbers as plain values."""

    def estimate(value: Estimate) -> dict[str, float]:
        return {"value": value.mean, "low": value.low, "high": value.high}

    return {
        "turns": found.turns,
        "most_turns": found.most_turns,
        "out_of_turns": found.out_of_turns,
        "events": found.events,
        "metrics": found.metrics,
        "players": {
            role: {
                "num_games": one.num_games,
                "won": estimate(one.won),
                "drawn": estimate(one.drawn),
                "reward": estimate(one.reward),
            }
            for role, one in found.players.items()
        },
    }
