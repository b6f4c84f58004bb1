"""A completion to generate, in plaintext or between two parties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.draft import Drafter
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from spu_llm.core.prg import Prg
from spu_llm.runtime.session import PlaintextSession
from spu_llm.systems.decoding import request as requests
from spu_llm.systems.decoding.branching import Chains
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from tests.kit.models import PRIVATE, PUBLIC, save_tokenizer, tiny_params

PARAMS = tiny_params(PRIVATE, 1)


DRAFT_PARAMS = tiny_params(PUBLIC, 2)


PROMPT = [40, 41, 42, 43]


SEED = 8  # no draw near an edge: the tokens stay when every weight moves by 0.4 %


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


def client_side(tokenizer: Tokenizer, completion: Completion, seed: int = SEED) -> ClientSide:
    drafter = Drafter(PUBLIC, DRAFT_PARAMS, 80) if completion.request.draft_length else None
    streams = Streams(Prg.from_seed(seed, "drafts"), Prg.from_seed(seed, "sampling"))
    chains = Chains(streams, completion.request.candidates)
    return ClientSide(
        list(PROMPT),
        tokenizer,
        drafter,
        completion.verifier,
        streams,
        branching=chains if chains.count > 1 else None,
    )


def provider_stream(seed: int = SEED) -> Prg:
    return Prg.from_seed(seed, "joint randomness")


def request_for(
    new: int, drafts: int, temperature: float, verify: str = "token", **options: Any
) -> Request:
    return Request(len(PROMPT), new, drafts, temperature, verify, **options)


def run_plaintext(tokenizer: Tokenizer, request: Request, seed: int = SEED) -> Any:
    """Return the client's side, and the report, of a completion in plaintext."""
    completion = Completion.of(PRIVATE, request)
    client = client_side(tokenizer, completion, seed)
    session = PlaintextSession()
    decoder = completion.decoder(session, share_weights(session, PRIVATE, PARAMS))
    return client, generate(session, completion, decoder, client, provider_stream(seed))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that grow by few rows and, with hidden progress, are packed as soon as can be."""
    for name, rows in (("_SPARE_ROWS", 4), ("_LEAST_ROWS", 1), ("_ROWS_AT_ONCE", 8)):
        monkeypatch.setattr(requests, name, rows)
