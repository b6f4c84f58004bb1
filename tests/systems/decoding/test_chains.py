"""Chains of drafts that begin apart: the text is the one without drafts, for every tree."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from models.chat import Message
from models.ngrams import Ngrams
from models.tokenizer import Tokenizer
from protocols.verification import race
from protocols.verification.distribution import Streams, gumbel
from spu_llm.api.client import Client, CompletionOptions
from spu_llm.api.provider import Provider
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.runtime.session import PlaintextSession
from spu_llm.systems.decoding.branching import Chains, drafted
from spu_llm.systems.decoding.completion import _rules
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.records import ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from tests.kit.models import PRIVATE, PUBLIC
from tests.systems.decoding.requests import PARAMS, client_side, provider_stream, request_for

VOCAB, BITS = 3, 24
OWN = Streams(Prg.from_seed(1, "drafts"), Prg.from_seed(1, "sampling"))


@pytest.mark.parametrize(("chains", "depth"), [(1, 3), (2, 2), (3, 1), (4, 1), (2, 1)])
def test_every_tree_gives_the_text_that_the_noise_decides(chains: int, depth: int) -> None:
    """By enumeration of all trees over three tokens, under noise of several texts: the longest
    chain's outcome is the beginning of the text that comes without drafts, one token longer than
    what the tree holds of it. So for every tree the text has one distribution, that of the noise.
    """
    rng = np.random.default_rng(5)
    logits = {
        prefix: rng.normal(size=VOCAB)
        for n in range(depth + 1)
        for prefix in itertools.product(range(VOCAB), repeat=n)
    }
    paths = list(itertools.product(range(VOCAB), repeat=depth))
    trees = list(itertools.product(range(len(paths)), repeat=chains))
    choose = Chains(OWN, chains).choose
    for _ in range(8):
        noise = gumbel(rng.uniform(size=(depth + 1, VOCAB)))
        text: tuple[int, ...] = ()
        for j in range(depth + 1):
            text += (int(np.argmax(logits[text] + noise[j])),)
        numbers = np.stack(
            [[logits[path[:j]] + noise[j] for j in range(depth + 1)] for path in paths]
        )
        drafts = jnp.array(paths, jnp.int32)
        outcome, _ = race.verify(jnp.array(numbers, jnp.float32), drafts, BITS)
        accepted, tokens = map(np.asarray, outcome)
        emitted = [
            (*path[:k], int(token)) for path, k, token in zip(paths, accepted, tokens, strict=True)
        ]
        for tree in trees:
            outcomes = [emitted[i] for i in tree]
            longest = outcomes[choose([], outcomes, 9)]
            held = max(_common(paths[i], text) for i in tree)
            assert longest == text[: held + 1]
            assert all(one == text[: len(one)] for one in outcomes)


def _common(path: tuple[int, ...], text: tuple[int, ...]) -> int:
    same = (a == b for a, b in zip(path, text, strict=False))
    return sum(itertools.takewhile(bool, same))


def complete(
    tokenizer: Tokenizer, request: Request, ngrams: bool = False, model: bool = False
) -> Any:
    completion = Completion.of(PRIVATE, request)
    client = client_side(tokenizer, completion)
    if ngrams:
        client.drafter = Ngrams(PUBLIC.vocab_size, client.drafter if model else None)  # type: ignore[arg-type]
    session = PlaintextSession()
    decoder = completion.decoder(session, share_weights(session, PRIVATE, PARAMS))
    return client, generate(session, completion, decoder, client, provider_stream())


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "verify"), [(0.8, "race"), (0.0, "token")])
def test_chains_do_not_change_the_text(
    tokenizer: Tokenizer, temperature: float, verify: str
) -> None:
    """And take no more steps than the first one alone; n-grams have one draft to offer."""
    standard, _ = complete(tokenizer, request_for(16, 0, temperature, verify))
    one, alone = complete(tokenizer, request_for(16, 2, temperature, verify))
    steps = [alone.steps]
    for chains in (2, 4):
        client, report = complete(
            tokenizer, request_for(16, 2, temperature, verify, candidates=chains)
        )
        assert client.tokens == one.tokens == standard.tokens
        each = [client.streams] * chains
        branches = drafted(client.drafter, client.verifier, [1, 2], 2, each, apart=True)
        first = [branch.drafts[0] for branch in branches]
        assert len(set(first)) == chains
        steps.append(report.steps)
    assert steps[0] > steps[-1] and steps == sorted(steps, reverse=True)
    for model in (False, True):
        client, _ = complete(
            tokenizer,
            request_for(16, 2, temperature, verify, candidates=2),
            ngrams=True,
            model=model,
        )
        assert client.tokens == standard.tokens


def test_further_chains_are_the_models_where_ngrams_are_sure(tokenizer: Tokenizer) -> None:
    """N-grams know one token alone; without a model all chains are that one's."""
    text = [5, 6, 7, 8, 9, 10, 11] * 3
    client = client_side(tokenizer, Completion.of(PRIVATE, request_for(4, 2, 0.0)))
    model = client.drafter
    for ngrams, firsts in ((Ngrams(PUBLIC.vocab_size, model), 3), (Ngrams(PUBLIC.vocab_size), 1)):  # type: ignore[arg-type]
        branches = drafted(ngrams, client.verifier, text, 2, [OWN] * 3, apart=True)
        assert branches[0].drafts == [5, 6]
        assert len({branch.drafts[0] for branch in branches}) == firsts


def test_what_chooses_among_candidates(tokenizer: Tokenizer) -> None:
    """Without a key: the longest of chains under one noise, and else nothing."""
    inputs = ClientInputs([1], "dir")

    def rules(request: Request) -> Any:
        completion = Completion.of(PRIVATE, request)
        return _rules(inputs, completion, tokenizer, OWN, lambda *event: None)[1]

    for request in (
        request_for(4, 2, 0.8, "race", candidates=3),
        request_for(4, 2, 0.0, candidates=3),
    ):
        assert rules(request) == Chains(OWN, 3)
    for request in (
        request_for(4, 2, 0.8, candidates=3),
        request_for(4, 0, 0.8, "race", candidates=3),
    ):
        with pytest.raises(InputError, match="chains of drafts under one noise"):
            rules(request)
    with pytest.raises(InputError, match="without drafts would all be the same"):
        request_for(4, 0, 0.0, candidates=3).check(PRIVATE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"verify": "token"}, "chains of drafts with --verify race or --temperature 0; add"),
        ({"verify": "race", "draft_length": 0}, "which a model makes; leave --standard out"),
        ({"temperature": 0.0, "drafts": "ngram"}, "a model makes; leave --drafts ngram out"),
        ({"verify": "race", "show_progress": True}, "--show-progress would show the provider"),
    ],
)
def test_candidates_that_nothing_chooses_among(options: dict[str, Any], said: str) -> None:
    """Nothing is sent. In a chat they are refused alike, and else allowed."""
    asked = CompletionOptions(candidates=3, **options)
    with pytest.raises(InputError, match=said):
        asked.check("zq")
    client = Client(Provider.here("nowhere"))
    with pytest.raises(InputError, match=said):
        client.check_chat([Message("user", "zq")], asked)
    client.check_chat([Message("user", "zq")], CompletionOptions(candidates=3, verify="race"))
