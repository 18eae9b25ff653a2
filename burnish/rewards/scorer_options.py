"""What can be set of the reward part `model`, checked before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burnish.algorithms.steps import AGGREGATIONS
from burnish.config.errors import UserError
from burnish.config.plugins import check_options

DTYPES = ("float32", "bfloat16", "float64")
EACH = "each"
"""The aggregation that leaves the score of every step where the step ends."""


@dataclass(frozen=True)
class ScorerOptions:
    """Options of the reward part `model`."""

    path: str
    """A directory for sequence classification with one label, or of its adapters, relative to the recipe or to the working directory."""
    device: str = "auto"
    dtype: str = "float32"
    token_budget: int = 8192
    """Most tokens of one forward pass."""
    standardise: bool = False
    """Subtract the mean of its scores of held-out answers and divide by their standard deviation (`scores.json`)."""
    clip: float | None = None
    """Scores are cut to -clip..clip, after standardising."""
    delimiter: str | None = None
    """What stands between the steps of an answer, such as a blank line: each is scored at its end, as the chance 1 / (1 + exp(-score))
    that it is right, after standardising and clipping. Without one the answer is scored as a whole."""
    aggregate: str = "min"
    """The score of an answer from those of its steps: last, min, prod, mean; or each, which rewards every step at its last token."""

    @staticmethod
    def of(options: Mapping[str, Any], where: str) -> ScorerOptions:
        """From the options of a part; the error for what is wrong with them."""
        check_options(ScorerOptions, options, where)
        if not isinstance(options.get("path"), str):
            raise UserError(f"{where}: give options.path, the directory of a reward model")
        made = ScorerOptions(**options)
        if made.dtype not in DTYPES:
            raise UserError(f"{where}: dtype {made.dtype!r} is not one of {', '.join(DTYPES)}")
        if not isinstance(made.token_budget, int) or made.token_budget < 1:
            raise UserError(f"{where}: token_budget should be a whole number above 0, got {made.token_budget!r}")
        if made.clip is not None and not (isinstance(made.clip, int | float) and made.clip > 0):
            raise UserError(f"{where}: clip should be a number above 0, got {made.clip!r}")
        if made.delimiter is not None and not (isinstance(made.delimiter, str) and made.delimiter):
            raise UserError(f"{where}: delimiter should be a text, got {made.delimiter!r}")
        if made.aggregate not in (*AGGREGATIONS, EACH):
            raise UserError(f"{where}: aggregate {made.aggregate!r} is not one of {', '.join(AGGREGATIONS)}, {EACH}")
        if made.delimiter is None and "aggregate" in options:
            raise UserError(
                f"{where}: aggregate has no effect without delimiter, by which an answer is divided into steps"
            )
        return made
