"""Attacks on split models run: texts, the host's view of them, and what comes of it.

Modes plain and noir: the view is made in this process by the functions that a client runs, from the
client's weights (`spu_llm.systems.split.attacks.views`); what a provider receives in a session is
these rows, up to the rounding of the precision on the wire. noir without --secrets: the codebook is
drawn, and nothing is tuned.

Mode mpc: a real session (`spu_llm.attacks.split_views`). Of the client's rows its host sees how
many they are, and a uniform word for each of their numbers. Each attack is run on these words, and
on the words that they hide (mode "mpc, unmasked"), where it shows what it would find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np

from models.family import ModelConfig, Params, family_of
from models.hf import load_model
from models.split import Split
from models.tokenizer import Tokenizer
from models.training.corpus import list_files
from models.training.snippets import cut_snippets
from spu_llm.attacks.prompts import held_out
from spu_llm.attacks.request import AttackConfig
from spu_llm.attacks.split_views import views_of_middle
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.systems.outcome import AttackOutcome
from spu_llm.systems.split import ltokenizer, vocabulary
from spu_llm.systems.split.attacks import adversarial, beginnings, norms, reading, suite
from spu_llm.systems.split.attacks.own_codebooks import CodebookInverter, Drawing
from spu_llm.systems.split.attacks.suite import Session, Tuned
from spu_llm.systems.split.attacks.trained import Inverters
from spu_llm.systems.split.attacks.views import HostView, Middle, Public, Texts, of_front, of_tuning
from spu_llm.systems.split.beginning import NONE
from spu_llm.systems.split.ends import client_ends, table_of, with_table, without_table
from spu_llm.systems.split.secure_viewed import as_rows
from spu_llm.systems.split.state import ClientSecrets

PROMPT, GENERATED = 32, 32  # tokens of a text
LENGTH = PROMPT + GENERATED
TEMPLATE = 16  # tokens that A10's host knows
OTHERS = 200  # texts beside these, that say what chance is
PAIRS = 40  # of texts that begin alike (A9), where their views cost nothing but a forward
SNIPPETS, SNIPPET = 1500, 500  # of public text, of so many characters at most
BUDGET = 13 / 4096  # of a feature: the paper's epsilon and width


class Client(NamedTuple):
    """front, back: folded weights; relabelled: LTokenizer's label of each token; drawing: how the
    codebook was drawn, where there is one.
    """

    front: Params
    back: Params
    relabelled: np.ndarray | None
    drawing: Drawing | None = None


class Setting(NamedTuple):
    config: ModelConfig
    params: Params
    public: Public
    pieces: list[list[int]]  # of held-out text, of one token more than texts have
    source: np.random.Generator


def setting_of(wanted: AttackConfig) -> Setting:
    config, params = load_model(wanted.model)
    split = Split(*wanted.split)
    split.check(config)
    if config.context < LENGTH:
        raise InputError(f"{wanted.model} holds {config.context} tokens; attacks take {LENGTH}")
    tokenizer = Tokenizer.load(wanted.model)
    wanted.on_stage("public text")
    # As if of held-out files: no other text is cut.
    files = [replace(f, held_out=True) for f in list_files() if not f.held_out]
    encoded = (
        tokenizer.encode(s.text) for s in cut_snippets(files, SNIPPETS, SNIPPET, wanted.seed)
    )
    texts = [tokens[:LENGTH] for tokens in encoded if len(tokens) >= LENGTH]
    public = Public(config, family_of(config).fold(params, config), split, texts, tokenizer)
    pieces = [
        text[at : at + LENGTH + 1]
        for text in held_out(tokenizer)
        for at in range(0, len(text) - LENGTH, LENGTH + 1)
    ]
    source = np.random.default_rng(wanted.seed)
    order = source.permutation(len(pieces))
    return Setting(config, params, public, [pieces[i] for i in order], source)


def plain(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    """Attack mode plain: the client's ends are the public ones; tuning is without protection."""
    attacker = Attacker(wanted)
    front, _, back = attacker.setting.public.parts
    yield from attacker.outcomes("plain", Client(front, back, None))


def noir(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    """Attack mode noir: with a codebook and a permutation, tuned where there are secrets."""
    attacker = Attacker(wanted)
    find = _drawn if wanted.secrets is None else _tuned
    yield from attacker.outcomes("noir", find(wanted, attacker.setting))


def _tuned(wanted: AttackConfig, setting: Setting) -> Client:
    """Return the client of a tuning's secrets. The host's LoRA is left out: attacks are with the
    public middle.
    """
    assert wanted.secrets is not None
    config, public = setting.config, setting.public
    secrets = ClientSecrets.load(wanted.secrets.absolute(), config)
    if secrets.split != public.split:
        raise InputError(
            f"--secrets were tuned with --split {secrets.split.front},{secrets.split.back}; give "
            "the same"
        )
    front, _ = client_ends(setting.params, config, public.split, secrets.codebook)
    _, table = without_table(front, config)
    drawn = secrets.mechanism != NONE
    return Client(
        with_table(secrets.front, table, config),
        secrets.back,
        np.asarray(secrets.permutation),
        Drawing(secrets.mechanism, secrets.epsilon) if drawn else None,
    )


def mpc(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    """Attack mode mpc, in a real session of two processes: the words that the provider received,
    decoded as the normalised rows that they hide, in place of rows; then the same words without
    their masks. There is no tuning.
    """
    setting = setting_of(wanted)
    sample = _texts(wanted, setting, wanted.prompts)
    of_a9 = _wants(wanted.attacks, "a9")
    more = [*sample.alike, *sample.prefixed] if of_a9 else []
    views = views_of_middle(
        wanted.model, setting.public.split, [*sample.attacked, *more], wanted.on_stage
    )
    inverters = Inverters(setting.public, seed=wanted.seed)
    ends = np.cumsum([len(sample.attacked), len(sample.alike)])
    parts = [*map(slice, [0, *ends], [*ends, None])]
    for mode, words in (("mpc", views.received), ("mpc, unmasked", views.unmasked)):
        normed = [as_rows(of_text, SpuConfig().frac_bits) for of_text in words]
        rows = norms.before_norm(setting.public, normed)
        seen, alike, prefixed = (HostView(rows[part]) for part in parts)
        session = Session(
            mode,
            seen,
            inverters,
            sample.attacked,
            PROMPT,
            TEMPLATE,
            sample.others,
            (alike, sample.alike) if of_a9 else None,
            prefixed if of_a9 else None,
        )
        yield from _attacked(wanted, session, wanted.attacks)


def _drawn(wanted: AttackConfig, setting: Setting) -> Client:
    config, params, public = setting[:3]
    prg = Prg.from_seed(wanted.seed, "attack noir")
    drawing = Drawing(
        wanted.mechanism or vocabulary.DEFAULT,
        BUDGET * config.width if wanted.epsilon is None else wanted.epsilon,
    )
    wanted.on_stage(f"codebook, {drawing.mechanism}, epsilon {drawing.epsilon:g}")
    table = vocabulary.draw_codebook(table_of(params, config), *drawing, prg.child("codebook"))
    tau = ltokenizer.Permutation.draw(config.vocab_size, prg.child("permutation"))
    return Client(*client_ends(params, config, public.split, table), tau.forward, drawing)


class Attacker:
    """Attacks views that are made in this process, all of the same texts, with the same inverters.
    texts: what is attacked, token ids; of each the first `PROMPT` are the prompt. Which attacks:
    those that are wanted, unless others are named.
    """

    def __init__(self, wanted: AttackConfig) -> None:
        self._wanted = wanted
        self.setting = setting_of(wanted)
        self.inverters = Inverters(self.setting.public, seed=wanted.seed)
        self._codebooks: dict[Drawing, CodebookInverter] = {}
        self._sample = _texts(wanted, self.setting, 2 * PAIRS)
        self.texts = self._sample.attacked

    def outcomes(
        self, mode: str, client: Client, attacks: Sequence[str] | None = None
    ) -> Iterator[AttackOutcome]:
        """Yield what the host of this client finds out."""
        names = self._wanted.attacks if attacks is None else attacks
        config, public, sample = self.setting.config, self.setting.public, self._sample
        self._wanted.on_stage(f"{mode}: views")

        def seen(texts: Texts) -> HostView:
            return HostView(of_front(client.front, config, texts))

        def tuned_by(middle: Middle) -> HostView:
            ends = client.front, client.back
            return of_tuning(ends, config, middle, sample.tuning, client.relabelled)

        session = self._session(mode, seen(sample.attacked))
        if _wants(names, "a9"):
            alike = seen(sample.alike), sample.alike
            session = replace(session, beginnings=alike, prefixed=seen(sample.prefixed))
        if client.drawing is not None:
            session = replace(session, codebooks=self._inverter_for(client.drawing))
        if _wants(names, "a4", "a11", "a12"):
            honest, adverse = tuned_by(public.middle), tuned_by(adversarial.middle(public))
            tuned = Tuned(honest, adverse, sample.tuning, client.relabelled)
            session = replace(session, tuned=tuned)
        yield from _attacked(self._wanted, session, names)

    def of_rows(self, mode: str, rows: list[np.ndarray]) -> Iterator[AttackOutcome]:
        """Yield what a host finds out from rows of the texts alone."""
        session = self._session(mode, HostView(rows))
        yield from _attacked(self._wanted, session, self._wanted.attacks)

    def _inverter_for(self, drawing: Drawing) -> CodebookInverter:
        """Return the inverter for codebooks of a drawing, the same for all clients."""
        setting = self.setting
        if drawing not in self._codebooks:
            self._codebooks[drawing] = CodebookInverter(
                setting.public, setting.params, drawing, seed=self._wanted.seed
            )
        return self._codebooks[drawing]

    def _session(self, mode: str, seen: HostView) -> Session:
        return Session(
            mode, seen, self.inverters, self.texts, PROMPT, TEMPLATE, self._sample.others
        )


class Sample(NamedTuple):
    """attacked: beginnings of held-out pieces, each with what the model says after it; others: more
    of these. tuning: held-out pieces. alike, prefixed: as in `suite.Session`.
    """

    attacked: list[list[int]]
    tuning: list[list[int]]
    others: list[list[int]]
    alike: list[list[int]]
    prefixed: list[list[int]]


def _texts(wanted: AttackConfig, setting: Setting, begun: int) -> Sample:
    """Return the texts of an attack. `begun`: of how many texts those that begin alike are made,
    where there are so many.
    """
    count, pieces = wanted.prompts, setting.pieces
    if 2 * count > len(pieces):
        raise InputError(f"--prompts: held-out text has {len(pieces) // 2} pieces for that")
    wanted.on_stage("texts")
    tuning = pieces[count : 2 * count]
    asked = [*pieces[:count], *pieces[2 * count : 2 * count + OTHERS]]
    said = reading.continued(setting.public, [piece[:PROMPT] for piece in asked], GENERATED)
    alike = [list(text) for text in said[:begun]]
    for first, second in zip(alike[::2], alike[1::2], strict=False):
        common = int(setting.source.integers(1, LENGTH))
        second[:common] = first[:common]
    return Sample(said[:count], tuning, said[count:], alike, _prefixed(setting, said[:begun]))


def _prefixed(setting: Setting, texts: Texts) -> list[list[int]]:
    """Return pairs of texts with one prompt, that go on as different texts do, each after letters
    of its own as of --random-prefix: as many as there are texts (one less for an odd number), four
    at least.
    """
    tokenizer, prefixed = setting.public.tokenizer, []
    assert tokenizer is not None
    for i in range(max(2, len(texts) // 2)):
        for other in (i, i - 1):
            whole = [*texts[i][:PROMPT], *texts[other][PROMPT:]]
            letters = setting.source.choice(list(ascii_lowercase), beginnings.PREFIX)
            text = tokenizer.encode("".join(letters) + tokenizer.decode(whole))
            prefixed.append(text[:LENGTH])
    return prefixed


def _wants(names: Sequence[str], *attacks: str) -> bool:
    """Return whether one of `attacks` is among the names; none stands for all."""
    return not names or any(name in names for name in attacks)


def _attacked(
    wanted: AttackConfig, session: Session, names: Sequence[str]
) -> Iterator[AttackOutcome]:
    for name, attack in suite.ATTACKS.items():
        if _wants(names, name):
            wanted.on_stage(f"{session.mode}: {name}")
            yield from attack(session)


def check_codebook(mechanism: str | None, epsilon: float | None) -> None:
    """Raise InputError for an unknown mechanism, or an epsilon that is not positive and finite."""
    if mechanism not in (None, *vocabulary.MECHANISMS):
        raise InputError(
            f"--mechanism must be one of {', '.join(vocabulary.MECHANISMS)}, found {mechanism!r}"
        )
    if epsilon is not None and not 0 < epsilon < float("inf"):
        raise InputError(f"--epsilon must be above 0, found {epsilon:g}")


def check_attacks(names: Iterable[str]) -> None:
    """Raise InputError for what is no attack."""
    unknown = [name for name in names if name not in suite.ATTACKS]
    if unknown:
        raise InputError(
            f"--attack: there is no {unknown[0]!r}; choose from {', '.join(suite.ATTACKS)}"
        )
