"""All attacks on one session's view, each judged by what it claims to find.

Names are the digest's of NOIR (§3): a1 to a6, a8 to a12; a1-codebooks is A1 by an inverter that is
trained under codebooks of the host's own. What an attack cannot be run on (there is no tuning on
shares, and no codebook without NOIR) it yields nothing for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from spu_llm.systems.outcome import AttackOutcome
from spu_llm.systems.split.attacks import (
    adversarial,
    beginnings,
    bisr,
    counting,
    inversion,
    labels,
    reading,
    scored,
    templates,
    trained,
)
from spu_llm.systems.split.attacks.own_codebooks import CodebookInverter
from spu_llm.systems.split.attacks.trained import Inverters
from spu_llm.systems.split.attacks.views import HostView, Public, Texts, labels_of

TOKEN = "the right token in its place"
CODE = "the right generated token in its place"


@dataclass(frozen=True)
class Tuned:
    """Rounds of tuning, as the host saw them with its honest middle and with that of A12; their
    texts, of one token more than rows; LTokenizer's label of each token.
    """

    honest: HostView
    adversarial: HostView
    texts: Texts
    relabelled: np.ndarray | None = None


@dataclass(frozen=True)
class Session:
    """The view of the host, the truth, and how much work the host does.

    inverters: of the public model, those of A1, A3 and A4; they outlive the session. texts: what
    the rows are of; the first `prompt` tokens of each are the client's prompt, the others what the
    model said, of which A10's host knows the first `template`. others: more such texts, which the
    host does not see. beginnings: a view of texts some of which begin alike, and these. prefixed: a
    view of texts each after random tokens of its own, of which 0 and 1, 2 and 3, and so on, begin
    alike but for these. iterations: of matching (A4). codebooks: an inverter for codebooks that are
    drawn as the client's is (A1), where the client has one.
    """

    mode: str
    view: HostView
    inverters: Inverters
    texts: list[list[int]]
    prompt: int
    template: int
    others: Texts = ()
    beginnings: tuple[HostView, Texts] | None = None
    prefixed: HostView | None = None
    tuned: Tuned | None = None
    iterations: int = bisr.ITERATIONS
    codebooks: CodebookInverter | None = None

    @property
    def public(self) -> Public:
        return self.inverters.public

    def judged(
        self,
        attack: str,
        guess: Texts,
        how: str = "",
        what: str = TOKEN,
        counted: slice = slice(None),
        notes: str = "",
    ) -> AttackOutcome:
        what = f"{what}, {how}" if how else what
        return scored.of_tokens(
            attack, self.mode, what, guess, self.texts, self.others, counted, notes
        )

    def won(
        self, attack: str, guess: Texts, how: str, counted: slice = slice(None)
    ) -> Iterator[AttackOutcome]:
        """Yield scores by the paper's rules, where there is a tokenizer to make text of tokens."""
        if (tokenizer := self.public.tokenizer) is not None:
            yield from scored.of_texts(
                attack, self.mode, how, guess, self.texts, self.others, tokenizer, counted
            )


def a1(session: Session) -> Iterator[AttackOutcome]:
    """Yield the outcomes of A1, beside what inverters find in public text without a codebook: a
    guess is no better than chance by a codebook only where they are good there.
    """
    inverters, said = session.inverters, "{:.1%} of public text that it was not trained on"
    known = inverters.on_public
    first = inverters.base.tokens(session.view.rows)
    yield session.judged("A1", first, "by the inverter", notes=said.format(known.base))
    guess = trained.attack(session.view, inverters)
    yield session.judged(
        "A1", guess, "by inverter and corrector", notes=said.format(known.corrected)
    )
    yield from session.won("A1", guess, "by inverter and corrector")


def a1_codebooks(session: Session) -> Iterator[AttackOutcome]:
    """Yield the outcomes of A1 by an inverter trained under codebooks of the host's own; and what
    it finds in public text under further ones behind the public front: whether it has learnt to
    read through codebooks at all.
    """
    if (own := session.codebooks) is not None:
        how = "by an inverter trained under codebooks of the host's own"
        guess = own.inverter.tokens(session.view.rows)
        yield session.judged("A1", guess, how)
        yield from session.won("A1", guess, how)
        what = f"the right token of public text under a further codebook, {how}"
        yield scored.of_tokens("A1", session.mode, what, *own.on_public)


def a2(session: Session) -> Iterator[AttackOutcome]:
    guess, prompt = reading.attack(session.view, session.public), session.prompt
    yield session.judged("A2", guess, "by the public back", CODE, slice(prompt, None))
    yield session.judged(
        "A2", guess, "by the public back", "the right next token of a prompt", slice(1, prompt)
    )
    yield from session.won("A2", guess, "of generated code", slice(prompt, None))
    shifted = [[*text[1:], -1] for text in guess]
    yield session.judged("A2", shifted, "by the public back", "the right token of the row itself")


def a3(session: Session) -> Iterator[AttackOutcome]:
    """Yield A3's outcomes, from the prompts that A1's inverter finds and those that A2 reads."""
    prompt = session.prompt
    count = min(map(len, session.texts)) - prompt
    for how, guess in (
        ("A1", session.inverters.base.tokens(session.view.rows)),
        ("A2", reading.attack(session.view, session.public)),
    ):
        prompts = [text[:prompt] for text in guess]
        said = reading.of_prompts(session.public, prompts, count)
        whole = [[*p, *more] for p, more in zip(prompts, said, strict=True)]
        counted = slice(prompt, prompt + count)
        yield session.judged("A3", whole, f"after the prompt that {how} found", CODE, counted)
        yield from session.won("A3", whole, f"after the prompt that {how} found", counted)


def a4(session: Session) -> Iterator[AttackOutcome]:
    base, public = session.inverters.base, session.public
    first = base.tokens(session.view.rows)
    yield session.judged("A4", first, "by the inverter")
    guess = bisr.by_embeddings(session.view, public, first, session.iterations)
    yield session.judged("A4", guess, "by matching embeddings")
    yield from session.won("A4", guess, "by matching embeddings")
    if (tuned := session.tuned) is not None:
        assert tuned.honest.tuning_rows is not None
        first = base.tokens(tuned.honest.tuning_rows)
        guess = bisr.by_gradients(tuned.honest, public, first, session.iterations)
        yield _of_labels(session, tuned, "A4", guess, "by matching gradients")


def a5(session: Session) -> Iterator[AttackOutcome]:
    grouped = counting.groups(session.view, session.public)
    yield scored.of_pairs(
        "A5", session.mode, "two rows said to be of the same token", grouped, session.texts
    )
    yield scored.of_nearest(
        "A5",
        session.mode,
        "the nearest row of another text is of the same token",
        counting.nearest(session.view, session.public),
        session.texts,
    )
    for k in (1, 3):
        guess = counting.by_frequency(grouped, session.public, k)
        yield session.judged("A5", guess, f"by how frequent it is, k = {k}")
        yield from session.won("A5", guess, f"by how frequent it is, k = {k}")


def a6(session: Session) -> Iterator[AttackOutcome]:
    grouped = counting.groups(session.view, session.public)
    for way in counting.WAYS:
        guess = counting.by_place(session.view, session.public, way, grouped)
        yield session.judged("A6", guess, f"by what is at a place, grouped by {way}")
        yield from session.won("A6", guess, f"by what is at a place, grouped by {way}")


def a8(session: Session) -> Iterator[AttackOutcome]:
    guess = inversion.attack(session.view, session.public)
    pairs = zip(guess, session.texts, strict=True)
    whole = sum(list(guessed) == list(text) for guessed, text in pairs)
    yield session.judged("A8", guess, "by trying all", notes=f"{whole} of {len(guess)} texts whole")
    yield from session.won("A8", guess, "by trying all")


def a9(session: Session) -> Iterator[AttackOutcome]:
    if session.beginnings is not None:
        view, texts = session.beginnings
        guess, true = beginnings.attack(view), beginnings.truth(texts)
        yield scored.of_beginnings("A9", session.mode, guess, true)
    if session.prefixed is not None:
        twins = beginnings.twins(session.prefixed, session.public)
        what = "after a random prefix, the other text that begins alike"
        yield scored.of_twins("A9", session.mode, what, twins)


def a10(session: Session) -> Iterator[AttackOutcome]:
    known = [text[: session.template] for text in session.texts]
    guess = templates.attack(session.view, session.public, known)
    there = {token for text in known for token in text}
    rest = [token for text in session.texts for token in text[session.template :]]
    share = sum(token in there for token in rest) / len(rest)
    yield session.judged(
        "A10",
        guess,
        f"the first {session.template} of each text known",
        counted=slice(session.template, None),
        notes=f"{share:.1%} of the others are among those known",
    )
    yield from session.won(
        "A10", guess, f"the first {session.template} known", slice(session.template, None)
    )


def a11(session: Session) -> Iterator[AttackOutcome]:
    if (tuned := session.tuned) is not None:
        groups = labels.attack(tuned.honest, session.public)
        yield scored.of_pairs(
            "A11", session.mode, "two labels said to be equal", groups, labels_of(tuned.texts)
        )
        guess = labels.matched(groups, session.public)
        yield _of_labels(session, tuned, "A11", guess, "by how frequent its gradient is")


def a12(session: Session) -> Iterator[AttackOutcome]:
    if (tuned := session.tuned) is not None:
        guess = adversarial.attack(tuned.adversarial, session.public)
        how = "by gradients of rows of the host's choice"
        if tuned.relabelled is not None:
            yield scored.of_tokens(
                "A12",
                session.mode,
                f"the label as the client calls it, {how}",
                guess,
                labels_of(tuned.texts, tuned.relabelled),
            )
        yield _of_labels(session, tuned, "A12", guess, how)
        yield scored.of_pairs(
            "A12",
            session.mode,
            f"two labels said to be equal, {how}",
            guess,
            labels_of(tuned.texts),
        )


def _of_labels(
    session: Session, tuned: Tuned, attack: str, guess: Texts, how: str
) -> AttackOutcome:
    """Score guesses of the next tokens of the tuning texts."""
    return scored.of_tokens(
        attack,
        session.mode,
        f"the right next token of a tuning text, {how}",
        guess,
        labels_of(tuned.texts),
        [text[1:] for text in session.others],
    )


ATTACKS: dict[str, Callable[[Session], Iterator[AttackOutcome]]] = {
    "a1": a1,
    "a1-codebooks": a1_codebooks,
    "a2": a2,
    "a3": a3,
    "a4": a4,
    "a5": a5,
    "a6": a6,
    "a8": a8,
    "a9": a9,
    "a10": a10,
    "a11": a11,
    "a12": a12,
}
