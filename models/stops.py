"""Where a text ends because somebody asked for it: `--stop`, in every command that has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError


@dataclass(frozen=True)
class Stops:
    """Ends of a text: it ends before any of `texts` in it, and before any of `tokens`, which are
    special ones without a text.
    """

    texts: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()

    @staticmethod
    def of(given: Sequence[str], tokenizer: Tokenizer | None) -> Stops:
        """Return what `given` means to a tokenizer: the name of a special token is that token, and
        also what stands there if it is spelled out. None: of what gives text alone. InputError for
        what could never be met.
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
        """Return where the first of the texts begins, if there is one."""
        return min((at for stop in self.texts if (at := text.find(stop)) >= 0), default=None)

    def held(self, text: str) -> int:
        """Return how many of the last characters may begin one of the texts."""
        beginnings = (stop[:n] for stop in self.texts for n in range(1, len(stop)))
        return max((len(part) for part in beginnings if text.endswith(part)), default=0)


NONE = Stops()


def check_text(text: str, name: str) -> None:
    """Raise InputError, which names it, when a text from the command line cannot be used."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid UTF-8 text; give it as UTF-8") from None
    if not text:
        raise InputError(f"{name} is empty; give at least one character of text")
