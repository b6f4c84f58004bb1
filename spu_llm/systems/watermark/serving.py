"""A provider that marks all its texts: the key, and what goes to a session of it."""

from __future__ import annotations

from pathlib import Path

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.systems.watermark.keys import Key, read_key
from spu_llm.systems.watermark.sessions import (
    Session,
    SessionsFile,
    Shape,
    fresh_nonce,
    sessions_path,
)


class Marker:
    """With the file of sessions beside the key, until it is closed. InputError for a key that does
    not mark such texts, or that another provider is using.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        file = read_key(path)
        if file.scheme.method != "provider":
            raise InputError(
                f"{path} is no provider's key; make one with spu-llm watermark keygen --provider "
                "--tokenizer DIR"
            )
        if not tokenizer.is_named(file.scheme.tokenizer):
            raise InputError(f"{path} marks tokens of another tokenizer than the model's")
        self._key: Key = file.key
        self._sessions = SessionsFile(sessions_path(path), file.key)

    def nonce(self) -> bytes:
        """Return a fresh nonce for a session to come."""
        return fresh_nonce()

    def noise(self, nonce: bytes) -> bytes:
        """Return the key of the noise of the nonce's session, all that its worker needs to know."""
        return self._key.of_session(nonce)

    def record(self, nonce: bytes, vocab: int, drafts: int, forwards: int) -> None:
        """Record a session before its worker has its noise. Raise SpuLlmError when that cannot be,
        as after `close`, and then the worker must not have it.
        """
        self._sessions.add(Session.now(nonce, Shape(vocab, drafts, forwards)))

    def close(self) -> None:
        self._sessions.close()
