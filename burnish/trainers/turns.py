"""What episodes of several turns looked like: their numbers, and who said what, for the tables of samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from burnish.core.trajectory import Trajectory
from burnish.models.tokenizer import Tokenizer


def turn_values(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns an episode, the share that wanted more of them than they may have, environments that failed; nothing of single turns."""
    counts, errors = [len(t.turns) for t in trajectories], sum(t.finish == "error" for t in trajectories)
    cut = sum(t.finish == "turns" for t in trajectories)
    if max(counts, default=0) < 2 and not errors and not cut:
        return {}
    return {
        "rollout/turns_mean": sum(counts) / len(counts),
        "rollout/turns_max": float(max(counts)),
        "rollout/out_of_turns": cut / len(counts),
        "rollout/environment_errors": float(errors),
    }


def dialogue(trajectory: Trajectory, tokenizer: Tokenizer) -> str | None:
    """What was said after the prompt, as JSON: who (model or environment), the text, of a turn its state and what it earned.

    None where there is but one turn and no state, so that the completion says it all.
    """
    turns = trajectory.turns
    if len(turns) < 2 and all(span.state is None for span in turns):
        return None
    sequence, said = trajectory.sequences[-1], list[dict[str, Any]]()
    ends = [span.start for span in turns[1:]] + [len(sequence.tokens)]
    for span, end in zip(turns, ends, strict=True):
        tokens, written = sequence.tokens[span.start : end], sequence.action_mask[span.start : end]
        own = {"who": "model", "text": tokenizer.decode(tokens[written].tolist()), "reward": span.reward}
        said.append(own | ({} if span.state is None else {"state": span.state}))
        if not written.all():
            said.append({"who": "environment", "text": tokenizer.decode(tokens[~written].tolist())})
    return json.dumps(said, ensure_ascii=False)
