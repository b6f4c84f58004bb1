"""Attacks on split models run: texts, the host's view of them, and what comes of it.

Modes plain and noir: the view is made in this process by the functions that a client runs, from the
client's weights (`spu_llm.systems.split.attacks.views`); what a provider receives in a session is
these rows, up to the rounding of the precision on the wire. noir without --secrets: the codebook is
drawn, and nothing is tuned.

Mode mpc: a real session (`spu_llm.app.split_views`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from models.family import ModelConfig, Params, family_of
from models.hf import load_model
from models.split import Split
from models.tokenizer import Tokenizer
from models.training.corpus import list_files
from models.training.snippets import cut_snippets
from spu_llm.app.attack_prompts import held_out
from spu_llm.app.attacking import Wanted
from spu_llm.app.split_views import views_of_middle
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.outcome import Outcome
from spu_llm.systems.split import ltokenizer, vocabulary
from spu_llm.systems.split.attacks import adversarial, reading, suite
from spu_llm.systems.split.attacks.suite import Session, Tuned
from spu_llm.systems.split.attacks.views import (
    HostView,
    Public,
    Texts,
    of_front,
    of_tuning,
)
from spu_llm.systems.split.ends import client_ends, table_of, with_table, without_table
from spu_llm.systems.split.state import ClientSecrets

PROMPT, GENERATED = 32, 32  # tokens of a text
LENGTH = PROMPT + GENERATED
TEMPLATE = 16  # tokens that A10's host knows
OTHERS = 200  # texts beside these, that say what chance is
SNIPPETS, SNIPPET = 1500, 500  # of public text, of so many characters at most
BUDGET = 13 / 4096  # of a feature: the paper's epsilon and width


class Client(NamedTuple):
    """front, back: folded weights; relabelled: LTokenizer's label of each token."""

    front: Params
    back: Params
    relabelled: np.ndarray | None


class Setting(NamedTuple):
    config: ModelConfig
    params: Params
    public: Public
    pieces: list[list[int]]  # of held-out text, of one token more than texts have
    source: np.random.Generator


def setting_of(wanted: Wanted) -> Setting:
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


def plain(wanted: Wanted) -> Iterator[Outcome]:
    """The client's ends are the public ones; tuning is without protection."""
    attacker = Attacker(wanted)
    front, _, back = attacker.setting.public.parts
    yield from attacker.outcomes("plain", Client(front, back, None))


def noir(wanted: Wanted) -> Iterator[Outcome]:
    """With a codebook and a permutation, tuned where there are secrets."""
    attacker = Attacker(wanted)
    find = _drawn if wanted.secrets is None else _tuned
    yield from attacker.outcomes("noir", find(wanted, attacker.setting))


def _tuned(wanted: Wanted, setting: Setting) -> Client:
    """Of a tuning's secrets. The host's LoRA is left out: attacks are with the public middle."""
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
    return Client(
        with_table(secrets.front, table, config), secrets.back, np.asarray(secrets.permutation)
    )


def mpc(wanted: Wanted) -> Iterator[Outcome]:
    """A real session of two processes: the words that the provider received, decoded as fixed
    point, in place of rows. There is no tuning.
    """
    setting = setting_of(wanted)
    texts, _, others, alike = _texts(wanted, setting)
    more = alike if not wanted.attacks or "a9" in wanted.attacks else []
    rows = views_of_middle(
        wanted.model, setting.public.split, [*texts, *more], wanted.on_stage
    )
    session = Session(
        "mpc", HostView(rows[: len(texts)]), setting.public, texts, PROMPT, TEMPLATE, others,
        (HostView(rows[len(texts) :]), more) if more else None, seed=wanted.seed,
    )  # fmt: skip
    yield from _attacked(wanted, session)


def _drawn(wanted: Wanted, setting: Setting) -> Client:
    config, params, public = setting[:3]
    prg = Prg.from_seed(wanted.seed, "attack noir")
    epsilon = BUDGET * config.width if wanted.epsilon is None else wanted.epsilon
    wanted.on_stage(f"codebook, {wanted.mechanism or vocabulary.DEFAULT}, epsilon {epsilon:g}")
    table = vocabulary.draw_codebook(
        table_of(params, config), wanted.mechanism or vocabulary.DEFAULT, epsilon,
        prg.child("codebook"),
    )  # fmt: skip
    tau = ltokenizer.Permutation.draw(config.vocab_size, prg.child("permutation"))
    return Client(*client_ends(params, config, public.split, table), tau.forward)


class Attacker:
    """Attacks views that are made in this process, all of the same texts. texts: what is attacked,
    token ids; of each the first `PROMPT` are the prompt.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.setting = setting_of(wanted)
        self.texts, self._tuning, self._others, self._alike = _texts(wanted, self.setting)

    def outcomes(self, mode: str, client: Client) -> Iterator[Outcome]:
        """What the host of this client finds out."""
        config, public = self.setting.config, self.setting.public
        self._wanted.on_stage(f"{mode}: views")
        ends, front = (client.front, client.back), client.front
        tuned = Tuned(
            of_tuning(ends, config, public.middle, self._tuning, client.relabelled),
            of_tuning(
                ends, config, adversarial.middle(public), self._tuning, client.relabelled
            ),
            self._tuning, client.relabelled,
        )  # fmt: skip
        alike = HostView(of_front(front, config, self._alike)), self._alike
        yield from self._attacked(mode, of_front(front, config, self.texts), alike, tuned)

    def of_rows(self, mode: str, rows: list[np.ndarray]) -> Iterator[Outcome]:
        """The same of rows of the texts alone."""
        yield from self._attacked(mode, rows, None, None)

    def _attacked(
        self, mode: str, rows: list[np.ndarray], alike: tuple[HostView, Texts] | None,
        tuned: Tuned | None,
    ) -> Iterator[Outcome]:  # fmt: skip
        session = Session(
            mode, HostView(rows), self.setting.public, self.texts, PROMPT, TEMPLATE, self._others,
            alike, tuned, seed=self._wanted.seed,
        )  # fmt: skip
        yield from _attacked(self._wanted, session)


def _texts(
    wanted: Wanted, setting: Setting
) -> tuple[list[list[int]], Texts, Texts, list[list[int]]]:
    """Texts that are attacked, those of tuning, others like the first, and those that begin alike.
    A text is the beginning of a held-out piece, and what the model says after it.
    """
    count, pieces = wanted.prompts, setting.pieces
    if 2 * count > len(pieces):
        raise InputError(f"--prompts: held-out text has {len(pieces) // 2} pieces for that")
    wanted.on_stage("texts")
    tuning = pieces[count : 2 * count]
    asked = [*pieces[:count], *pieces[2 * count : 2 * count + OTHERS]]
    said = reading.continued(setting.public, [piece[:PROMPT] for piece in asked], GENERATED)
    alike = [list(text) for text in said[:count]]
    for first, second in zip(alike[::2], alike[1::2], strict=False):
        common = int(setting.source.integers(1, LENGTH))
        second[:common] = first[:common]
    return said[:count], tuning, said[count:], alike


def _attacked(wanted: Wanted, session: Session) -> Iterator[Outcome]:
    for name, attack in suite.ATTACKS.items():
        if not wanted.attacks or name in wanted.attacks:
            wanted.on_stage(f"{session.mode}: {name}")
            yield from attack(session)


def check_codebook(mechanism: str | None, epsilon: float | None) -> None:
    """InputError for what is no mechanism's."""
    if mechanism not in (None, *vocabulary.MECHANISMS):
        raise InputError(
            f"--mechanism must be one of {', '.join(vocabulary.MECHANISMS)}, found {mechanism!r}"
        )
    if epsilon is not None and not 0 < epsilon < float("inf"):
        raise InputError(f"--epsilon must be above 0, found {epsilon:g}")


def check_attacks(names: Iterable[str]) -> None:
    """InputError for what is no attack."""
    unknown = [name for name in names if name not in suite.ATTACKS]
    if unknown:
        raise InputError(
            f"--attack: there is no {unknown[0]!r}; choose from {', '.join(suite.ATTACKS)}"
        )
