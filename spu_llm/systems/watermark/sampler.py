"""Where candidates come from: one interface, and three ways to something that samples.

    sample(prefix, n, max_tokens) -> n sequences, independent draws of what follows the prefix

A sequence ends early where the text does. `model_sampler` has the one with a model of our own.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from spu_llm.core.errors import InputError, PeerError
from spu_llm.systems.watermark.units import Content

ANSWER_S = 120.0
KEY_VARIABLE = "SPU_LLM_API_KEY"
_MOST_BYTES = 1 << 26  # of an answer


class Drawn(NamedTuple):
    """What may follow a prefix; `ended`: and the text ends with it."""

    content: Content
    ended: bool


class Sampler(Protocol):
    """Content is of one kind, tokens or text, in all that goes in and comes out."""

    def sample(self, prefix: Content, n: int, max_tokens: int) -> Sequence[Drawn]:
        """n candidates, each of the sampler's law, of up to `max_tokens` tokens of its own."""


def read_answer(data: bytes, n: int, who: str) -> list[Drawn]:
    """A program's line. PeerError unless it holds n texts."""
    told = _parsed(data, who)
    try:
        found = [Drawn(one["text"], one["ended"]) for one in told["sequences"]]
        good = all(type(text) is str and type(ended) is bool for text, ended in found)
    except (KeyError, TypeError):
        good = False
    if not good:
        raise PeerError(f'{who} must answer {{"sequences": [{{"text": ..., "ended": ...}}, ...]}}')
    return _checked(found, n, who)


def read_completion(data: bytes, n: int, who: str) -> list[Drawn]:
    """An endpoint's answer. PeerError unless it holds n texts."""
    told = _parsed(data, who)
    try:
        found = [Drawn(one["text"], one["finish_reason"] == "stop") for one in told["choices"]]
        good = all(type(text) is str for text, _ in found)
    except (KeyError, TypeError):
        good = False
    if not good:
        raise PeerError(f"{who} answers in another form than a completion's")
    return _checked(found, n, who)


def _parsed(data: bytes, who: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise PeerError(f"{who} answered with what is no JSON") from None


def _checked(found: list[Drawn], n: int, who: str) -> list[Drawn]:
    if len(found) != n:
        raise PeerError(f"{who} was asked for {n} sequences and answered {len(found)}")
    try:
        for text, _ in found:
            str(text).encode()
    except UnicodeEncodeError:
        raise PeerError(f"{who} answered with text that is no Unicode") from None
    return found


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
        assert isinstance(prefix, str)
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


class HttpSampler:
    """A completion endpoint as OpenAI has it: POST `url` (.../v1/completions) with model, prompt,
    n, max_tokens, temperature. The variable SPU_LLM_API_KEY, if it is set, is sent as a bearer
    token. The texts' law is the endpoint's at that temperature, which is all that the mark keeps.
    """

    def __init__(
        self, url: str, model: str, temperature: float = 1.0, answer_s: float = ANSWER_S
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"an endpoint is http://... or https://..., not {url!r}")
        self._url, self._model, self._temperature = url, model, temperature
        self._answer_s = answer_s

    def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
        body = {
            "model": self._model, "prompt": prefix, "n": n, "max_tokens": max_tokens,
            "temperature": self._temperature,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        if os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {os.environ[KEY_VARIABLE]}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self._answer_s) as answer:
                data = answer.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError as exc:
            raise PeerError(f"{self._url} answered {exc.code} {exc.reason}") from None
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "reason", exc)
            raise PeerError(f"cannot reach {self._url}: {reason}") from None
        if len(data) > _MOST_BYTES:
            raise PeerError(f"{self._url} answered with more than {_MOST_BYTES} bytes")
        return read_completion(data, n, self._url)

    def close(self) -> None:
        pass
