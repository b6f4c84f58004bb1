"""Turns of a conversation that keep their cache write what fresh completions of all of it would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.draft import Drafter
from models.family import logits
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from spu_llm.core.errors import InputError, WireError
from spu_llm.core.prg import Prg
from spu_llm.core.settings import OWN, SPU, SpuConfig
from spu_llm.core.values import CLIENT
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding import request as requests
from spu_llm.systems.decoding.ahead import Ahead
from spu_llm.systems.decoding.cadence import Cadence
from spu_llm.systems.decoding.chat_request import ChatRequest
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.conversation import Room, Turns, converse
from spu_llm.systems.decoding.generate import Completion, Report
from spu_llm.systems.decoding.secure_model import share_weights
from tests.kit.models import PRIVATE, save_tokenizer, tiny_params

# Far from what training begins with, so that greedy texts do not repeat one token.
PARAMS = jax.tree.map(lambda w: w * (3 if w.ndim == 2 else 1), tiny_params(PRIVATE, 1))
PROMPT = [40, 41, 42, 43]
LATER = [[60, 61, 62], [70]]  # turns after the first


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that grow by few rows."""
    for name, rows in (("_SPARE_ROWS", 4), ("_LEAST_ROWS", 1), ("_ROWS_AT_ONCE", 8)):
        monkeypatch.setattr(requests, name, rows)


def asked(drafts: int, new: int = 5, most: int = 60, **options: Any) -> ChatRequest:
    return ChatRequest(len(PROMPT), new, drafts, 0.0, conversation_tokens=most, **options)


class Said:
    """Turns that are said one after the other, each after a moment without any."""

    def __init__(self, turns: list[list[int]]) -> None:
        self._coming = [part for turn in turns for part in ([], turn)]

    def __call__(self, seconds: float) -> list[int] | None:
        return self._coming.pop(0) if self._coming else None


def turns_of(
    tokenizer: Tokenizer, completion: Completion, later: list[list[int]], **options: Any
) -> Turns:
    # The model itself: its drafts are right, up to the end of an answer and beyond.
    drafter = Drafter(PRIVATE, PARAMS, 64) if completion.request.draft_length else None
    streams = Streams(Prg.from_seed(8, "drafts"), Prg.from_seed(8, "sampling"))
    side = ClientSide(list(PROMPT), tokenizer, drafter, completion.verifier, streams, **options)
    return Turns(side, Said(later))


def conversed(
    session: Any,
    completion: Completion,
    turns: Turns | None,
    params: Any,
    seen: Callable[[ClientSide], None],
) -> list[Report]:
    """Return all of a conversation; `seen` looks at the client's side after each answer."""
    decoder = completion.decoder(session, share_weights(session, PRIVATE, params))
    joint = Prg.from_seed(8, "joint randomness")
    reports = []
    for report in converse(session, completion, decoder, turns, joint):
        reports.append(report)
        if turns is not None:
            seen(turns.side)
    return reports


def in_plaintext(tokenizer: Tokenizer, request: ChatRequest, later: list[list[int]]) -> Any:
    """Answers, and all tokens in the end."""
    completion = Completion.of(PRIVATE, request)
    turns = turns_of(tokenizer, completion, later)
    answers: list[list[int]] = []
    conversed(
        PlaintextSession(), completion, turns, PARAMS, lambda side: answers.append(side.tokens)
    )
    return answers, [*turns.side.prompt, *turns.side.tokens]


@jax.jit
def rows_of(text: Any) -> Any:
    return logits(PARAMS, PRIVATE, text)


def expected_of(turns: list[list[int]], eos: set[int]) -> tuple[list[list[int]], list[int]]:
    """Greedy answers of 5 tokens at most, by forwards of the whole text; all tokens in the end."""
    text: list[int] = []
    answers = []
    for turn in turns:
        text += turn
        began = len(text)
        while len(text) < began + 5:
            padded = np.pad(text, (0, PRIVATE.n_positions - len(text)))
            token = int(np.argmax(rows_of(jnp.asarray(padded))[len(text) - 1]))
            if token in eos:
                break
            text.append(token)
        answers.append(text[began:])
    return answers, text


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_every_answer_is_what_the_whole_text_gives(tokenizer: Tokenizer, drafts: int) -> None:
    """Also where an answer ends at once, or by a token that was drafted."""
    turns = [PROMPT, *LATER]
    first, second, _ = expected_of(turns, set())[0]
    lengths: set[int] = set()
    for eos in (first[2], second[0]):
        ending = replace(tokenizer, eos_ids=frozenset([eos]))
        expected, text = expected_of(turns, {eos})
        lengths |= {*map(len, expected)}
        answers, whole = in_plaintext(ending, asked(drafts), LATER)
        assert answers == expected and whole == text, eos
    assert {0, 2, 5} <= lengths


def test_what_a_turn_brings_is_read_before_it_is_announced(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step then takes the drafter as long after a long turn: as many passes as drafts."""
    passes, of_steps = [0], []
    read = Drafter.logits

    def counted(self: Drafter, tokens: list[int]) -> np.ndarray:
        step = self._step

        def one(*args: Any) -> Any:
            passes[0] += 1
            return step(*args)

        monkeypatch.setattr(self, "_step", one)
        try:
            return read(self, tokens)
        finally:
            monkeypatch.setattr(self, "_step", step)

    monkeypatch.setattr(Drafter, "logits", counted)
    monkeypatch.setattr(Cadence, "begin", lambda self: passes.__setitem__(0, 0))
    monkeypatch.setattr(Cadence, "wait", lambda self: of_steps.append(passes[0]))
    in_plaintext(tokenizer, asked(3), [[60] * 20, [70] * 9])
    assert {*of_steps} == {0, 3}, of_steps  # none at the end of an answer


def test_two_parties_converse_as_in_plaintext(
    tokenizer: Tokenizer, own_simulation: Simulation
) -> None:
    """A block that grows; the provider learns turns' rows, and when answers end."""
    _converse_as_in_plaintext(tokenizer, own_simulation, OWN)


@pytest.mark.slow
def test_they_do_where_spu_computes_the_model(tokenizer: Tokenizer) -> None:
    with Simulation(SpuConfig().computing(SPU)) as simulation:
        _converse_as_in_plaintext(tokenizer, simulation, SPU)


def _converse_as_in_plaintext(tokenizer: Tokenizer, simulation: Simulation, backend: str) -> None:
    request, later = asked(2, new=3), LATER
    plain, _ = in_plaintext(tokenizer, request, later)
    answers: list[list[int]] = []

    def program(session: PartySession) -> Any:
        session.ledger.openings.clear()
        completion = Completion.of(PRIVATE, request, backend=backend)
        turns = session.local(CLIENT, turns_of, tokenizer, completion, later)
        params = None if session.rank == CLIENT else PARAMS
        reports = conversed(
            session, completion, turns, params, lambda side: answers.append(side.tokens)
        )
        return reports, [o for o in session.ledger.openings if o.learner == "provider"]

    (reports, _), (provider_reports, openings) = simulation.run(program)
    assert answers == plain
    assert [r.steps for r in reports] == [r.steps for r in provider_reports]
    assert [r.emitted for r in provider_reports] == [[]] * 3
    labels = [o.label for o in openings]
    assert labels.count("rows of the next turn") == 2 * len(later) + 1
    of_ranges = {"whether activations left their ranges"} if backend == OWN else set()
    assert set(labels) == {"rows of the next turn", "end of text"} | of_ranges


READY: Any = {"turn_rows": 4, "ahead_steps": 2}


def ready(new: int = 5, drafts: int = 3) -> ChatRequest:
    return replace(asked(drafts, new, 120), prompt_tokens=0, **READY)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 3])
def test_turns_of_one_size_give_the_same_answers(tokenizer: Tokenizer, drafts: int) -> None:
    """The first turn comes like the others, each after rows that hold no text."""
    turns = [[40, 41, 42], *LATER, [50] * 9]
    expected, text = expected_of(turns, set())
    completion = Completion.of(PRIVATE, ready(drafts=drafts))
    talk = turns_of(tokenizer, completion, turns)
    talk.side = replace(talk.side, prompt=[])
    answers, empty = [], []

    def seen(side: ClientSide) -> None:
        answers.append(side.tokens)
        empty.append(talk.empty)

    conversed(PlaintextSession(), completion, talk, PARAMS, seen)
    assert answers == expected and [*talk.side.prompt, *talk.side.tokens] == text
    # Three tokens; four, two and ten with the answer's last one.
    assert empty == [1, 0, 2, 2]


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_what_a_turn_takes_is_made_before_it(
    tokenizer: Tokenizer, own_simulation: Simulation, drafts: int
) -> None:
    """While the client says nothing, unless it says that now is no time for it; the answers are
    those in plaintext, and nothing is made while somebody waits for one.
    """
    request, said_turns = ready(3, drafts), [[40, 41, 42], [60, 61, 62]]
    plain = turns_of(tokenizer, Completion.of(PRIVATE, request), said_turns)
    plain.side = replace(plain.side, prompt=[])
    expected: list[list[int]] = []
    conversed(
        PlaintextSession(),
        Completion.of(PRIVATE, request),
        plain,
        PARAMS,
        lambda side: expected.append(side.tokens),
    )

    class Waiting:
        """Says each turn once all is made for it."""

        def __init__(self) -> None:
            self.turns, self.looks = list(said_turns), 0
            self.stock: list[tuple[int | None, int]] = []
            self.lacking = -1

        def on_stock(self, steps: int | None, lacking: int) -> None:
            self.stock.append((steps, lacking))
            self.lacking = lacking

        def may_make(self) -> bool:
            self.looks += 1
            return self.looks > 2

        def __call__(self, seconds: float) -> list[int] | None:
            if not self.turns:
                return None
            if self.lacking != 0:
                return []
            self.lacking = -1
            return self.turns.pop(0)

    def program(session: PartySession) -> Any:
        completion, said = Completion.of(PRIVATE, request), Waiting()
        turns = session.local(CLIENT, turns_of, tokenizer, completion, [])
        if turns is not None:
            turns.next_tokens, turns.side = said, replace(turns.side, prompt=[])
        params = None if session.rank == CLIENT else PARAMS
        decoder = completion.decoder(session, share_weights(session, PRIVATE, params))
        ahead = Ahead(session, decoder, request, said.on_stock, said.may_make)
        mark, answers = len(session.meter.entries), []
        joint = Prg.from_seed(8, "joint randomness")
        for _ in converse(session, completion, decoder, turns, joint, ahead=ahead):
            answers.append(turns.side.tokens if turns is not None else [])
        made = [e for e in session.meter.entries[mark:] if e.kind == "pool"]
        return answers, said.stock, made

    (answers, stock, made), (_, theirs, _) = own_simulation.run(program)
    assert answers == expected
    assert stock == theirs and stock.count((2, 0)) >= 2
    assert made and all(entry.beside for entry in made)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"turn_rows": 0}, "prompt is empty"),
        ({"turn_rows": 513}, "1 to 512 tokens"),
        ({"ahead_steps": 257}, "256 steps"),
        ({"turn_rows": 512, "ahead_steps": 129}, "1024 rows"),
        ({"prompt_tokens": 3}, "no prompt of its own"),
        ({"verify": "post", "temperature": 0.7}, "shows which"),
    ],
)
def test_what_cannot_be_made_ahead_is_refused(options: dict[str, Any], words: str) -> None:
    ready().check_options()
    with pytest.raises(InputError, match=words):
        replace(ready(), **options).check_options()


def test_a_turn_of_another_size_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion = Completion.of(PRIVATE, ready())
    turns = turns_of(tokenizer, completion, [])
    monkeypatch.setattr(Turns, "announced", lambda *args: [3])
    with pytest.raises(WireError, match="turn of 3 rows"):
        conversed(PlaintextSession(), completion, turns, PARAMS, lambda side: None)


def test_an_answer_may_be_interrupted(tokenizer: Tokenizer) -> None:
    """And the conversation goes on."""
    completion, looks = Completion.of(PRIVATE, asked(0)), []

    def interrupted() -> bool:
        looks.append(0)
        return len(looks) == 2

    turns = turns_of(tokenizer, completion, [[60]], interrupted=interrupted)
    reasons: list[tuple[str, int]] = []
    conversed(
        PlaintextSession(),
        completion,
        turns,
        PARAMS,
        lambda side: reasons.append((side.finish_reason, len(side.tokens))),
    )
    assert reasons == [("interrupted", 2), ("length", 5)]


def test_a_turn_that_does_not_fit_is_not_announced(tokenizer: Tokenizer) -> None:
    answers, _ = in_plaintext(tokenizer, asked(0, new=4, most=20), [[60] * 8, [70]])
    assert len(answers) == 2  # 4 + 4, 8 + 1 + 3: there is no room for another one


def test_a_conversation_hides_which_drafts_stay() -> None:
    shown = ChatRequest(4, 9, 2, 0.8, "post", conversation_tokens=64)
    with pytest.raises(InputError, match="post shows which drafts stay"):
        shown.check_options()
    replace(shown, draft_length=0).check_options()


def test_a_provider_refuses_turns_that_do_not_fit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion = Completion.of(PRIVATE, asked(0))
    turns = turns_of(tokenizer, completion, [])
    for rows in (-2, 100):
        monkeypatch.setattr(Turns, "announced", lambda *args, rows=rows: [rows])
        with pytest.raises(WireError, match="turn of"):
            conversed(PlaintextSession(), completion, turns, PARAMS, lambda side: None)


def test_room_is_counted_by_what_both_know() -> None:
    room = Room(30)
    assert room.limit(10, 8) == 8
    room.take(10, Report(steps=2), 8, 3)
    assert room.taken == 17 and room.limit(5, 20) == 8 and room.limit(13, 20) == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (asked(2, most=4), "shorten it"),
        (asked(2, show_progress=True), "--show-progress"),
        (replace(asked(2, candidates=2), temperature=1.0), "--candidates"),
    ],
)
def test_requests_that_cannot_be_served(wrong: ChatRequest, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Completion.of(PRIVATE, wrong)
