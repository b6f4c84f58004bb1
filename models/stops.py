"""Stop texts and stop tokens, which end a generated text: the option `--stop` of commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError


@dataclass(frozen=True)
class Stops:
    """Stop texts and stop tokens: a generated text ends before the first of them."""

    texts: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()

    @staticmethod
    def of(given: Sequence[str], tokenizer: Tokenizer | None) -> Stops:
        """Return the stops that the texts `given` mean to a tokenizer: the name of a special token
        is both this token and, where it is spelled out, this text. `tokenizer` None: texts only.
        InputError for a text that could never occur.
        """
        special = {} if tokenizer is None else tokenizer.special_tokens
        for text in given:
            check_text(text, "--stop")
            within = [name for name in special if name in text and name != text]
            if within and text not in special:
                raise InputError(
                    f"--stop {text!r} has the special token {max(within, key=len)} and more in it, "
                    "which is never text; give the token alone, what follows it is left out anyway"
                )
        tokens = frozenset(special[text] for text in given if text in special)
        return Stops(tuple(given), tokens)

    def first_in(self, text: str) -> int | None:
        """Return the position of the first stop text in `text`, None if there is none."""
        return min((at for stop in self.texts if (at := text.find(stop)) >= 0), default=None)

    def held(self, text: str) -> int:
        """Return the number of last characters of `text` that may begin a stop text."""
        beginnings = (stop[:n] for stop in self.texts for n in range(1, len(stop)))
        return max((len(part) for part in beginnings if text.endswith(part)), default=0)


NONE = Stops()


def check_text(text: str, name: str) -> None:
    """Raise InputError, which calls it `name`, when a text from the command line cannot be used."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid UTF-8 text; give it as UTF-8") from None
    if not text:
        raise InputError(f"{name} is empty; give at least one character of text")
