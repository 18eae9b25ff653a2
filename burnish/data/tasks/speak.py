"""Text to speech over the codes of a codec, with a recogniser as the reward: `batok>` is answered by some fifteen codes.

It is the task of Llasa trained with RL (Ye et al. 2025, 2502.04128; recipes/llasa_tts.yaml) in small. The codec and the recogniser are
written here, and every answer becomes a waveform between them:

- The codec has a code for each pair of two tones (the formants of a voice), 16 x 16 of them. A code is a frame of 20 ms at 8 kHz.
- The recogniser cuts a waveform into frames and finds the strongest tone of each of the two bands. The nearest letter is the frame's.
  A letter must last two frames to be heard. A held letter is one letter; silence ends it.

The reward is 1 - tanh(3 CER), where CER is the character error rate of what the recogniser heard. Words alternate consonants and vowels,
so no letter follows itself. A hash of the word decides the split.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.data.codes import PATTERNS, read_codes, write_codes
from burnish.data.row import Row
from burnish.data.tasks.task import Dice, check_span, first_on_split

if TYPE_CHECKING:
    import numpy as np

SPEAK = "speak"
VOWELS, CONSONANTS = "aeiou", "bdgklmnprst"
LETTERS = VOWELS + CONSONANTS
SIDE = 4
"""Letters stand in a square of this side: row by the low tone, column by the high tone."""

RATE = 8000
FRAME = 160
BINS_OF_LOW = range(5, 21)  # 250 to 1000 Hz
BINS_OF_HIGH = range(24, 72, 3)  # 1200 to 3450 Hz
SILENCE = 0
"""The code of silence; the pair of the two lowest tones is no letter."""
QUIET = 0.05
"""A frame below this amplitude is silence."""
MIN_FRAMES = 2
MOST_HEARD = 4
"""A recogniser stops after this many times the letters that were asked for, so that the error rate is bounded."""
CER_SLOPE = 3.0


def decode_codes(codes: list[int]) -> np.ndarray:
    """Return the waveform of codes: a frame with two tones for each, float32 [frames * FRAME]."""
    import numpy as np

    time = np.arange(FRAME) / FRAME
    frames = np.zeros((len(codes), FRAME), dtype=np.float32)
    for index, code in enumerate(codes):
        if code != SILENCE:
            low, high = divmod(code, len(BINS_OF_HIGH))
            tones = (0.5, BINS_OF_LOW[low]), (0.3, BINS_OF_HIGH[high])
            frames[index] = sum(loudness * np.sin(2 * np.pi * bin_ * time) for loudness, bin_ in tones)
    return frames.reshape(-1)


def encode_waveform(waveform: np.ndarray) -> list[int]:
    """Return the code of each whole frame of a waveform: its strongest tone in each band."""
    import numpy as np

    frames = waveform[: len(waveform) // FRAME * FRAME].reshape(-1, FRAME)
    spectrum = np.abs(np.fft.rfft(frames, axis=1)) * 2 / FRAME  # amplitudes by multiples of 50 Hz
    low = spectrum[:, list(BINS_OF_LOW)]
    high = spectrum[:, list(BINS_OF_HIGH)]
    codes = low.argmax(axis=1) * len(BINS_OF_HIGH) + high.argmax(axis=1)
    return [int(code) for code in np.where(low.max(axis=1) < QUIET, SILENCE, codes)]


def recognise(waveform: np.ndarray) -> str:
    """Return the letters that are heard in a waveform."""
    heard = (None if code == SILENCE else _nearest_letter(code) for code in encode_waveform(waveform))
    runs = ((letter, sum(1 for _ in run)) for letter, run in itertools.groupby(heard))
    return "".join(letter for letter, length in runs if letter is not None and length >= MIN_FRAMES)


def _nearest_letter(code: int) -> str:
    low, high = divmod(code, len(BINS_OF_HIGH))
    return LETTERS[low // SIDE * SIDE + high // SIDE]


def edit_distance(first: str, second: str) -> int:
    """Return how many letters must be inserted, removed or replaced to make one text the other (Levenshtein)."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        corner, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (a != b))
    return row[-1]


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """Return 1 - tanh(3 CER) of what the recogniser hears; 0 if the completion is not all codes of the codec."""
    codes = read_codes(completion)
    if not codes or max(codes) >= len(PATTERNS):
        return 0.0
    heard = recognise(decode_codes(codes))[: MOST_HEARD * len(answer)]
    return 1 - math.tanh(CER_SLOPE * edit_distance(heard, answer) / len(answer))


class Speak:
    """Words of `min_letters` to `max_letters` letters, every length equally often."""

    name = SPEAK
    alphabet = LETTERS + ">" + PATTERNS
    score = staticmethod(score)

    def __init__(self, seed: int, min_letters: int = 2, max_letters: int = 5) -> None:
        check_span(SPEAK, "letters", min_letters, max_letters, least=2, most=32)
        self.seed, self.min_letters, self.max_letters = seed, min_letters, max_letters

    def row(self, split: str, index: int) -> Row:
        """The index-th word of a split."""
        word = self._word(split, self.seed, SPEAK, split, index)
        return Row(f"{SPEAK}/{split}/{index}", f"{word}>", SPEAK, word, {"task": SPEAK, "length": len(word)})

    def demonstrations(self, num: int = 2000, seed: int = 0, swallowed: float = 0.3) -> list[dict[str, str]]:
        """Words of the train split as a careless speaker says them: each letter is swallowed with the chance `swallowed`.

        A letter lasts two or three frames, each of any of the letter's 16 codes. A swallowed one lasts one frame and is not heard.
        """
        if not 0 <= swallowed < 1:
            raise UserError(f"{SPEAK}: swallowed should be a chance of at least 0 and below 1, got {swallowed!r}")
        rows = []
        for index in range(num):
            word = self._word("train", seed, SPEAK, "demonstrations", index)
            dice = Dice(seed, SPEAK, "speaker", index)
            codes = [code for letter in word for code in _spoken(letter, swallowed, dice)]
            rows.append({"prompt": f"{word}>", "completion": write_codes(codes)})
        return rows

    def _word(self, split: str, *key: int | str) -> str:
        length = Dice(*key).between(self.min_letters, self.max_letters)

        def propose(attempt: int) -> tuple[str, str]:
            dice = Dice(*key, attempt)
            kinds = (CONSONANTS, VOWELS) if dice.unit() < 0.5 else (VOWELS, CONSONANTS)
            word = "".join(kinds[i % 2][dice.between(0, len(kinds[i % 2]) - 1)] for i in range(length))
            return f"{SPEAK} {word}", word

        return first_on_split(split, propose, SPEAK)


def _spoken(letter: str, swallowed: float, dice: Dice) -> list[int]:
    """Codes of a letter."""
    low, high = (SIDE * place for place in divmod(LETTERS.index(letter), SIDE))
    length = 1 if dice.unit() < swallowed else dice.between(MIN_FRAMES, MIN_FRAMES + 1)
    codes: list[int] = []
    while len(codes) < length:
        code = (low + dice.between(0, SIDE - 1)) * len(BINS_OF_HIGH) + high + dice.between(0, SIDE - 1)
        if code != SILENCE:
            codes.append(code)
    return codes
