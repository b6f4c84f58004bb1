"""Text as it comes token by token: what is certain of it is shown, and it ends where it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from models.stops import Stops
from models.tokenizer import StreamDecoder, Tokenizer

# on_text(text, drafted): further text, the first so many characters of which were drafted.
OnText = Callable[[str, int], None]


class Emitted:
    """`tokens` so far and their `text`; `finish_reason` is "eos", "stop", "length" or "interrupted"
    in the end.

    `on_text` receives text as soon as no stop can take it back. `begins`: the text does not go on
    after the prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Stops, on_text: OnText, begins: bool = False
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self._tokenizer, self._stops, self._on_text = tokenizer, stops, on_text
        self._decoder = StreamDecoder(tokenizer, begins=begins)
        self._shown = 0
        self._drafted = 0  # where the text of the last drafts ends

    def add(self, tokens: Sequence[int], limit: int, drafted: int = 0) -> None:
        """Take further tokens, the first `drafted` of them drafts, up to the end of the text, which
        has `limit` tokens at most.
        """
        for number, token in enumerate(tokens):
            if not self.finish_reason:
                self._take(token, limit)
            if number < drafted:
                self._drafted = len(self.text)
        held = 0 if self.finish_reason else self._stops.held(self.text)
        self._show(len(self.text) - held)

    def interrupt(self) -> None:
        """End the text where it is, unless it has ended."""
        if not self.finish_reason:
            self._finish("interrupted")
            self._show(len(self.text))

    def _take(self, token: int, limit: int) -> None:
        if token in self._tokenizer.eos_ids:
            self._finish("eos")
        elif token in self._stops.tokens:
            self._finish("stop")
        else:
            self.tokens.append(token)
            self.text += self._decoder.push([token])
            if self._cut():
                self.finish_reason = "stop"
            elif len(self.tokens) >= limit:
                self._finish("length")

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self.text += self._decoder.finish()
        self._cut()

    def _cut(self) -> bool:
        """Cut the text before the first stop in it; return whether there was one."""
        at = self._stops.first_in(self.text)
        self.text = self.text[:at]
        return at is not None

    def _show(self, end: int) -> None:
        if end > self._shown:
            drafted = max(0, min(self._drafted, end) - self._shown)
            self._on_text(self.text[self._shown : end], drafted)
            self._shown = end
