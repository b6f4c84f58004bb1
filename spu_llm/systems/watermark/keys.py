"""Keys, and the pseudorandom function g(w) = F[h(K | w)] of n-grams (§1).

    KEYFILE    0600: the key, and what detection must know besides: the scheme

h is BLAKE2b under the key. An n-gram is encoded without two having the same encoding: how many
units, then each with its length. Of its digest the first half becomes a uniform number, the second
names the seed, so that a list of names says nothing about the numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from spu_llm.core.closed import check_closed
from spu_llm.core.errors import InputError
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.systems.watermark.cdfs import Family

FORMAT = 1
MAX_NGRAM = 32
UNITS = ("tokens", "words", "stems")
RIVALS = ("aaronson", "kirchenbauer", "kuditipudi")
METHODS = ("candidates", "race", "provider", *RIVALS)
_HALF = 8  # bytes: of a digest's number, and of its name


class Seed(NamedTuple):
    """An n-gram under a key: a name to tell seeds apart by, and its uniform number in (0, 1)."""

    name: bytes
    uniform: float


@dataclass(frozen=True)
class Scheme:
    """The facts that detection needs beside the key. `method`: `candidates`, the black-box
    watermark, whose n-grams end with the unit they mark; `race`, noise from the n - 1 tokens before
    it (`race_marks`); `provider`, noise of a place in a session, whatever text stands there
    (`sessions`); those of RIVALS, what the paper compares with (`baselines`). `tokenizer`: its
    digest, where units are tokens.
    """

    ngram: int = 4
    family: Family = field(default_factory=Family)
    units: str = "tokens"
    method: str = "candidates"
    tokenizer: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.ngram <= MAX_NGRAM:
            raise InputError(f"the length of n-grams must be 1 to {MAX_NGRAM}, found {self.ngram}")
        if self.units not in UNITS:
            raise InputError(f"units are {', '.join(UNITS)}, not {self.units!r}")
        if self.method not in METHODS:
            raise InputError(f"methods are {', '.join(METHODS)}, not {self.method!r}")
        if self.method != "candidates" and self.units != "tokens":
            raise InputError(f"the method {self.method} marks tokens")


@dataclass(frozen=True)
class Key:
    """A secret of 32 bytes, which no repr shows."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, found {len(self.secret)}")

    @staticmethod
    def from_os() -> Key:
        return Key(os.urandom(KEY_BYTES))

    def seed(self, gram: Sequence[bytes]) -> Seed:
        """Return the seed of an n-gram, the first ones of a text included, which are shorter."""
        digest = self._hash(b"n-gram", encoded(gram), 2 * _HALF)
        word = int.from_bytes(digest[:_HALF], "little") >> 11
        return Seed(digest[_HALF:], max(word, 1) * 2.0**-53)

    def stream(self, gram: Sequence[bytes]) -> Prg:
        """Return a stream of numbers for a context, the units before a token."""
        return Prg(self._hash(b"context", encoded(gram), KEY_BYTES))

    def row(self, number: int) -> Prg:
        """Return a stream of numbers for a place, whatever text stands there."""
        return Prg(self._hash(b"place", number.to_bytes(8, "little"), KEY_BYTES))

    def session(self, nonce: bytes) -> Prg:
        """Return the stream of numbers for all places of one session."""
        return Prg(self.of_session(nonce))

    def of_session(self, nonce: bytes) -> bytes:
        """Return the key of a session's stream, from which neither this key nor another session's
        follows.
        """
        return self._hash(b"session", nonce, KEY_BYTES)

    def fingerprint(self) -> bytes:
        return self._hash(b"fingerprint", b"", 16)

    def _hash(self, use: bytes, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, key=self.secret, person=use, digest_size=size).digest()


def encoded(gram: Sequence[bytes]) -> bytes:
    """Encode an n-gram: the number of units in a byte; each unit after its length in four."""
    if len(gram) > MAX_NGRAM:
        raise ValueError(f"an n-gram has {MAX_NGRAM} units at most, found {len(gram)}")
    return bytes([len(gram)]) + b"".join(len(u).to_bytes(4, "little") + u for u in gram)


def token_unit(token: int) -> bytes:
    return token.to_bytes(4, "little")


# ---- files


class KeyFile(NamedTuple):
    key: Key
    scheme: Scheme


def write_key(path: Path, key: Key, scheme: Scheme) -> None:
    """Write a key file. Raise InputError when there is a file already, or it cannot be written."""
    family = {"name": scheme.family.name, "k": scheme.family.k}
    rest = {f.name: getattr(scheme, f.name) for f in fields(scheme) if f.name != "family"}
    content = {"format": FORMAT, "key": key.secret.hex(), "family": family, **rest}
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise InputError(f"{path} is there already; choose another --out") from None
    except OSError as exc:
        raise InputError(f"cannot write {path}: {exc.strerror}; choose another --out") from None


def read_key(path: Path) -> KeyFile:
    """Read a key file. Raise InputError when it is open to others, missing, or no key file."""
    try:
        with open(path, encoding="utf-8") as file:
            check_closed(file.fileno(), path)
            content = json.loads(file.read())
        return _parsed(content)
    except FileNotFoundError:
        raise InputError(f"{path} is missing; spu-llm watermark keygen makes one") from None
    except OSError as exc:
        raise InputError(f"{path} cannot be read: {exc.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):  # what it holds is nobody's to see
        raise InputError(f"{path} is no key of a watermark, or damaged") from None


def read_keys(paths: Sequence[Path]) -> tuple[tuple[Key, ...], Scheme]:
    """Read the keys of one text: different ones, and the scheme of them all. Raise InputError where
    they are equal, or of several schemes.
    """
    files = [read_key(path) for path in paths]
    if len({file.scheme for file in files}) > 1:
        raise InputError("the keys mark by different things; make them with the same options")
    keys = tuple(file.key for file in files)
    check_keys(keys)
    return keys, files[0].scheme


def check_keys(keys: Sequence[Key]) -> None:
    """Raise InputError unless a text can be marked under these keys."""
    if not keys or len(set(keys)) < len(keys):
        raise InputError("a text is marked under one key or several different ones")


def _parsed(content: Any) -> KeyFile:
    kinds = {"ngram": int, "units": str, "method": str, "tokenizer": str}
    if not isinstance(content, dict) or content["format"] != FORMAT:
        raise ValueError("another format")
    if {name: type(content[name]) for name in kinds} != kinds:
        raise ValueError("another type")
    if set(content) != {*kinds, "format", "key", "family"}:
        raise ValueError("other fields")
    family = content["family"]
    if set(family) != {"name", "k"} or type(family["k"]) is not int:
        raise ValueError("another family")
    try:
        scheme = Scheme(family=Family(**family), **{name: content[name] for name in kinds})
    except InputError as exc:
        raise ValueError(str(exc)) from None
    return KeyFile(Key(bytes.fromhex(content["key"])), scheme)
