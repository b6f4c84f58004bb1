"""A client that has no file of the model: what it asks the provider for, keeps, and refuses."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from models.text_format import TextFormat
from spu_llm.core.errors import ManifestMismatch, PeerError, WireError
from spu_llm.net.control_plane import ControlServer, Document
from spu_llm.net.manifest import Manifest
from spu_llm.net.stream import accept, listen
from spu_llm.service import agreeing, first_contact
from spu_llm.service.client import Server
from spu_llm.service.first_contact import KEPT, model_names, text_format
from spu_llm.service.model_names import MAX_MODELS
from tests.kit.models import save_tokenizer
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S

MARGIN = 0.05  # of every decision in logits: far above what shares blur


@dataclass
class Provider:
    """Gives out a document, and counts the bytes of it that went out."""

    server: Server
    document: bytes
    digest: str = ""
    asked: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    further: dict[str, bytes] = field(default_factory=dict)  # documents of models with a name

    def name(self) -> list[str]:
        return self.names

    def tell(self, model: str) -> Document:
        if model:
            document = self.further[model]
            return Document(hashlib.sha256(document).hexdigest(), document)
        return Document(self.digest or hashlib.sha256(self.document).hexdigest(), self.document)


@pytest.fixture
def provider(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """Yield a provider in this process, in the clear; with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(first_contact, "PART_S", END_S)  # provider and client share one process
    control = ControlServer()

    def no_session(asked: Any) -> tuple[Manifest, bytes]:
        raise AssertionError("nobody asks for a session here")

    def run() -> None:
        while True:
            try:
                stream = accept(listener, RUN_S)
            except OSError:  # it is closed
                return
            made.asked.append(len(made.asked))
            threading.Thread(
                target=control.serve, args=(stream, no_session, made.tell, made.name), daemon=True
            ).start()

    with closing(listen("127.0.0.1", 0)) as listener, closing(control):
        port = listener.getsockname()[1]
        document = TextFormat.of_model(pair.private).document
        made = Provider(Server("127.0.0.1", port, "local"), document)
        threading.Thread(target=run, daemon=True).start()
        yield made
        listener.shutdown(2)


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "spu-llm" / "text" / "insecure").iterdir())


def test_it_is_fetched_once_and_kept(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_contact, "PART_BYTES", len(provider.document) // 2 - 1)
    actual = text_format(provider.server)
    assert actual.text.document == provider.document
    assert actual.path.read_bytes() == provider.document
    assert (kept(tmp_path), len(provider.asked)) == ([actual.path], 4)
    assert actual.path.stat().st_mode & 0o077 == 0
    again = text_format(provider.server)
    assert (again.path, len(provider.asked)) == (actual.path, 5), "one call, without a part"


def test_another_document_and_a_damaged_one_are_fetched(
    provider: Provider, pair: Pair, tmp_path: Path
) -> None:
    first = text_format(provider.server)
    directory = tmp_path / "other"
    directory.mkdir()
    save_tokenizer(directory, "an entirely different text to learn merges from ")
    first_document, provider.document = provider.document, TextFormat.of_model(directory).document
    other = text_format(provider.server)
    assert other.text.tokenizer.digest != first.text.tokenizer.digest
    assert kept(tmp_path) == sorted([first.path, other.path])
    provider.document = first_document
    first.path.write_bytes(first_document[:-1])
    assert text_format(provider.server).path.read_bytes() == first_document


def test_the_last_ones_stay(provider: Provider, pair: Pair, tmp_path: Path) -> None:
    content = json.loads(provider.document)
    paths = []
    for i in range(KEPT + 1):
        provider.document = json.dumps(content | {"eos_token_id": [i]}).encode()
        paths.append(text_format(provider.server).path)
        os.utime(paths[-1], (i, i))
    assert kept(tmp_path) == sorted(paths[1:])


def test_texts_of_all_models_of_a_provider_are_kept(provider: Provider, tmp_path: Path) -> None:
    """To ask for one in turn with all others brings nothing again."""
    content = json.loads(provider.document)
    names = [f"model-{i}" for i in range(MAX_MODELS)]
    for i, name in enumerate(names):
        provider.further[name] = json.dumps(content | {"eos_token_id": [i]}).encode()

    def asked() -> list[bytes]:
        servers = [replace(provider.server, served_model=name) for name in names]
        return [text_format(server).path.read_bytes() for server in servers]

    assert asked() == list(provider.further.values())
    before = len(provider.asked)
    assert asked() == list(provider.further.values())
    assert len(provider.asked) - before == MAX_MODELS  # only which document it is, of each


@pytest.mark.parametrize("names", [[], ["a"], ["b", "a-1._"]])
def test_names_of_models_come_in_their_order(provider: Provider, names: list[str]) -> None:
    provider.names = names
    assert model_names(provider.server) == names


@pytest.mark.parametrize(
    "names",
    [
        ["a", "a"],
        ["a", ""],
        ["a b"],
        ["x" * 65],
        ["\x1b[2J"],
        [f"{i}" for i in range(MAX_MODELS + 1)],
    ],
)
def test_what_are_no_names_is_refused(provider: Provider, names: list[str]) -> None:
    provider.names = names
    with pytest.raises(WireError, match=f"names {len(names)} models by what are no distinct names"):
        model_names(provider.server)


@pytest.mark.parametrize(
    ("digest", "document", "error", "words"),
    [
        ("0" * 64, None, PeerError, "another digest .* than it had announced"),
        ("x" * 64, None, WireError, "announces a text format"),
        ("", b"", WireError, "of 0 bytes"),
        ("", b"{}", PeerError, "cannot be used: the text format has other fields"),
        ("", b"\xff", PeerError, "cannot be used: the text format is not valid JSON"),
    ],
)
def test_what_is_refused_and_not_kept(
    provider: Provider,
    tmp_path: Path,
    digest: str,
    document: bytes | None,
    error: type[PeerError],
    words: str,
) -> None:
    provider.digest = digest
    provider.document = provider.document if document is None else document
    with pytest.raises(error, match=words):
        text_format(provider.server)
    assert not (tmp_path / "cache").exists()


def test_one_that_is_too_large_is_not_asked_for(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_contact, "DOCUMENT_BYTES", len(provider.document) - 1)
    with pytest.raises(WireError, match="bytes are taken"):
        text_format(provider.server)
    assert len(provider.asked) == 1


def test_one_that_changes_while_it_is_sent_is_not_taken(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_contact, "PART_BYTES", len(provider.document) // 2)
    ask = first_contact.ask_for_format

    def changing(*args: Any) -> Any:
        provider.document += b" " * (len(provider.asked) > 1)
        return ask(*args)

    monkeypatch.setattr(first_contact, "ask_for_format", changing)
    with pytest.raises(PeerError, match="changed while it was sent"):
        text_format(provider.server)


def test_what_is_kept_is_of_one_certificate(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And comes from one: another one that answers in between is refused."""
    answering: list[str | None] = ["a" * 64, "b" * 64]
    actual = Document(hashlib.sha256(provider.document).hexdigest(), provider.document)

    def asked(server: Server, offset: int, most: int) -> first_contact._Answer:
        part = actual.content[offset : offset + most]
        fingerprint = answering[0] if most == 0 else answering[-1]
        return first_contact._Answer(actual.digest, len(actual.content), part, fingerprint)

    monkeypatch.setattr(first_contact, "_asked", asked)
    with pytest.raises(PeerError, match="changed while it was sent"):
        text_format(provider.server)
    for one in ("a" * 64, "b" * 64, None):
        answering[:] = [one]
        text_format(provider.server)
    root = tmp_path / "cache" / "spu-llm" / "text"
    names = {"certificate-" + "a" * 32, "certificate-" + "b" * 32, "insecure"}
    assert {path.name for path in root.iterdir()} == names


def test_another_digest_in_the_manifest_is_refused() -> None:
    agreed: Manifest = {"model.text_format": "b" * 64}
    agreeing.check_text_format(agreed, "b" * 64)
    for stated in (agreed, {}):
        with pytest.raises(ManifestMismatch, match="written otherwise"):
            agreeing.check_text_format(stated, "a" * 64)
