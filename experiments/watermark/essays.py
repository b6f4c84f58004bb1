"""Essays of a chat model, marked as it writes them, and what becomes of the marks when words are
edited or the same model is asked to paraphrase.

The attack is the paper's (§5.3 and its appendix): "Paraphrase the following:" and the text. The
model is asked by chat, at a temperature, and answers until it ends. It reads the tokens that were
written, so that all texts of a mark are read side by side.

Edits change words alone: a third of the function words is dropped; half of the longer words get
another ending (-s is put on or taken off); 30 % of the words are replaced by others of the text.
The first two are edits that stems are made to outlast.

Marks by candidates are as published, without a history: it counts what losing candidates have as
used, so that single words and stems, which come again in every text, would soon mark nothing.
Without it a key prefers the same words again and again, and `repeated` says how many n-grams of
words stood in a text before.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.watermark import metrics
from experiments.watermark.texts import Lanes, distribution_of, draws, key_of
from models.chat import Message, Template
from models.tokenizer import Tokenizer
from protocols.verification.distribution import draw
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.detecting import detect
from spu_llm.systems.watermark.history import History
from spu_llm.systems.watermark.keys import Key, KeyFile, Scheme
from spu_llm.systems.watermark.race_marks import Next
from spu_llm.systems.watermark.rivals import DELTA, next_token
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.selecting import Chooser
from spu_llm.systems.watermark.stems import is_function_word
from spu_llm.systems.watermark.units import StemUnits, WordUnits, grams, units_of

ASKED, ATTACK = "Write a short essay about {}.", "Paraphrase the following:\n{}"
TOPICS = (
    "rivers winter bread music trains gardens cities birds sleep coffee maps islands friendship "
    "bridges clocks storms paper horses markets stars forests letters glass tea mountains salt "
    "books dogs rain ships wood football cooking painting sugar gold"
).split()
CANDIDATES = 16
FOUND = 0.01  # p of a text that is called marked
NGRAM = 4  # words, of what a paraphrase keeps
_HERE = "\N{LEFT SQUARE BRACKET WITH QUILL}text\N{RIGHT SQUARE BRACKET WITH QUILL}"
_WORD = re.compile(r"[A-Za-z]+")

WRITTEN, PARAPHRASED = "as written", "paraphrased"
Row = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """Watermark of an essay: a method of `keys.METHODS`, its units and n-grams."""

    method: str = "candidates"
    units: str = "tokens"
    ngram: int = 4

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.ngram, units=self.units, method=self.method)

    @property
    def title(self) -> str:
        if self.method == "candidates":
            return f"k = 1, m = {CANDIDATES}, {self.ngram}-grams of {self.units}"
        return "Aaronson" if self.method == "aaronson" else f"Kirchenbauer, δ = {DELTA:g}"


MARKS = (
    Mark(),
    Mark("aaronson"),
    Mark("kirchenbauer"),
    Mark(units="words"),
    Mark(units="words", ngram=1),
    Mark(units="stems", ngram=2),
    Mark(units="stems", ngram=1),
)


@dataclass(frozen=True)
class EssaysPlan:
    """Numbers of essays and of their tokens. samples: unmarked ones on each topic; null_keys: keys
    that each of these is scored under. paraphrased_at: temperature of the attack.
    """

    texts: int = 16
    tokens: int = 100
    samples: int = 1
    null_keys: int = 3
    temperature: float = 1.0
    paraphrased_at: float = 0.7
    seed: int = 0


# ---- edits of words


def functions_dropped(text: str, prg: Prg) -> str:
    """Drop a third of the function words."""

    def edited(word: str) -> str:
        gone = is_function_word(word.lower()) and float(prg.uniform(())) < 1 / 3
        return "" if gone else word

    return _by_word(text, edited)


def endings_changed(text: str, prg: Prg) -> str:
    """Put -s on half of the words of four letters or more that have a meaning, or take it off."""

    def edited(word: str) -> str:
        if len(word) < 4 or is_function_word(word.lower()) or float(prg.uniform(())) < 0.5:
            return word
        if word.endswith(("ss", "us", "is")):
            return word
        return word[:-1] if word.endswith("s") else word + "s"

    return _by_word(text, edited)


def words_replaced(text: str, prg: Prg) -> str:
    """Replace 30 % of the words by any others of the text."""
    words = _WORD.findall(text)

    def edited(word: str) -> str:
        if float(prg.uniform(())) >= 0.3:
            return word
        return str(words[int(float(prg.uniform(())) * len(words))])

    return _by_word(text, edited)


def _by_word(text: str, edited: Callable[[str], str]) -> str:
    return _WORD.sub(lambda match: edited(match[0]), text)


EDITS: dict[str, Callable[[str, Prg], str]] = {
    "a third of function words dropped": functions_dropped,
    "half of endings changed": endings_changed,
    "30 % of words replaced": words_replaced,
}
VERSIONS = (WRITTEN, *EDITS, PARAPHRASED)


# ---- what is kept


def kept(before: str, after: str) -> tuple[float, float, float]:
    """Return how much of a text an edit keeps: words of it per word, the share of the edited text's
    n-grams of words that stood in it, and the share of its stems that still stand.
    """
    words = WordUnits()
    old, new = words.of(before), words.of(after)
    had = Counter(grams(old, NGRAM, NGRAM - 1))
    has = Counter(grams(new, NGRAM, NGRAM - 1))
    same = (had & has).total()
    stems, left = (set(StemUnits().of(text)) for text in (before, after))
    return (
        len(new) / max(1, len(old)),
        same / max(1, has.total()),
        len(stems & left) / max(1, len(stems)),
    )


def repeated(text: str) -> float:
    """Return the share of a text's n-grams of words that stood in it before."""
    every = grams(WordUnits().of(text), NGRAM, NGRAM - 1)
    return 1 - len(set(every)) / max(1, len(every))


# ---- texts


class Essays:
    """A chat model, its prompts, and unmarked essays in all versions."""

    def __init__(self, directory: Path, plan: EssaysPlan, say: Callable[[str], None]) -> None:
        self.plan, self.say = plan, say
        self.tokenizer = Tokenizer.load(directory)
        self._template = Template.load(directory)
        self.ends = sorted(self.tokenizer.eos_ids)
        before, after = self._asked(ATTACK.format(_HERE)).split(_HERE)
        self._attack = (self.tokenizer.encode(before), self.tokenizer.encode(after, goes_on=True))
        prompts = [self.tokenizer.encode(self._asked(ASKED.format(topic))) for topic in TOPICS]
        # Texts grow side by side, so their prompts have one length.
        length = Counter(map(len, prompts)).most_common(1)[0][0]
        prompts = [prompt for prompt in prompts if len(prompt) == length]
        if len(prompts) < plan.texts:
            raise InputError(f"--essays must be {len(prompts)} or fewer: so many prompts there are")
        self.prompts = np.array(prompts[: plan.texts], np.int32)
        self._longest = plan.tokens * 5 // 4  # tokens of a paraphrase
        room = sum(map(len, self._attack)) + plan.tokens + self._longest
        self._lanes = Lanes(directory, max(length + plan.tokens, room))
        self._unmarked: dict[str, list[list[str]]] | None = None

    def _asked(self, words: str) -> str:
        """Return the text of a chat of one message, up to where the answer begins."""
        return self._template.render([Message("user", words)])

    def written(self, choosers: Sequence[Next]) -> tuple[np.ndarray, np.ndarray]:
        """Write an essay on each topic, with what chooses its tokens: int [text, token], and each
        one's nats a token above the entropy that they were drawn with. None ends early.
        """
        count = len(choosers)
        texts: list[tuple[int, ...]] = [()] * count
        state, excess = self._lanes.begun(self.prompts), np.zeros(count)
        for i in range(self.plan.tokens):
            next_ = distribution_of(state.logits, self.plan.temperature, self.ends)
            row = np.array([choosers[j](next_.p[j], texts[j]) for j in range(count)])
            excess += -next_.log_p[np.arange(count), row] - next_.entropy
            texts = [(*text, int(token)) for text, token in zip(texts, row, strict=True)]
            if i + 1 < self.plan.tokens:
                state = self._lanes.after(state, row)
        return np.array(texts), excess / self.plan.tokens

    def paraphrases(self, texts: np.ndarray, prg: Prg) -> list[str]:
        """Return what the model answers when it is asked to paraphrase the texts [text, token]."""
        before, after = (np.tile(part, (len(texts), 1)) for part in self._attack)
        state = self._lanes.begun(np.concatenate([before, texts, after], axis=1))
        answers: list[list[int]] = [[] for _ in texts]
        going = np.full(len(texts), True)
        for _ in range(self._longest):
            p = distribution_of(state.logits, self.plan.paraphrased_at, ()).p
            points = prg.uniform((len(texts), 1))
            row = np.array([draws(p[j], points[j])[0] for j in range(len(texts))])
            going &= ~np.isin(row, self.ends)
            for j in np.flatnonzero(going):
                answers[j].append(int(row[j]))
            if not going.any():
                break
            state = self._lanes.after(state, row)
        return [self.tokenizer.decode(answer) for answer in answers]

    def versions(self, texts: np.ndarray, label: str) -> dict[str, list[str]]:
        """Return the texts as written, after each edit, and paraphrased."""
        seed, words = self.plan.seed, [self.tokenizer.decode(text) for text in texts.tolist()]
        made = {WRITTEN: words}
        for name, edit in EDITS.items():
            prg = Prg.from_seed(seed, f"essays {label} {name}")
            made[name] = [edit(text, prg) for text in words]
        self.say(f"{label}: {PARAPHRASED}")
        prg = Prg.from_seed(seed, f"essays {label} {PARAPHRASED}")
        return {**made, PARAPHRASED: self.paraphrases(texts, prg)}

    @property
    def unmarked(self) -> dict[str, list[list[str]]]:
        """Return unmarked essays by version: [sample][topic]."""
        if self._unmarked is None:
            samples = []
            for i in range(self.plan.samples):
                self.say(f"unmarked essays {i + 1}")
                prg = Prg.from_seed(self.plan.seed, f"essays sample {i}")

                def drawn(p: np.ndarray, generated: tuple[int, ...], prg: Prg = prg) -> int:
                    return draw(p, float(prg.uniform(())))

                texts, _ = self.written([drawn] * len(self.prompts))
                samples.append(self.versions(texts, f"unmarked {i + 1}"))
            self._unmarked = {name: [one[name] for one in samples] for name in VERSIONS}
        return self._unmarked

    # ---- marks

    def chooser(self, mark: Mark, key: Key, prg: Prg) -> Next:
        """Return what chooses the tokens of one essay under a key of its own."""
        vocab = self.tokenizer.vocab_size
        if mark.method != "candidates":
            return next_token(key, mark.scheme, vocab, DELTA, prg)
        units, histories = units_of(mark.units, self.tokenizer), (History(False),)
        chooser = Chooser((key,), mark.scheme, units, CANDIDATES, histories, prg)

        def token(p: np.ndarray, generated: tuple[int, ...]) -> int:
            drawn = [Drawn((t,), False) for t in draws(p, prg.uniform((CANDIDATES,)))]
            content = chooser.chosen(drawn, generated).drawn.content
            assert not isinstance(content, str)
            return content[0]

        return token

    def evidence(self, mark: Mark, key: Key, text: str) -> float:
        """Return -log10 p of a text under a key."""
        file = KeyFile(key, mark.scheme)
        verdict = detect([file], [units_of(mark.units, self.tokenizer)], text, locate=False)
        return -verdict.log_p / math.log(10)

    def row(self, mark: Mark) -> Row:
        """Write essays under a mark; return what is found of them, and of unmarked ones."""
        seed, unmarked = self.plan.seed, self.unmarked
        self.say(mark.title)
        numbers = range(len(self.prompts))
        keys = [key_of(seed, f"essays {mark} {j}") for j in numbers]
        prgs = [Prg.from_seed(seed, f"essays {mark} draws {j}") for j in numbers]
        choosers = [self.chooser(mark, key, prg) for key, prg in zip(keys, prgs, strict=True)]
        texts, excess = self.written(choosers)
        made = self.versions(texts, mark.title)
        self.say(f"{mark.title}: scores")
        row: Row = {
            **asdict(mark),
            "texts": len(keys),
            "excess_bits": metrics.mean(excess / math.log(2)),
            "repeated": _repeated(made[WRITTEN]),
            "unmarked_repeated": _repeated([text for one in unmarked[WRITTEN] for text in one]),
            "versions": {},
            "example": {name: made[name][0] for name in (WRITTEN, PARAPHRASED)},
        }
        for name in VERSIONS:
            of = np.array(
                [self.evidence(mark, key, text) for key, text in zip(keys, made[name], strict=True)]
            )
            nulls = self._nulls(mark, name, unmarked[name])
            facts = np.array(
                [kept(one, other) for one, other in zip(made[WRITTEN], made[name], strict=True)]
            )
            row["versions"][name] = {
                "evidence": metrics.mean(of),
                "found": metrics.mean((of >= -math.log10(FOUND)).astype(float)),
                "auc": metrics.by_prompt(metrics.auc, of[:, None], nulls),
                "unmarked_found": metrics.mean((nulls >= -math.log10(FOUND)).mean(axis=1)),
                "kept": [metrics.mean(column) for column in facts.T],
            }
        return row

    def _nulls(self, mark: Mark, version: str, texts: Sequence[Sequence[str]]) -> np.ndarray:
        """Return -log10 p of unmarked essays, each under keys of nobody's: [topic, sample and
        key].
        """
        return np.array(
            [
                [
                    self.evidence(mark, key_of(self.plan.seed, f"null {version} {i} {j} {n}"), one)
                    for i, sample in enumerate(texts)
                    for one in [sample[j]]
                    for n in range(self.plan.null_keys)
                ]
                for j in range(len(self.prompts))
            ]
        )


def _repeated(texts: Sequence[str]) -> metrics.Interval:
    return metrics.mean(np.array([repeated(text) for text in texts]))
