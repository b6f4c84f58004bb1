"""Texts with differential privacy between two parties (InvisibleInk): the client's references stay
with it, the model is a provider's, who may add references of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.files import files_of
from models.tokenizer import Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.api.events import OnEvent, Stage, event_of
from spu_llm.api.provider import Provider
from spu_llm.core.errors import InputError
from spu_llm.net.relay import Relay
from spu_llm.service.client import run_as_client
from spu_llm.systems.dp_text.generator import batches
from spu_llm.systems.dp_text.prompts import Prompts, read_references
from spu_llm.systems.dp_text.secure_budget import for_budget
from spu_llm.systems.dp_text.secure_corpus import SecureCorpusRequest, write_corpus
from spu_llm.systems.dp_text.secure_records import SECRET_MODEL, SHARED_MODEL, References

REFERENCE_TOKENS, SPARE_PLACES = 64, 8


@dataclass(frozen=True)
class PrivateTextOptions:
    """The texts to write, and their privacy budget. The provider learns all of it, each text's
    tokens, and which of its candidates each token was.
    """

    query: str  # public: what each text goes on from
    texts: int
    epsilon: float  # what may be spent of every reference's privacy
    delta: float = 1e-6
    batch: int = 8  # references to a text
    temperature: float = 1.0
    max_new_tokens: int = 64  # of a text at most; all are charged
    top_k: int = 50  # candidates of the public model
    places: int | None = None  # room for candidates; `top_k` and a few by default
    reference_tokens: int = REFERENCE_TOKENS  # references are cut to that
    peer_references: int = 0  # so many of each text's are the provider's; both have the model then

    def check(self) -> None:
        """Raise InputError for what two parties cannot do."""
        if self.top_k < 1:
            raise InputError(f"--top-k must be 1 or more, found {self.top_k}")
        if not 0 <= self.peer_references < self.batch:
            raise InputError(
                f"--peer-references must be below --batch, {self.batch}; found "
                f"{self.peer_references}"
            )
        if self.texts < 1:
            raise InputError(f"--texts must be 1 or more, found {self.texts}")
        if self.reference_tokens < 1:
            raise InputError(f"--reference-tokens must be 1 or more, found {self.reference_tokens}")

    def request(self, tokenizer: Tokenizer) -> SecureCorpusRequest:
        """Return the corpus that is asked for, its clip norm from the budget. InputError for a
        budget that no clip norm keeps.
        """
        self.check()
        places = self.top_k + SPARE_PLACES if self.places is None else self.places
        parameters = for_budget(
            self.epsilon,
            self.delta,
            batch=self.batch,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            top_k=self.top_k,
            places=places,
            noises=2 if self.peer_references else 1,
        )
        prompts = Prompts.of_query(tokenizer, self.query, self.reference_tokens)
        return SecureCorpusRequest(
            parameters, self.delta, places, prompts, self.texts, self.peer_references
        )


@dataclass(frozen=True)
class PrivateTexts:
    """The report of private texts that were written. The texts themselves are in the file that was
    asked for, a JSON object a line.
    """

    statement: dict[str, Any]  # the privacy statement, which lies beside the texts
    learned: dict[str, list[str]]  # in the last session, by "client" and "provider"


def private_texts(
    provider: Provider,
    references: Path,
    out: Path,
    options: PrivateTextOptions,
    on_event: OnEvent = lambda event: None,
    *,
    model: Path | None = None,
) -> PrivateTexts:
    """Write texts after the manner of sensitive references to `out`, in sessions with a provider
    elsewhere; the same call goes on with what an earlier one began, and spends nothing twice.

    references: a JSON object with "text" a line. model: directory with the tokenizer of the
    provider's model, with `peer_references` of the model itself; a shipped one by default. The
    provider learns what `PrivateTextOptions` says. SpuLlmError, of the kind that says who failed.
    """
    options.check()
    if provider.server is None:
        raise InputError("the provider of private texts listens elsewhere; use Provider.at")
    directory = model or shipped("private" if options.peer_references else "public")
    asked = options.request(Tokenizer.load(directory))
    given = read_references(references)
    on_event(Stage("connecting"))
    make = sessions(provider, asked, directory, on_event)
    statement, learned = write_corpus(out, asked, given, batches(given, asked.own), make)
    return PrivateTexts(statement, learned)


def sessions(
    provider: Provider, asked: SecureCorpusRequest, directory: Path, on_event: OnEvent
) -> Callable[[int, Sequence[Sequence[str]]], dict[str, Any]]:
    """Return make(number, references of each text) -> the program's result, in its own session."""
    program = SHARED_MODEL if asked.of_provider else SECRET_MODEL
    assert provider.server is not None
    server = provider.server

    def make(number: int, parts: Sequence[Sequence[str]]) -> dict[str, Any]:
        begun = number

        def heard(said: dict[str, Any], relay: Relay) -> None:
            nonlocal begun
            if (event := event_of(said, relay)) is None:
                return
            if isinstance(event, Stage) and event.name.startswith("text "):
                begun += 1
                event = Stage(f"text {begun} of {asked.texts}", wire_bytes=event.wire_bytes)
            on_event(event)

        outcome, _ = run_as_client(
            server,
            program,
            asked.request,
            References([asked.prompts_of(part) for part in parts], str(directory)),
            heard,
            tokenizer=asked.prompts.tokenizer,
            reads=files_of(directory),
            hint_cache=provider.hint_cache,
            jobs=provider.jobs,
        )
        return dict(outcome.result)

    return make
