"""Discrete codes as text: the tokens of an audio codec, the bins of a robot's action.

A policy over codes is a language model whose vocabulary has a token for each code. What rewards, environments and reports read is the
text of its tokens. Two spellings are read here:

- `<|s_17|>`, as the speech tokens of Llasa (Ye et al. 2025, 2502.04128) are named; any prefix of letters and underscores may stand for `s`;
- one Braille pattern a code, `⠀` (0) to `⣿` (255), for tokenizers of single characters, which `model.new` makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from burnish.config.errors import UserError

NUM_PATTERNS = 256
FIRST_PATTERN = 0x2800
PATTERNS = "".join(chr(FIRST_PATTERN + code) for code in range(NUM_PATTERNS))
"""The Braille patterns of the codes 0 to 255."""
CODE = re.compile(r"<\|[A-Za-z_]+?_?(\d+)\|>|([\u2800-\u28ff])")


def write_codes(codes: Iterable[int]) -> str:
    """Return codes below 256 as Braille patterns."""
    written = list(codes)
    wrong = next((code for code in written if not 0 <= code < NUM_PATTERNS), None)
    if wrong is not None:
        raise UserError(
            f"code {wrong} has no Braille pattern: there are {NUM_PATTERNS} of them, 0 to {NUM_PATTERNS - 1}"
        )
    return "".join(PATTERNS[code] for code in written)


def read_codes(text: str) -> list[int] | None:
    """Return the codes of a text in either spelling; None if it holds anything else but blanks."""
    if CODE.sub("", text).strip():
        return None
    return [int(named) if named else ord(pattern) - FIRST_PATTERN for named, pattern in CODE.findall(text)]
