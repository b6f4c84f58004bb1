"""Where candidates come from: one interface to something that samples.

    sample(prefix, n, max_tokens) -> n sequences, independent draws of what follows the prefix

A sequence ends early where the text does. Here is a program as sampler, `endpoint` has one over
HTTP, `model_sampler` one with a model of our own.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from spu_llm.core.errors import InputError, PeerError
from spu_llm.systems.watermark.units import Content

ANSWER_S = 120.0
# Tokens that are asked for besides, one after the other, where those before made no character:
# three more make one of four tokens whole.
_MORE = (0, 3, 12)
_HALF = "\ufffd"  # stands for a part of a character
_MOST_BYTES = 1 << 26  # of an answer


class Drawn(NamedTuple):
    """A continuation of a prefix; `ended`: the text ends with it."""

    content: Content
    ended: bool


class Sampler(Protocol):
    """Content is of one kind, tokens or text, in all that goes in and comes out."""

    def sample(self, prefix: Content, n: int, max_tokens: int) -> Sequence[Drawn]:
        """Draw n candidates, each of the sampler's distribution, of up to `max_tokens` tokens of
        its own.
        """


def read_answer(data: bytes, n: int, who: str) -> list[Drawn]:
    """Return the n texts in a program's line. PeerError unless it holds them."""
    told = parsed(data, who)
    try:
        drawn = [Drawn(one["text"], one["ended"]) for one in told["sequences"]]
        good = all(type(text) is str and type(ended) is bool for text, ended in drawn)
    except (KeyError, TypeError):
        good = False
    if not good:
        raise PeerError(f'{who} must answer {{"sequences": [{{"text": ..., "ended": ...}}, ...]}}')
    if len(drawn) != n:
        raise PeerError(f"{who} was asked for {n} sequences and answered {len(drawn)}")
    return check_texts(drawn, who)


def parsed(data: bytes, who: str) -> Any:
    """Return what JSON holds. PeerError for something else."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise PeerError(f"{who} answered with what is no JSON") from None


def check_texts(drawn: list[Drawn], who: str) -> list[Drawn]:
    """Return `found`. Raise PeerError where a text is no Unicode."""
    try:
        for text, _ in drawn:
            str(text).encode()
    except UnicodeEncodeError:
        raise PeerError(f"{who} answered with text that is no Unicode") from None
    return drawn


def whole(
    draw: Callable[[int, int], list[Drawn]], n: int, max_tokens: int, who: str
) -> list[Drawn]:
    """Return n texts of whole characters. `draw(count, tokens)` gives texts that may end in the
    midst of one, as U+FFFD or with that part left out.

    The part is dropped, since no text can go on from it. Where nothing is left, as with one token a
    candidate, another text is drawn with more tokens; PeerError when that has none, either. So
    characters of several tokens come less often than the sampler writes them: a text has no way to
    say how half a character goes on.
    """
    drawn = [Drawn("", False)] * n
    for more in _MORE:
        missing = [i for i, one in enumerate(drawn) if not (one.content or one.ended)]
        if not missing:
            return drawn
        for i, one in zip(missing, draw(len(missing), max_tokens + more), strict=True):
            text = one.content
            assert isinstance(text, str)
            drawn[i] = one if one.ended else Drawn(text.rstrip(_HALF), False)
    if all(one.content or one.ended for one in drawn):
        return drawn
    raise PeerError(
        f"{who} gave no whole character in {max_tokens + _MORE[-1]} tokens; give a larger --chunk"
    )


class CommandSampler:
    """A program that reads a JSON object a line, {"prefix", "n", "max_tokens"}, and answers each
    with a line {"sequences": [{"text", "ended"}, ...]}.
    """

    def __init__(self, arguments: Sequence[str], answer_s: float = ANSWER_S) -> None:
        self._name, self._answer_s = f"the command {arguments[0]}", answer_s
        try:
            self._process = subprocess.Popen(
                list(arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        except OSError as exc:
            raise InputError(f"cannot start {arguments[0]}: {exc.strerror}") from None
        self._rest = b""

    def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
        return whole(
            lambda count, tokens: self._drawn(prefix, count, tokens), n, max_tokens, self._name
        )

    def _drawn(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
        line = json.dumps({"prefix": prefix, "n": n, "max_tokens": max_tokens}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except OSError:
            raise PeerError(f"{self._name} has ended{self._how()}") from None
        return read_answer(self._line(), n, self._name)

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        until = time.monotonic() + self._answer_s
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise PeerError(f"{self._name} has not answered for {self._answer_s:.0f} s")
                more = self._process.stdout.read(1 << 16)
                if not more:
                    raise PeerError(f"{self._name} has ended{self._how()}")
                self._rest += more
                if len(self._rest) > _MOST_BYTES:
                    raise PeerError(f"{self._name} answered with more than {_MOST_BYTES} bytes")
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _how(self) -> str:
        try:
            return f" with code {self._process.wait(1)}"
        except subprocess.TimeoutExpired:
            return ""

    def close(self) -> None:
        """End the program."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
