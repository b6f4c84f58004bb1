"""A completion endpoint as sampler: OpenAI's, and what other servers make of it.

choices          of n some servers give one, others refuse more than one: the missing ones are
                 asked for in requests of their own, several at once
finish_reason    `length` where a text goes on; it ends with any other word (`stop`,
                 `eos_token`, `stop_sequence`, ...)
errors           the reason in the answer's body is shown
"""

from __future__ import annotations

import http
import json
import os
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any

from spu_llm.core.errors import InputError, PeerError
from spu_llm.core.printable import one_line
from spu_llm.systems.watermark.posting import ANSWER_S, AT_ONCE, Answer, Poster
from spu_llm.systems.watermark.sampler import Drawn, check_texts, parsed, whole
from spu_llm.systems.watermark.units import Content

KEY_VARIABLE = "SPU_LLM_API_KEY"
_GOES_ON = ("length", "max_tokens")
_BROKEN = ("abort", "error")
_REASON_CHARACTERS = 300


class HttpSampler:
    """Posts model, prompt, n, max_tokens and temperature to `url` (.../v1/completions). The
    variable SPU_LLM_API_KEY, if it is set, is sent as a bearer token. The texts' distribution is
    the endpoint's at that temperature, which is all that the mark keeps.
    """

    def __init__(
        self,
        url: str,
        model: str,
        temperature: float = 1.0,
        answer_s: float = ANSWER_S,
        on_wait: Callable[[str], None] = lambda why: None,
    ) -> None:
        headers = {"Content-Type": "application/json", **_authorization()}
        self._poster = Poster(url, headers, answer_s, on_wait)
        self._url, self._model, self._temperature = url, model, temperature
        self._most: int | None = None  # choices of an answer; None: as many as are asked for

    def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
        """Return n candidates. PeerError when the endpoint does not give them."""

        def draw(count: int, tokens: int) -> list[Drawn]:
            drawn: list[Drawn] = []
            while len(drawn) < count:
                drawn += self._drawn(prefix, count - len(drawn), tokens)
            return drawn

        return whole(draw, n, max_tokens, self._url)

    def close(self) -> None:
        """End the connections."""
        self._poster.close()

    def _drawn(self, prefix: Content, n: int, tokens: int) -> list[Drawn]:
        """Return one candidate or more, n at most."""
        if self._most is None:
            return self._answered(prefix, n, tokens)
        sizes = [min(self._most, n - i) for i in range(0, n, self._most)]
        if len(sizes) == 1:
            return self._answered(prefix, n, tokens)
        with ThreadPool(min(len(sizes), AT_ONCE)) as pool:
            answers = pool.imap(lambda size: self._answered(prefix, size, tokens), sizes)
            return [one for answer in answers for one in answer]

    def _answered(self, prefix: Content, n: int, tokens: int) -> list[Drawn]:
        body = {
            "model": self._model,
            "prompt": prefix,
            "n": n,
            "max_tokens": tokens,
            "temperature": self._temperature,
        }
        answer = self._poster.post(json.dumps(body).encode())
        if answer.status in (400, 422) and n > 1:
            drawn = self._answered(prefix, 1, tokens)  # where it is refused, too, for its reason
            self._most = 1
            return drawn
        if answer.status != 200:
            raise PeerError(f"{self._url} answered {answer.status}{_reason(answer)}")
        drawn = read_completion(answer.body, n, self._url)
        if len(drawn) < n:
            self._most = len(drawn)
        return drawn


def read_completion(data: bytes, n: int, who: str) -> list[Drawn]:
    """Return the texts in an endpoint's answer to a request for n. PeerError unless there are one
    to n.
    """
    told = parsed(data, who)
    try:
        choices = [(one["text"], one["finish_reason"]) for one in told["choices"]]
    except (KeyError, TypeError):
        raise _other_form(told, who) from None
    if not all(type(text) is str and type(why) in (str, type(None)) for text, why in choices):
        raise _other_form(told, who)
    if any(why in _BROKEN for _, why in choices):
        raise PeerError(f"{who} broke off a text")
    if not 1 <= len(choices) <= n:
        raise PeerError(f"{who} was asked for {n} texts and answered {len(choices)}")
    drawn = [Drawn(text, bool(why) and why not in _GOES_ON) for text, why in choices]
    return check_texts(drawn, who)


def _authorization() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{KEY_VARIABLE} holds what no header of HTTP can; set it again")
    return {"Authorization": f"Bearer {key}"}


def _other_form(told: Any, who: str) -> PeerError:
    reason = _told(told)
    if reason:
        return PeerError(f"{who} answered with an error: {reason}")
    return PeerError(f"{who} answers in another form than a completion's; give .../v1/completions")


def _reason(answer: Answer) -> str:
    """Return why a request was refused, as one line to follow the status: of the body's JSON, or
    its text, or what the status means.
    """
    text = answer.body.decode(errors="replace")
    try:
        reason = _told(json.loads(text))
    except (ValueError, RecursionError):
        reason = "" if text.lstrip().startswith("<") else _shown(text)  # a page, not a reason
    if not reason:
        try:
            reason = http.HTTPStatus(answer.status).phrase
        except ValueError:
            return ""
    return f": {reason}"


def _told(content: Any) -> str:
    """Return the message of an error as servers have it, "" where there is none."""
    for _ in range(4):  # {"error": {"message": ...}}, {"detail": [{"msg": ...}]}, ...
        if isinstance(content, list):
            content = next(iter(content), None)
        elif isinstance(content, dict):
            names = (name for name in ("error", "message", "detail", "msg") if content.get(name))
            content = content.get(next(names, ""))
    return _shown(content) if isinstance(content, str) else ""


def _shown(text: str) -> str:
    return one_line(text[:_REASON_CHARACTERS])
