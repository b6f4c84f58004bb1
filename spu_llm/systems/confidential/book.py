"""The user's book of secrets: what was hidden among what, and what repeating it gives away.

The same prompt twice must bring the same fakes, or their sets intersect in the own one. The same
secret in *another* prompt must bring the same candidates too; then whoever sees both weighs each
candidate c by both texts. If these are texts of the public model P that share the secret and
nothing else, the posterior after prompts t_1, ..., t_k is, up to factors below e^eta
(`spu_llm.systems.confidential.obfuscation`: the first draw has made it even),

    Pr[c] ~ P(t_2(c)) ... P(t_k(c)),

which the book keeps, a factor for each different prompt. Where the *largest* of it over all
candidates passes the limit, which does not depend on which one is the own, nothing is sent. A
candidate that would change the number of tokens in the next prompt is no candidate from then on.

A book is a folder that its owner alone can read: a key, from which all draws follow, and a JSON
file with the secrets themselves. Without one, fakes are drawn anew each time and repeats are not
accounted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spu_llm.core.errors import InputError
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.systems.confidential.obfuscation import (
    Limits,
    Public,
    TooFewError,
    alike,
    filled,
    log_probabilities,
    shuffled,
    typed,
)
from spu_llm.systems.confidential.spans import Prompt

_KEY, _SECRETS = "key", "secrets.json"


@dataclass
class Secret:
    """A secret (a text for each of its spans) and those it was hidden among: `candidates`, the own
    one first. log: of each one's posterior, up to a constant; None where it is a candidate no more.
    prompts: digests of those that are in it.
    """

    candidates: list[list[str]]
    log: list[float | None]
    prompts: list[str]


class Book:
    """Draws fakes and keeps account. folder: None keeps the account in this process alone.
    InputError for a folder that cannot be used.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._secrets: list[Secret] = []
        self._key = os.urandom(KEY_BYTES) if folder is None else _key_in(folder)

    def rows(self, public: Public, prompt: Prompt, limits: Limits) -> tuple[list[Any], int]:
        """Tokens int32 [n] of the prompt and of fakes, in a secret order, and where the prompt is.
        Entered before it is returned. InputError where nothing may be sent: too few fakes, or a
        secret that was sent too often.
        """
        with self._open():
            own = [prompt.marked.text[span.start : span.stop] for span in prompt.marked.redacted]
            context = _digest(filled(prompt, ["\0"] * len(own)))
            prg = Prg(self._key).child(_digest(context, *own))
            known = [secret for secret in self._secrets if secret.candidates[0] == own]
            if known:
                rows = self._again(public, prompt, known[0], context, limits)
            else:
                rows = self._first(public, prompt, own, context, limits, prg)
        return shuffled(list(rows), prg.child("order"))

    def _first(
        self, public: Public, prompt: Prompt, own: list[str], context: str, limits: Limits,
        prg: Prg,
    ) -> np.ndarray:  # fmt: skip
        used = {word for secret in self._secrets for word in secret.candidates[0]}
        if used & set(own):
            raise InputError(
                "a redacted span was sent before, with other spans: both prompts together would "
                "tell which one was meant; redact the same spans as then, or leave it out"
            )
        rows = alike(public, prompt, prg, limits)
        candidates = [typed(public.tokenizer, prompt, row) for row in rows]
        even: list[float | None] = [0.0] * len(rows)
        self._secrets.append(Secret([c for c in candidates if c is not None], even, [context]))
        return rows

    def _again(
        self, public: Public, prompt: Prompt, secret: Secret, context: str, limits: Limits
    ) -> np.ndarray:
        """The same candidates; those that do not fit this prompt drop out."""
        encode = public.tokenizer.encode
        texts = [encode(filled(prompt, candidate)) for candidate in secret.candidates]
        left = [
            i for i, text in enumerate(texts)
            if secret.log[i] is not None and _fits(prompt, text, public)
        ]  # fmt: skip
        rows = np.array([texts[i] for i in left], np.int32)
        before = [secret.log[i] or 0.0 for i in left]
        log = np.array(before)
        if context not in secret.prompts:
            log = log + log_probabilities(public, prompt, rows)
        if len(left) - 1 < limits.fewest:
            raise TooFewError(len(left) - 1, limits.fewest)
        weights = np.exp(log - log.max())  # the largest: 1
        others = (weights.sum() - 1) * math.exp(-limits.eta)
        most, limit = 1 / (1 + others), limits.bound(limits.fewest)
        if most > limit:
            raise InputError(
                f"this secret was sent before; together with this prompt a guess would reach "
                f"{most:.2f}, above the limit of {limit:.2f} (--min-fakes, --eta), so nothing was "
                "sent"
            )
        for i in range(len(texts)):
            secret.log[i] = float(log[left.index(i)]) if i in left else None
        secret.prompts = sorted({*secret.prompts, context})
        return rows

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Reads the folder, and writes it when nothing failed; one process at a time."""
        if self._folder is None:
            yield
            return
        path = self._folder / _SECRETS
        with open(self._folder / _KEY, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._secrets = _read(path)
            yield
            _write(path, json.dumps([asdict(secret) for secret in self._secrets]).encode())


def _fits(prompt: Prompt, text: list[int], public: Public) -> bool:
    """Whether tokens are as many as the prompt's, with the same ones outside of spans."""
    if len(text) != len(prompt.tokens):
        return False
    return typed(public.tokenizer, prompt, np.array(text)) is not None


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _key_in(folder: Path) -> bytes:
    """The key of a book, which is made where there is none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            raise InputError(
                f"others can read {folder}, which is to hold secrets; chmod 700 it"
            )
        path = folder / _KEY
        if not path.exists():
            _write(path, os.urandom(KEY_BYTES))
        key = path.read_bytes()
    except OSError as exc:
        raise InputError(f"{folder} cannot be used for secrets: {exc.strerror}") from None
    if len(key) != KEY_BYTES:
        raise InputError(f"{path} is not a key; give another folder")
    return key


def _read(path: Path) -> list[Secret]:
    try:
        return [Secret(**entry) for entry in json.loads(path.read_text())] if path.exists() else []
    except (OSError, ValueError, TypeError):
        raise InputError(f"{path} cannot be read; what it accounts for would be lost") from None


def _write(path: Path, data: bytes) -> None:
    """As a whole or not at all, for the owner's eyes."""
    part = path.with_suffix(".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
    part.replace(path)
