"""Text from tokens as they come: only what no later token can change."""

from __future__ import annotations

from burnish.models.tokenizer import LONGEST_CHARACTER, PATIENCE, UNFINISHED, Tokenizer


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
        if self.tokenizer.is_special(token):  # decoding leaves it out
            return ""
        self._tokens.append(token)
        text = self.tokenizer.decode(self._tokens)
        if not text.endswith(UNFINISHED):
            return self._show(text, len(self._tokens))
        if len(self._tokens) - self._num_shown > PATIENCE:  # bytes that are no text: what is old enough stays as it is
            early = len(self._tokens) - LONGEST_CHARACTER
            part = self.tokenizer.decode(self._tokens[:early])
            return self._show(part, early) if text.startswith(part) else ""
        return ""

    def finish(self) -> str:
        """What is left: the bytes of a character that never came to its end, as the decoder writes them."""
        return self._show(self.tokenizer.decode(self._tokens), len(self._tokens))

    def _show(self, text: str, count: int) -> str:
        """What is new in the text of the first `count` tokens."""
        new = text[len(self._shown) :]
        if new:  # a token without text is no context: the next word would lose its space behind it
            context = self._tokens[self._num_shown : count]
            self._tokens = context + self._tokens[count:]
            self._num_shown = len(context)
            self._shown = self.tokenizer.decode(context)
        return new
