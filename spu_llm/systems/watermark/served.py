"""A provider that marks all its texts: the key, and what goes to a session of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.systems.decoding.records import COMPLETION, MARKED, PREPARATION
from spu_llm.systems.program import Job, Served
from spu_llm.systems.served import Offer, ServedSystem
from spu_llm.systems.watermark.keys import Key, read_key
from spu_llm.systems.watermark.sessions import (
    Session,
    SessionsFile,
    Shape,
    fresh_nonce,
    sessions_path,
)

# The colder, the surer a token is without noise, and the less of a mark there is.
LEAST_TEMPERATURE = 0.5


class MarkedTexts(ServedSystem):
    """The whole model, whose completions are marked under the key in a file: with the file of
    sessions beside it, between `open` and `close`. `open` raises InputError for a key that does not
    mark such texts, or that another provider is using.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: Key | None = None
        self._sessions: SessionsFile | None = None

    def open(self, tokenizer: Tokenizer | None, *, studies: bool) -> None:
        if studies:
            raise InputError("with --mark every text is a marked completion; leave --studies out")
        assert tokenizer is not None
        file = read_key(self._path)
        if file.scheme.method != "provider":
            raise InputError(
                f"{self._path} is no provider's key; make one with spu-llm watermark keygen "
                "--provider --tokenizer DIR"
            )
        if not tokenizer.is_named(file.scheme.tokenizer):
            raise InputError(f"{self._path} marks tokens of another tokenizer than the model's")
        self._key = file.key
        self._sessions = SessionsFile(sessions_path(self._path), file.key)

    def offer(self, folder: Path | None) -> Offer:
        """Bring the key of the noise of a fresh session, all that its worker needs to know, and
        record the session when a completion begins.
        """
        assert self._key is not None
        nonce = fresh_nonce()
        noise = self._key.of_session(nonce).hex()
        return Offer(Served(stream_key=noise), begin=partial(self.record, nonce))

    def check_program(self, program: str) -> None:
        """Raise InputError for all but completions and their preparation."""
        if program not in (COMPLETION.name, PREPARATION.name):
            raise InputError(
                f"this provider marks its texts, which {program} has no way to: ask for a "
                f"completion with --verify {MARKED}"
            )

    def admit(self, job: Job[Any, Any]) -> None:
        """Raise InputError for all but the marked variant, at a temperature with enough noise."""
        if job.request.verify != MARKED:
            raise InputError(
                f"this provider marks its texts: ask with --verify {MARKED}, and a --temperature "
                f"of {LEAST_TEMPERATURE} or more"
            )
        if job.request.temperature < LEAST_TEMPERATURE:
            raise InputError(
                "this provider marks its texts, which takes --temperature "
                f"{LEAST_TEMPERATURE} or more"
            )

    def record(self, nonce: bytes, job: Job[Any, Any] | None) -> None:
        """Record the session of a nonce before its worker has its noise; nothing for correlated
        randomness of a completion to come. Raise SpuLlmError when that cannot be, as after `close`,
        and then the worker must not have it.
        """
        assert job is not None and self._sessions is not None
        request = job.request
        if isinstance(request, PREPARATION.request):
            return
        forwards = 1 + request.most_steps(job.before.left(job.model))
        shape = Shape(job.model.vocab_size, request.draft_length, forwards)
        self._sessions.add(Session.now(nonce, shape))

    def close(self) -> None:
        if self._sessions is not None:
            self._sessions.close()
