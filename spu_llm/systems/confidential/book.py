"""The user's book of secrets: what was hidden among what, and what repeating it gives away.

The same prompt twice must bring the same fakes, or their sets intersect in the own one. The same
secret in *another* prompt must bring the same candidates too; then whoever sees both weighs each
candidate c by both texts. What the weights are depends on what is assumed of the two texts, so the
book takes the worst of it: with l_j(c) the log-probability of prompt j with c in it, candidate c is
at most e^x times as likely as c', where

    x = eta + |l_0(c) - l_0(c')| + sum over j > 0 of max(0, l_j(c) - l_j(c')).

The first draw has made candidates even, up to eta, for who has seen the first prompt; if that never
went out, or is what the secret's own frequency is judged by, the second term is what is missing.
The others are later prompts, seen or not. A guess then reaches at most

    most = max over c of 1 / (1 + sum over c' of e^-x),

which does not depend on which one is the own. Above the limit nothing is sent. A candidate that
would change tokens around the secret in the next prompt is no candidate from then on.

A book is a folder that its owner alone can read: a key, from which all draws follow, and a JSON
file with the secrets themselves. Without one, fakes are drawn anew each time and repeats are not
accounted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spu_llm.core.errors import InputError
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.offline.durable import create, replace_whole
from spu_llm.systems.confidential.obfuscation import (
    Limits,
    Public,
    TooFewError,
    alike,
    around,
    log_probabilities,
    sent_with,
    shuffled,
    stand_clear,
    typed,
)
from spu_llm.systems.confidential.spans import Prompt

_KEY, _SECRETS = "key", "secrets.json"


@dataclass
class Secret:
    """A secret (a text for each of its spans) and those it was hidden among: `candidates`, the own
    one first, drawn with `eta` by the public model `model`. prompts: of each that has the secret in
    it, by digest and in order, the log-probability with each candidate; None: it does not fit.
    """

    candidates: list[list[str]]
    eta: float
    model: str
    prompts: dict[str, list[float | None]]

    def left(self) -> list[int]:
        """Return the numbers of the candidates that fit everywhere."""
        rows = self.prompts.values()
        return [i for i in range(len(self.candidates)) if all(row[i] is not None for row in rows)]

    def most(self) -> float:
        """Return what a guess reaches at most."""
        left = self.left()
        first, *later = (np.array([row[i] for i in left], float) for row in self.prompts.values())
        x = np.full((len(left), len(left)), self.eta)
        if later:
            x += np.abs(first[:, None] - first)
        for logs in later:
            x += np.maximum(0, logs[:, None] - logs)
        np.fill_diagonal(x, 0)
        return float((1 / np.exp(-x).sum(axis=1)).max())


class Book:
    """Draws fakes and keeps account. folder: None keeps the account in this process alone.
    InputError for a folder that cannot be used.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._secrets: list[Secret] = []
        self._key = os.urandom(KEY_BYTES) if folder is None else key_in(folder)

    def rows(self, public: Public, prompt: Prompt, limits: Limits) -> tuple[list[Any], int, float]:
        """Return tokens int32 [n] of the prompt and of fakes, in a secret order; where the prompt
        is; what a guess reaches at most. Entered before it is returned. InputError where nothing
        may be sent: too few fakes, a secret that was sent too often, or that stands in the clear,
        too.
        """
        own = [prompt.marked.text[span.start : span.stop] for span in prompt.marked.redacted]
        if stand_clear(prompt, own):
            raise InputError("a redacted text stands outside of its span, too; redact it there")
        with self._open():
            context = _digest(around(prompt))
            prg = Prg(self._key).child(_digest(context, *own))
            known = [secret for secret in self._secrets if secret.candidates[0] == own]
            if known:
                rows, most = self._again(public, prompt, known[0], context, limits)
            else:
                rows, most = self._first(public, prompt, own, context, limits, prg)
        # A stream for each set: the order of one says nothing of the order of another.
        which = _digest(*sorted(row.tobytes().hex() for row in rows))
        return *shuffled(list(rows), prg.child(f"order of {which}")), most

    def _first(
        self, public: Public, prompt: Prompt, own: list[str], context: str, limits: Limits, prg: Prg
    ) -> tuple[np.ndarray, float]:
        used = [word for secret in self._secrets for word in secret.candidates[0]]
        if any(_is_alike(word, other) for word in own for other in used):
            raise InputError(
                "a redacted text, or one like it, was sent before, with other spans or spelt "
                "otherwise: both prompts together would tell which one was meant; redact the same "
                "as then, or leave it out"
            )
        rows = alike(public, prompt, prg, limits)
        candidates = [typed(public.tokenizer, prompt, row) for row in rows]
        secret = Secret(
            [words for words in candidates if words is not None],
            limits.eta,
            public.digest,
            {context: log_probabilities(public, prompt, rows).tolist()},
        )
        self._secrets.append(secret)
        return rows, secret.most()

    def _again(
        self, public: Public, prompt: Prompt, secret: Secret, context: str, limits: Limits
    ) -> tuple[np.ndarray, float]:
        """Hide a secret that was sent before among its candidates of then; those that do not fit
        this prompt drop out.
        """
        if secret.model != public.digest:
            raise InputError(
                "this secret was hidden with another public model; give that one (--draft-model)"
            )
        texts = [sent_with(public.tokenizer, prompt, words) for words in secret.candidates]
        entered = replace(secret, prompts=dict(secret.prompts))
        if context not in entered.prompts:
            fit = np.array([text for text in texts if text is not None], np.int32)
            logs = iter(log_probabilities(public, prompt, fit).tolist() if len(fit) else [])
            entered.prompts[context] = [None if t is None else next(logs) for t in texts]
        left = entered.left()
        if 0 not in left:
            raise InputError("this secret cannot stand where it does here; put text around it")
        if len(left) - 1 < limits.fewest:
            raise TooFewError(len(left) - 1, limits.fewest)
        most, limit = entered.most(), limits.bound(limits.fewest)
        if not most <= limit:
            raise InputError(
                f"this secret was sent before; together with this prompt a guess might reach "
                f"{most:.2f}, above the limit of {limit:.2f} (--min-fakes, --eta), so nothing was "
                "sent"
            )
        secret.prompts = entered.prompts
        return np.array([texts[i] for i in left], np.int32), most

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Yield after reading the folder, and write it if nothing failed; one process at a time."""
        if self._folder is None:
            yield
            return
        path = self._folder / _SECRETS
        with open(self._folder / _KEY, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._secrets = _read(path)
            yield
            data = json.dumps([asdict(secret) for secret in self._secrets])
            replace_whole(path, data.encode())


def _is_alike(one: str, other: str) -> bool:
    """Return whether one of two secrets is part of the other, but for case and spaces; a part of
    one or two characters does not count.
    """
    short, long = sorted((" ".join(w.casefold().split()) for w in (one, other)), key=len)
    return bool(short) and (short == long or (len(short) > 2 and short in long))


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def key_in(folder: Path) -> bytes:
    """Return the key of a book, which is made where there is none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            raise InputError(f"others can read {folder}, which is to hold secrets; chmod 700 it")
        path = folder / _KEY
        if not path.exists():  # with a key there is an account
            create(folder / _SECRETS, b"[]")
            create(path, os.urandom(KEY_BYTES))
        key = path.read_bytes()
    except OSError as exc:
        raise InputError(f"{folder} cannot be used for secrets: {exc.strerror}") from None
    if len(key) != KEY_BYTES:
        raise InputError(f"{path} is not a key; give another folder")
    return key


def _read(path: Path) -> list[Secret]:
    try:
        return [Secret(**entry) for entry in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        raise InputError(f"{path} cannot be read; what it accounts for would be lost") from None
