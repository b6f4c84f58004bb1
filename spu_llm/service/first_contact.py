"""What a client has of a provider before it can ask for anything: what the models are called, and
how a model's text is written (`models.text_format`), which it keeps.

    <directory>/certificate-<32 hex digits of its fingerprint>/<SHA-256>.json   of a provider
    <directory>/insecure/...    of all providers in the clear
    <directory>/here/...        of models on this machine, for whose sake nothing is sent

The provider states the digest each time, so that a kept document is used without another transfer
and a changed one is fetched. What comes is parsed as anybody's: PeerError when it is not what its
digest says or cannot be used. A kept file that is damaged is fetched again. Of a provider the last
`KEPT` documents stay, so that none fills a disk; folders may be removed between sessions. Folders
are 0700, files 0600.

The provider chooses what a token is, and so what a prompt's length in tokens, which it learns, says
about the prompt; with a draft model of its own the client takes that model's tokenizer alone.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from models.text_format import DOCUMENT_BYTES, TextFormat
from spu_llm.core.errors import InputError, PeerError, WireError
from spu_llm.net import tls
from spu_llm.net.control_plane import PART_BYTES, ask_for_format, ask_for_models
from spu_llm.offline.access import failures
from spu_llm.offline.durable import create, open_folder
from spu_llm.offline.peer_directories import directory_of
from spu_llm.offline.silent.store import cache_directory
from spu_llm.service.client import OPEN_S, Server, answering, connected
from spu_llm.service.model_names import MAX_MODELS, is_name

KEPT = MAX_MODELS  # of a provider: one of each model
PART_S = 15.0  # for one part to come

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class KeptFormat:
    """The text format of a model, and its file, which a worker reads."""

    text: TextFormat
    path: Path


def text_format(server: Server) -> KeptFormat:
    """Return how text of the model that is asked for is written; it is fetched unless it is kept.

    PeerError when the provider does not answer or what it sends cannot be used, InputError when it
    serves no model of that name, ManifestMismatch when it is of an older wire version, PoolError
    when nothing can be kept.
    """
    offered = _asked(server, 0, 0)
    if not _DIGEST.fullmatch(offered.digest) or not 0 < offered.size <= DOCUMENT_BYTES:
        raise WireError(
            f"the provider announces a text format of {offered.size} bytes under the digest "
            f"{offered.digest[:80]!a}; at most {DOCUMENT_BYTES} bytes are taken"
        )
    folder = _folder_of(offered.provider)
    if (kept := _kept(folder, offered.digest)) is not None:
        return KeptFormat(_used(kept), _path(folder, offered.digest))
    return _keep(folder, _used(_fetched(server, offered)))


def model_names(server: Server) -> list[str]:
    """Return the names of the models that a provider serves, the first one first; none where its
    only model has no name. PeerError when it does not answer, or says what are no names.
    """
    stream, _ = connected(server, tls.CONTROL)
    with answering(server):
        return checked_names(ask_for_models(stream, OPEN_S))


def checked_names(names: list[str]) -> list[str]:
    """Return names of models as a provider states them; WireError where they are none."""
    if len(names) > MAX_MODELS or len(set(names)) < len(names) or not all(map(is_name, names)):
        raise WireError(f"the provider names {len(names)} models by what are no distinct names")
    return names


def text_format_here(model: Path) -> KeptFormat:
    """Return how text of the model in a directory on this machine is written. InputError when it
    has no text format that can be used.
    """
    folder, text = cache_directory() / "text" / "here", TextFormat.of_model(model)
    if _kept(folder, text.digest) is not None:
        return KeptFormat(text, _path(folder, text.digest))
    return _keep(folder, text)


@dataclass(frozen=True)
class _Answer:
    digest: str
    size: int
    part: bytes
    provider: str | None  # the certificate's fingerprint; None in the clear


def _asked(server: Server, offset: int, most: int) -> _Answer:
    stream, provider = connected(server, tls.CONTROL)
    with answering(server):
        part = ask_for_format(stream, offset, most, PART_S, server.served_model)
    return _Answer(*part, None if provider is None else provider.fingerprint)


def _fetched(server: Server, announced: _Answer) -> bytes:
    """Return the document. PeerError when it is not the one that was announced."""
    data = bytearray()
    while (left := announced.size - len(data)) > 0:
        part = _asked(server, len(data), min(left, PART_BYTES))
        if (part.digest, part.size, part.provider) != (
            announced.digest,
            announced.size,
            announced.provider,
        ):
            raise PeerError("the provider's text format changed while it was sent; try again")
        if not 0 < len(part.part) <= left:
            raise WireError(
                f"the provider sent {len(part.part)} bytes of its text format, of which {left} "
                "were left"
            )
        data += part.part
    if (sent := hashlib.sha256(data).hexdigest()) != announced.digest:
        raise PeerError(
            f"the provider sent a text format of another digest ({sent:.16}) than it had announced "
            f"({announced.digest:.16}); nothing of it is used"
        )
    return bytes(data)


def _used(document: bytes) -> TextFormat:
    try:
        return TextFormat.parse(document)
    except InputError as error:
        raise PeerError(
            f"the provider's text format cannot be used: {error}; it must serve a model whose "
            "tokenizer can"
        ) from None


def _folder_of(provider: str | None) -> Path:
    root = cache_directory() / "text"
    return root / "insecure" if provider is None else directory_of(root, provider)


def _path(folder: Path, digest: str) -> Path:
    return folder / f"{digest}.json"


def _kept(folder: Path, digest: str) -> bytes | None:
    """Return the document with this digest, if it was kept; what is damaged is removed."""
    path = _path(folder, digest)
    with failures(path):
        try:
            document = path.read_bytes()
            if hashlib.sha256(document).hexdigest() == digest:
                os.utime(path)  # those stay that were used last
                return document
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
    return None


def _keep(folder: Path, text: TextFormat) -> KeptFormat:
    path = _path(folder, text.digest)
    open_folder(folder)
    with failures(folder):
        create(path, text.document)
        for old in sorted(folder.glob("*.json"), key=_used_at, reverse=True)[KEPT:]:
            old.unlink(missing_ok=True)
    return KeptFormat(text, path)


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another session has removed it
        return 0.0
