"""Text from tokens as they come: only what no later token can change."""

from __future__ import annotations

from burnish.models.tokenizer import UNFINISHED, Tokenizer


class TextStream:
    """Decodes one completion token by token; what `push` and `finish` give, joined, is the decoded whole.

    A character whose bytes are spread over several tokens waits for its last one. Tokens are decoded behind the last
    ones shown, because decoders drop the space before a text's first word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []  # those shown last, then those not shown yet
        self._num_shown = 0
        self._shown = ""

    def push(self, token: int) -> str:
        """The text this token completes, perhaps none."""
        self._tokens.append(token)
        text = self.tokenizer.decode(self._tokens)
        return "" if text.endswith(UNFINISHED) else self._show(text)

    def finish(self) -> str:
        """What is left: the bytes of a character that never came to its end, as the decoder writes them."""
        return self._show(self.tokenizer.decode(self._tokens))

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:  # a token without text (markup) is no context: the next word would lose its space behind it
            self._tokens = self._tokens[self._num_shown :]
            self._num_shown = len(self._tokens)
            self._shown = self.tokenizer.decode(self._tokens)
        return new
