"""Text as it comes token by token: what is certain of it is shown, and it ends where it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from models.tokenizer import StreamDecoder, Tokenizer


class Emitted:
    """`tokens` so far and their `text`; `finish_reason` is "eos", "stop" or "length" in the end.

    `on_text` receives text as soon as no stop string can take it back.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], on_text: Callable[[str], None]
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self._tokenizer, self._stop, self._on_text = tokenizer, stop, on_text
        self._decoder = StreamDecoder(tokenizer)
        self._shown = 0

    def add(self, tokens: Sequence[int], limit: int) -> None:
        """Further tokens, up to the end of the text, which has `limit` tokens at most."""
        for token in tokens:
            if token in self._tokenizer.eos_ids:
                self.finish_reason = "eos"
                break
            self.tokens.append(token)
            self.text += self._decoder.push([token])
            if self._cut_at_stop():
                self.finish_reason = "stop"
                break
            if len(self.tokens) >= limit:
                self.finish_reason = "length"
                break
        if self.finish_reason and self.finish_reason != "stop":
            self.text += self._decoder.finish()
            self._cut_at_stop()
        self._show(len(self.text) if self.finish_reason else self._certain())

    def _cut_at_stop(self) -> bool:
        found = [i for s in self._stop if (i := self.text.find(s)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _certain(self) -> int:
        """Length of text that no stop string can still take back."""
        held = 0
        for s in self._stop:
            for n in range(1, len(s)):
                if self.text.endswith(s[:n]):
                    held = max(held, n)
        return len(self.text) - held

    def _show(self, end: int) -> None:
        if end > self._shown:
            self._on_text(self.text[self._shown : end])
            self._shown = end
