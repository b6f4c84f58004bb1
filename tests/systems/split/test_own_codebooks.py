"""A1 by a host that trains its inverter under codebooks that it draws as the client's was drawn."""

from __future__ import annotations

import numpy as np

from models.family import Params
from spu_llm.core.prg import Prg
from spu_llm.systems.outcome import AttackOutcome
from spu_llm.systems.split import vocabulary
from spu_llm.systems.split.attacks import suite
from spu_llm.systems.split.attacks.own_codebooks import CodebookInverter, Drawing
from spu_llm.systems.split.attacks.suite import Session
from spu_llm.systems.split.attacks.trained import Inverters
from spu_llm.systems.split.attacks.views import HostView, Texts, of_front
from spu_llm.systems.split.ends import client_ends, table_of
from tests.systems.split.hosts import GPT2, LENGTH, ONES, params_of, public_of, zipf_texts

WEAK, STRONG = (Drawing("grr", e * GPT2.width) for e in (6.0, 13 / 4096))  # 0.9 and 0.02 kept


def under_codebook(params: Params, drawing: Drawing, texts: Texts, prg: Prg) -> list[np.ndarray]:
    """Return rows of texts as a client has them under one codebook."""
    codebook = vocabulary.draw_codebook(table_of(params, GPT2), *drawing, prg)
    return of_front(client_ends(params, GPT2, ONES, codebook)[0], GPT2, texts)


def outcomes(drawing: Drawing) -> list[AttackOutcome]:
    """Return what A1 finds of 20 texts under a codebook of this drawing, and of public text under
    further ones.
    """
    public, params = public_of(GPT2), params_of(GPT2)
    own = CodebookInverter(public, params, drawing, steps=60)
    texts = zipf_texts(20, 2)
    view = HostView(under_codebook(params, drawing, texts, Prg.from_seed(0, "the client's")))
    inverters, others = Inverters(public), zipf_texts(100, 3)
    session = Session("noir", view, inverters, texts, 6, 6, others, codebooks=own)
    return [*suite.ATTACKS["a1-codebooks"](session)]


def test_a_weak_codebook_is_read() -> None:
    """Chance is how often guesses are right for other texts: less than a fifth."""
    for outcome in outcomes(WEAK):
        assert outcome.tries == 20 * LENGTH and outcome.chance < 0.2
        assert outcome.rate >= 0.8 and outcome.by_luck < 1e-3, outcome.line()


def test_a_strong_codebook_is_not() -> None:
    """Guesses are as good for other texts: chance, which is at most the most frequent token's."""
    for outcome in outcomes(STRONG):
        assert outcome.chance < 0.2 and outcome.by_luck > 1e-3, outcome.line()
        assert outcome.rate < outcome.chance + 0.1, outcome.line()


def test_every_few_texts_have_a_codebook_of_their_own() -> None:
    """Rows are those of a client with it."""
    own = CodebookInverter(public_of(GPT2), params_of(GPT2), STRONG)
    texts = [[5] * LENGTH] * 40
    rows = own.rows(texts, Prg.from_seed(1, "t"))
    for few in (rows[:16], rows[16:32], rows[32:]):
        assert len({r.tobytes() for r in few}) == 1
    assert len({r.tobytes() for r in rows}) == 3
    wanted = under_codebook(params_of(GPT2), STRONG, texts[:16], Prg.from_seed(1, "t"))
    np.testing.assert_allclose(rows[:16], wanted, atol=1e-5)
    assert not np.array_equal(own.rows(texts[:16], Prg.from_seed(2, "t"))[0], rows[0])


def test_without_a_codebook_there_is_nothing_to_try() -> None:
    public, texts = public_of(GPT2), zipf_texts(2, 2)
    session = Session("plain", HostView(public.front(texts)), Inverters(public), texts, 6, 6)
    assert not [*suite.ATTACKS["a1-codebooks"](session)]
