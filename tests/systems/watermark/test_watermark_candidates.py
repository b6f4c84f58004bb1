"""Candidates in private completions: the tree of a step, the text, its distribution, and who sees
what.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.draft import Drafter
from models.family import logits as whole_logits
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.race import Race
from spu_llm.api.defaults import shipped
from spu_llm.compiler.demand import Demand
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding import completion, request
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.preparation import demand_of
from spu_llm.systems.decoding.records import ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import by_branch, share_weights
from spu_llm.systems.decoding.text_rows import TextRows
from spu_llm.systems.watermark.candidates import Candidates, usual_tokens
from spu_llm.systems.watermark.cdfs import Family
from spu_llm.systems.watermark.detecting import marks_of
from spu_llm.systems.watermark.detecting import uniforms as numbers_of
from spu_llm.systems.watermark.history import History, packed, unpacked
from spu_llm.systems.watermark.keys import KeyFile, Scheme, token_unit
from spu_llm.systems.watermark.private_text import USED, Mark
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.scores import log_p
from spu_llm.systems.watermark.selecting import Chooser, group_of
from spu_llm.systems.watermark.units import TokenUnits, Unit, grams, units_of
from tests.kit.models import PRIVATE, PUBLIC, endless, tiny_params
from tests.kit.pair import Pair
from tests.systems.decoding.watching import Watched
from tests.systems.watermark.chains import FALSE_ALARM, NEXT, START, Chain, key_of, p_value
from tests.systems.watermark.winners import winners_of

PARAMS, DRAFT_PARAMS = endless(tiny_params(PRIVATE, 1)), endless(tiny_params(PUBLIC, 2))
LOGITS = jax.jit(lambda tokens: whole_logits(PARAMS, PRIVATE, tokens))
PROMPT = [40, 41, 42, 43]
SCHEME = Scheme(4)


def asked(new: int, drafts: int, candidates: int, verify: str = "race") -> Completion:
    chosen = Request(len(PROMPT), new, drafts, 0.8, verify, candidates=candidates)
    return Completion.of(PRIVATE, chosen)


def streams() -> Streams:
    return Streams(Prg.from_seed(8, "drafts"), Prg.from_seed(8, "sampling"))


def candidates_of(
    plan: Completion,
    numbers: Sequence[int],
    used: Callable[[Sequence[bytes]], None] = lambda names: None,
) -> Candidates:
    chooser = Chooser(
        tuple(map(key_of, numbers)),
        SCHEME,
        TokenUnits(),
        group_of(plan.request.candidates, len(numbers), 16),
        tuple(History() for _ in numbers),
        Prg.from_seed(8, "choice"),
    )
    return Candidates(chooser, frozenset(), streams(), range(40, 90), used)


def drafter_of(plan: Completion) -> Drafter | None:
    return Drafter(PUBLIC, DRAFT_PARAMS, 80) if plan.request.draft_length else None


def side_of(
    tokenizer: Tokenizer,
    plan: Completion,
    numbers: Sequence[int],
    used: Callable[[Sequence[bytes]], None] = lambda names: None,
) -> ClientSide:
    return ClientSide(
        list(PROMPT),
        tokenizer,
        drafter_of(plan),
        plan.verifier,
        streams(),
        branching=candidates_of(plan, numbers, used),
    )


def in_the_clear(side: ClientSide, plan: Completion) -> Any:
    session = PlaintextSession()
    decoder = plan.decoder(session, share_weights(session, PRIVATE, PARAMS))
    return generate(session, plan, decoder, side, Prg.from_seed(8, "joint"))


def rows_after(text: Sequence[int], drafts: Sequence[int]) -> np.ndarray:
    """Logits [d + 1, vocab] after a text and its drafts, over the temperature, without a cache."""
    padded = np.zeros(PRIVATE.context, np.int32)
    whole = [*text, *drafts]
    padded[: len(whole)] = whole
    return np.asarray(LOGITS(padded))[len(text) - 1 : len(whole)] / 0.8


def expected_text(plan: Completion, numbers: Sequence[int]) -> list[int]:
    """Races in the clear, candidate by candidate, each over the whole text before it."""
    race, branching, drafter = plan.verifier, candidates_of(plan, numbers), drafter_of(plan)
    generated: list[int] = []
    while len(generated) < plan.limit:
        text, actual = [*PROMPT, *generated], []
        for own in branching.streams():
            drafts: list[int] = []
            if drafter is not None and generated:
                drafts, _ = drafter.propose(
                    text,
                    plan.request.draft_length,
                    lambda z, place, own=own: race.propose(z, place, own),
                )
            brought = race.client_input(drafts, np.zeros((0, PRIVATE.vocab_size)), len(text), own)
            outcome = winners_of(rows_after(text, drafts) + brought.noise, np.array(drafts))
            actual.append([*drafts[: int(outcome.accepted)], int(outcome.token)])
        generated += actual[branching.choose(generated, actual, plan.limit)]
    return generated[: plan.limit]


def log_p_under(key: int, tokens: Sequence[int]) -> float:
    """Return log p of tokens under a key."""
    placed = [Unit(token_unit(token), i, i + 1) for i, token in enumerate(tokens)]
    numbers = numbers_of(marks_of(KeyFile(key_of(key), SCHEME), placed))
    return log_p(numbers, SCHEME.family, "sum", 4, 1)


@pytest.mark.parametrize(
    ("drafts", "candidates", "keys"),
    [(2, 4, [5]), pytest.param(0, 9, [5, 7], marks=pytest.mark.slow)],
)
def test_a_text_is_that_of_candidates_one_by_one(
    tokenizer: Tokenizer, drafts: int, candidates: int, keys: list[int]
) -> None:
    """60 tokens from the tree of every step: what candidates give of which each goes over its own
    text alone. The mark is found under each of its keys, and seeds of all its n-grams are kept.
    """
    told: list[set[bytes]] = [set() for _ in keys]

    def used(names: Sequence[bytes]) -> None:
        for of_one, more in zip(told, names, strict=True):
            of_one |= unpacked(more)

    plan = asked(60, drafts, candidates)
    side = side_of(tokenizer, plan, keys, used)
    report = in_the_clear(side, plan)
    assert side.tokens == expected_text(plan, keys)
    assert report.drafted == candidates * drafts * report.steps
    if drafts:
        assert 0 < report.accepted < report.drafted
    least = math.log(1e-5 if len(keys) == 1 else 1e-4)  # three of nine each
    assert (
        all(log_p_under(key, side.tokens) < least for key in keys)
        and log_p_under(6, side.tokens) > least
    )
    units = TokenUnits().of(tuple(side.tokens))
    for key, of_one in zip(keys, told, strict=True):
        assert {key_of(key).seed(gram).name for gram in grams(units, SCHEME.ngram)} <= of_one
        assert len(of_one) > 2 * len(units)  # losers' too


@pytest.mark.parametrize("verify", ["token", pytest.param("race", marks=pytest.mark.slow)])
def test_a_block_is_packed_by_the_winners_rows(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    """The text of a block that is packed every second step is that of one that never is."""
    texts = []
    for small in (False, True):
        if small:
            for name, rows in (
                ("_SPARE_ROWS", 5),
                ("_SPARE_STEPS", 2),
                ("_LEAST_ROWS", 1),
                ("_ROWS_AT_ONCE", 8),
            ):
                monkeypatch.setattr(request, name, rows)
        plan = asked(20, 2, 3, verify)
        assert plan.layout.packs == small
        side = side_of(tokenizer, plan, [5])
        in_the_clear(side, plan)
        texts.append(side.tokens)
    assert texts[0] == texts[1] and len(texts[0]) == 20


# ---- the tree


@given(st.data())
def test_rows_of_a_tree(data: st.DataObject) -> None:
    """What a row sees is the text, the first row of its step, and its own branch up to itself; it
    stands after them. Rows that the client does not retain are seen by nobody later.
    """
    branches = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    rows, lanes = TextRows(lengths, branches), len(lengths)
    text = [set(range(n)) for n in lengths]
    for _ in range(data.draw(st.integers(1, 3))):
        drafts = data.draw(st.integers(0, 3))
        count, first = 1 + branches * drafts, rows.written
        positions, visible = rows.place(count, first + count + 2, 1000)
        tree = {0: {0}} | {
            1 + b * drafts + i: {0, *(1 + b * drafts + j for j in range(i + 1))}
            for b in range(branches)
            for i in range(drafts)
        }
        for lane, row in itertools.product(range(lanes), range(count)):
            seen = text[lane] | {first + other for other in tree[row]}
            assert set(np.flatnonzero(visible[lane, row])) == seen
            assert positions[lane, row] == len(seen) - 1
        retained = np.zeros((lanes, count), bool)
        for lane in range(lanes):
            won, stay = (data.draw(st.integers(0, most)) for most in (branches - 1, drafts))
            retained[lane, [0, *range(1 + won * drafts, 1 + won * drafts + stay)]] = True
            text[lane] |= {first + int(row) for row in np.flatnonzero(retained[lane])}
        rows.add(retained, count)
    live = max(map(len, text))
    kept = rows.pack(live)
    assert [set(row[row >= 0]) for row in kept] == text
    np.testing.assert_array_equal(rows.place(1, live + 1, 1000)[0][:, 0], list(map(len, text)))


def test_branches_are_judged_by_their_own_rows() -> None:
    rows = np.arange(2 * 7 * 5).reshape(2, 7, 5)
    judged = np.asarray(by_branch(jax.numpy.asarray(rows), 3))
    assert judged.shape == (6, 3, 5)
    for lane, branch in itertools.product(range(2), range(3)):
        own = rows[lane, [0, 1 + 2 * branch, 2 + 2 * branch]]
        np.testing.assert_array_equal(judged[3 * lane + branch], own)
    one = np.asarray(by_branch(jax.numpy.asarray(rows[:, :1]), 3))
    np.testing.assert_array_equal(one, np.repeat(rows[:, :1], 3, axis=0))


def test_every_row_of_a_step_is_counted() -> None:
    for candidates, drafts in ((4, 3), (16, 16), (2, 0)):
        one = Request(6, 240, drafts, 0.7, candidates=candidates)
        assert one.step_rows == 1 + candidates * drafts and one.hide_progress
        config = PRIVATE.with_context(256)
        sizes = one.sizes(config)
        assert sizes[0] >= 6 + one.step_rows
        assert sizes[-1] <= 6 + 239 * one.step_rows
        if one.may_pack(config):  # and there is room for steps after it
            assert sizes[-1] >= one.live_rows(config) + 2 * one.step_rows
        layout = Completion.of(config, one).layout
        assert layout.judged == candidates and layout.drafts(one.step_rows) == drafts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"candidates": 0}, "--candidates must be 2 to 16"),
        ({"candidates": 17}, "--candidates must be 2 to 16"),
        ({"show_progress": True}, "--show-progress"),
        ({"verify": "post"}, "--verify token or race"),
        ({"verify": "naive"}, "--verify token or race"),
        ({"verify": "marked"}, "--verify token or race"),
        ({"temperature": 0.0, "draft_length": 0}, "without drafts .* --temperature 0"),
    ],
)
def test_candidates_that_cannot_be_served(change: dict[str, Any], words: str) -> None:
    fields = {
        "prompt_tokens": 4,
        "max_new_tokens": 8,
        "draft_length": 3,
        "temperature": 1.0,
        "verify": "token",
        "candidates": 4,
    } | change
    with pytest.raises(InputError, match=words):
        Request(**fields).check(PRIVATE)


# ---- the distribution


class Letters:
    """The chain's three tokens, of which the last one may end the text."""

    vocab_size = 3
    special_tokens: Mapping[str, int] = {}

    def __init__(self, ends: Iterable[int] = ()) -> None:
        self.eos_ids = frozenset(ends)

    def token_bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(b"abc"[i] for i in ids)


def row_after(model: np.ndarray, text: Sequence[int]) -> np.ndarray:
    return np.log(model[text[-1]] if len(text) > 1 else START)


class OfOtherRows:
    """A drafter by another chain."""

    def propose(self, text: list[int], count: int, pick: Any) -> Any:
        drafts: list[int] = []
        for i in range(count):
            drafts.append(pick(row_after(NEXT[::-1], [*text, *drafts]), len(text) + i)[0])
        return drafts, np.zeros((count, 3))


def written(
    number: int,
    turn: int,
    tokens: int,
    drafts: int,
    histories: Sequence[History],
    ends: Iterable[int] = (),
) -> tuple[int, ...]:
    """Return a text of the chain, marked by three candidates a step, or by two for each of several
    keys; a race in the clear is the judge.
    """
    keys = tuple(key_of(number + 10_000 * i) for i in range(len(histories)))
    letters: Any = Letters(ends)
    own = Streams(*(Prg.from_seed(2 * number + turn, name) for name in ("drafts", "sampling")))
    drafter: Any = OfOtherRows()
    side = ClientSide(
        [0],
        letters,
        drafter,
        Race(Sampling(), hide_progress=True),
        own,
        branching=Candidates(
            Chooser(
                keys,
                Scheme(2),
                TokenUnits(),
                3 if len(keys) == 1 else 2,
                tuple(histories),
                own.sampling.child("choice"),
            ),
            letters.eos_ids,
            own,
            range(3),
        ),
    )
    side.propose(0)
    while not side.finish_reason:
        text, outcomes = [0, *side.tokens], []
        for own_drafts, noise in side.verifier_inputs():
            rows = [row_after(NEXT, [*text, *own_drafts[:i]]) for i in range(len(noise))]
            outcomes.append(winners_of(np.stack(rows) + noise, own_drafts))
        side.resolve(outcomes, tokens)
        side.propose(drafts)
    return tuple(side.tokens)


WANTED = Chain(Prg.from_seed(0, "unused")).text_distribution(4)


@pytest.mark.parametrize(
    ("drafts", "kept", "keys"),
    [
        (2, True, 1),
        (0, False, 1),
        pytest.param(0, True, 1, marks=pytest.mark.slow),
        pytest.param(1, True, 2, marks=pytest.mark.slow),
    ],
)
def test_a_marked_text_has_the_distribution_of_the_model(
    drafts: int, kept: bool, keys: int
) -> None:
    """Four tokens under each of 1,000 fresh keys, or pairs of them: the distribution of the chain.
    False alarm: 1e-6. Where a text's own seeds decide again, it does not pass.
    """
    texts = [
        written(number, 0, 4, drafts, [History(kept) for _ in range(keys)])
        for number in range(1000)
    ]
    assert (p_value(texts, WANTED) > FALSE_ALARM) == kept


def test_a_text_ends_where_the_models_does() -> None:
    """The same where one of the tokens ends a text."""
    distribution: dict[tuple[int, ...], float] = {}
    for text, p in WANTED.items():
        short = tuple(itertools.takewhile(lambda token: token != 2, text))
        distribution[short] = distribution.get(short, 0.0) + p
    texts = [written(number, 0, 4, 1, [History()], [2]) for number in range(600)]
    assert p_value(texts, distribution) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_texts_of_a_key_have_the_distribution_together(kept: bool) -> None:
    """Two texts of two tokens under each of 1,200 keys. False alarm: 1e-6. Where the second text
    does not know of the first one, it does not pass.
    """
    distribution = Chain(Prg.from_seed(0, "unused")).text_distribution(2)
    both = {
        (one, two): distribution[one] * distribution[two]
        for one in distribution
        for two in distribution
    }
    drawn = []
    for number in range(1200):
        history = History(kept)
        drawn.append(tuple(written(number, turn, 2, 1, [history]) for turn in range(2)))
    assert (p_value(drawn, both) > FALSE_ALARM) == kept


def test_a_rehearsal_chooses_as_much_as_a_text_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of words, too: about as many as tokens, new ones in every candidate, and no history of it."""
    tokenizer, heard = Tokenizer.load(shipped("public")), []
    units, whole = units_of("words", tokenizer), Chooser.chosen

    def chosen(chooser: Chooser, drawn: Sequence[Drawn], before: Any) -> Any:
        heard.append((drawn, before))
        return whole(chooser, drawn, before)

    monkeypatch.setattr(Chooser, "chosen", chosen)
    history = History()
    chooser = Chooser((key_of(1),), Scheme(units="words"), units, 4, (history,), streams().sampling)
    branching = Candidates(chooser, tokenizer.eos_ids, streams(), usual_tokens(tokenizer))
    branching.rehearse(3, 200)
    ((drawn, before),) = heard
    assert len(before) == 196 == len(units.of(before)) and len(set(before)) > 100
    assert [len(units.of(one.content)) for one in drawn] == [4] * 4
    assert len({token for one in drawn for token in one.content}) == 16
    assert len(history) == 0


# ---- between two parties


@pytest.mark.slow
def test_the_provider_sees_the_same_whatever_wins(
    tokenizer: Tokenizer, own_simulation: Simulation
) -> None:
    """Under two keys, by which other candidates win and more of their drafts stay: each time two
    parties write the text of the clear, and all messages are of the same sizes in the same order,
    until the shorter run ends; correlated randomness made ahead suffices.
    """
    plan = asked(5, 2, 2)

    def run(number: int) -> Any:
        def program(session: PartySession) -> Any:
            session.ledger.openings.clear()
            began = len(session.meter.entries)
            watched: Any = Watched(session)
            client = session.local(CLIENT, side_of, tokenizer, plan, [number])
            provider = session.local(PROVIDER, Prg.from_seed, 8, "joint")
            weights = share_weights(session, PRIVATE, PARAMS if session.rank == PROVIDER else None)
            report = generate(watched, plan, plan.decoder(watched, weights), client, provider)
            sent = [
                (e.phase, e.kind, e.name, e.function, e.traffic)
                for e in session.meter.entries[began:]
                if e.phase in ("prefill", "decode")
                and e.name != "agree on plan"
                and e.kind not in ("pool", "wait")
            ]
            course = demand_of(session.dry(), plan, weights, report.steps)
            for name, need in sum(course, Demand()).correlations.items():
                assert watched.units[name] == need.units, name
            openings = [(o.learner, o.label, o.count) for o in session.ledger.openings]
            return client and client.tokens, sent, session.ledger.learned(), openings, report

        return own_simulation.run(program)

    runs, texts = [], []
    for number in (5, 6):
        clear = side_of(tokenizer, plan, [number])
        in_the_clear(clear, plan)
        texts.append(clear.tokens)
        runs.append(run(number))
        assert runs[-1][0][0] == clear.tokens
    (one, of_provider), (other, also) = runs
    assert one[4].emitted[:2] != other[4].emitted[:2] and texts[0][0] != texts[1][0]
    for some, more in ((one, other), (of_provider, also)):
        for i in (1, 3):
            assert 10 < len(some[i]) < len(more[i]) and more[i][: len(some[i])] == some[i]
        facts, others = (re.sub(r"\d+", "n", str(run[2])) for run in (some, more))
        assert facts == others
    assert of_provider[4].accepted == 0 and of_provider[4].emitted == []
    learned = one[2]
    assert "number of candidates: 2" in learned["provider"]
    assert any("each of 2 candidates a step" in fact for fact in learned["client"])
    to_provider = {label for learner, label, _ in one[3] if learner == "provider"}
    assert to_provider == {"end of text", "whether activations left their ranges"}


# ---- on its way


def test_seeds_are_told_before_their_text(pair: Pair) -> None:
    """As the worker makes its side of its inputs; two keys of words, another family."""
    secrets = [key_of(number).secret.hex() for number in (4, 5)]
    mark = Mark(secrets, 3, ["", b"12345678".hex()], "candidates", "words", "gamma", 2).rules
    inputs = ClientInputs(list(PROMPT), str(pair.public), [], 1, 1, mark, str(pair.public))
    events: list[tuple[str, dict[str, Any]]] = []
    plan = asked(12, 2, 4)
    side = completion.client_side_of(inputs, plan, lambda event, **f: events.append((event, f)))
    branching = side.branching
    assert isinstance(branching, Candidates)
    chooser = branching.chooser
    assert chooser.scheme == Scheme(3, Family("gamma", 2), "words")
    assert chooser.keys == (key_of(4), key_of(5)) and chooser.m == 2
    assert [b"12345678" in history for history in chooser.histories] == [False, True]
    in_the_clear(side, plan)
    told = [set[bytes](), {b"12345678"}]
    for event, fields in events:
        if event == USED:
            for of_one, names in zip(told, fields["names"], strict=True):
                of_one |= unpacked(bytes.fromhex(names))
    assert [packed(of_one) for of_one in told] == [h.packed() for h in chooser.histories]
    assert "".join(fields["text"] for event, fields in events if event == "text") == side.text
    assert [event for event, _ in events[:2]] == [USED, "text"]
    assert sum(event == USED for event, _ in events) > 3 and len(side.tokens) == 12
    race, elsewhere = Mark(secrets[:1], 3, [""]).rules, "candidates where a key chooses"
    for wrong, of, words in (
        (asked(12, 2, 1), mark, elsewhere),
        (plan, race, elsewhere),
        (asked(12, 2, 3), mark, "2 keys .* among 4 or 9 or 16 candidates, found 3"),
    ):
        given = ClientInputs(list(PROMPT), str(pair.public), mark=of)
        with pytest.raises(InputError, match=words):
            completion.client_side_of(given, wrong, lambda event, **fields: None)
