"""`AxisRotation`: rotary positions of pictures with three axes, as fields of an architecture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AxisRotation:
    """Rotary positions with three axes (M-RoPE, 2409.12191): time, row and column of a picture's token."""

    sections: tuple[int, int, int]
    """Number of frequencies that turn with time, row and column; their sum is half of a head's dimensions."""
    is_interleaved: bool = False
    """Whether the axes alternate (Qwen3-VL) instead of having contiguous sections (Qwen2.5-VL)."""
    tokens_per_second: float | None = None
    """Positions along the time axis in a second of video; None counts frames."""
