"""One cell of the study of watermarks: texts of a method, and all that is measured of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.watermark import edits, forgery, metrics, scores
from experiments.watermark.plan import (
    AGAIN,
    DRAFTS,
    EDITED,
    FORGED,
    FORGED_TOKENS,
    JUDGED,
    LENGTHS,
    LONG,
    MARK,
    POOLED,
    PROMPT_TOKENS,
    RACE,
    RANDOM,
    ROUNDS,
    SCORED,
    SEEN,
    WatermarkCell,
    WatermarkPlan,
    share_of,
)
from experiments.watermark.texts import Author, Lanes, Method, Written, write
from models.tokenizer import Tokenizer
from models.training.snippets import read_snippets
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.cdfs import FAMILIES, Family
from spu_llm.systems.watermark.detecting import spans_of
from spu_llm.systems.watermark.scores import log_p


class Base:
    """Unmarked texts at one temperature, and their scores under other keys."""

    def __init__(self, study: Study, temperature: float) -> None:
        plan, self.temperature = study.plan, temperature
        self.samples = [
            study.written(RANDOM, study.authors(RANDOM, f"{temperature} sample {i}"), temperature)
            for i in range(plan.samples)
        ]
        texts = [
            [study.again(sample.tokens[j]) for sample in self.samples]
            for j in range(len(study.prompts))
        ]
        self.texts = texts
        self.nulls = scores.Nulls(texts, plan.null_keys, study.vocab, plan.seed)
        self.nats = np.mean([s.nats[:, :JUDGED] for s in self.samples], axis=(0, 2))


class Study:
    """Models, prompts, and what all cells of a temperature share."""

    def __init__(
        self, private: Path, public: Path, plan: WatermarkPlan, say: Callable[[str], None]
    ) -> None:
        self.plan, self.say = plan, say
        self.tokenizer = Tokenizer.load(private)
        self.vocab, self.never = self.tokenizer.vocab_size, sorted(self.tokenizer.eos_ids)
        beginnings = [self.tokenizer.encode(s.text)[:PROMPT_TOKENS] for s in read_snippets()]
        beginnings = [tokens for tokens in beginnings if len(tokens) == PROMPT_TOKENS][: plan.texts]
        if len(beginnings) < plan.texts:
            raise InputError(
                f"--texts must be {len(beginnings)} or fewer: so many prompts there are"
            )
        self.prompts = np.array(beginnings, np.int32)
        room = PROMPT_TOKENS + plan.tokens
        self.lanes, self.drafter = Lanes(private, room), Lanes(public, room)
        if room > self.lanes.config.context:
            raise InputError(
                f"--tokens must be {self.lanes.config.context - PROMPT_TOKENS} or fewer: the model "
                f"has {self.lanes.config.context} positions"
            )
        self._bases: dict[float, Base] = {}

    def base(self, temperature: float) -> Base:
        if temperature not in self._bases:
            self.say(f"temperature {temperature}: unmarked texts")
            self._bases[temperature] = Base(self, temperature)
        return self._bases[temperature]

    def authors(self, method: Method, label: str) -> list[Author]:
        """Return an author for each text, with a key of its own."""
        return [
            Author.of(method, self.plan.seed, f"{label} text {j}") for j in range(len(self.prompts))
        ]

    def written(
        self,
        method: Method,
        authors: Sequence[Author],
        temperature: float,
        count: int = 0,
        first: int = 0,
        drafter: Lanes | None = None,
    ) -> Written:
        """Write texts after as many prompts as there are authors, from number `first` on."""
        return write(
            method,
            authors,
            self.lanes,
            self.prompts[first : first + len(authors)],
            count or self.plan.tokens,
            temperature,
            self.never,
            drafter,
        )

    def again(self, tokens: Sequence[int] | np.ndarray) -> list[int]:
        """Detokenise a text, and tokenise it again."""
        return scores.retokenised(self.tokenizer, [int(token) for token in tokens])

    def lengths(self, count: int) -> list[int]:
        return [length for length in LENGTHS if length <= count]

    @property
    def judged(self) -> int:
        return min(JUDGED, self.plan.tokens)

    def row(self, cell: WatermarkCell) -> dict[str, Any]:
        """Return what is measured of a cell."""
        facts = {"temperature": cell.temperature, **asdict(cell.method)}
        if cell.method.name == "forgery":
            return {**facts, **self.forgery(cell)}
        if cell.method == RANDOM:
            return {**facts, **self.unmarked(cell.temperature)}
        return {**facts, **self.method(cell)}

    # ---- unmarked texts

    def unmarked(self, temperature: float) -> dict[str, Any]:
        """Measure the reference, and whether p-values of unmarked texts are what they say."""
        base = self.base(temperature)
        calibration = {}
        for kind in ("sum", "fisher"):
            p = 10.0 ** -base.nulls.scores(kind, self.judged)
            calibration[kind] = {
                "count": int(p.size),
                "at_1": metrics.mean((p <= 0.01).mean(axis=1)),
                "at_5": metrics.mean((p <= 0.05).mean(axis=1)),
            }
        kinds = ("sum", "fisher", "green")
        return {
            "texts": len(self.prompts),
            **self.distortion(base.samples[0], base),
            "agreement": agreement(base.samples[0].tokens, base.samples[1].tokens, 1),
            "calibration": calibration,
            "nulls": {kind: packed(base.nulls.scores(kind, self.judged)) for kind in kinds},
        }

    # ---- a method

    def method(self, cell: WatermarkCell) -> dict[str, Any]:
        method, temperature = cell.method, cell.temperature
        base = self.base(temperature)
        authors = self.authors(method, cell.name)
        authors = authors[: max(2, len(authors) // share_of(method))]
        count = self.plan.tokens if method in LONG else self.judged
        self.say(f"{cell.name}: writing")
        raced = method.name in ("race", "plain-race")
        drafter = self.drafter if raced else None
        written = self.written(method, authors, temperature, count, 0, drafter)
        row = {
            "texts": len(authors),
            "tokens": count,
            **self.distortion(written, base),
            "agreement": self.second(method, authors, written, temperature),
        }
        if raced:
            row["drafts"] = drafting(written)
        if method.name in scores.KINDS:
            self.say(f"{cell.name}: scoring")
            row |= self.detection(method, authors, written, base)
        if method in SCORED:
            row["scores"] = self.by_score(method, authors, written, base)
        return row

    def second(
        self, method: Method, authors: Sequence[Author], written: Written, temperature: float
    ) -> dict[str, Any]:
        """Write another text for each prompt and key; return how far it agrees with the first."""
        others = [author.again() for author in authors]
        again = self.written(method, others, temperature, AGAIN)
        return agreement(written.tokens, again.tokens, method.k)

    def distortion(self, written: Written, base: Base) -> dict[str, Any]:
        nats, entropy = (part[:, :JUDGED] for part in (written.nats, written.entropy))
        return {
            "nats": metrics.mean(nats.mean(axis=1)),
            "shift": metrics.mean(nats.mean(axis=1) - base.nats[: len(nats)]),
            "excess_bits": metrics.mean((nats - entropy).mean(axis=1) / np.log(2)),
            "bits": metrics.mean(entropy.mean(axis=1) / np.log(2)),
        }

    def detection(
        self, method: Method, authors: Sequence[Author], written: Written, base: Base
    ) -> dict[str, Any]:
        """Measure detection by each of the method's scores: by length, pooled, and after edits."""
        texts = [self.again(tokens) for tokens in written.tokens]
        every = method in EDITED and base.temperature == self.plan.temperatures[0]
        changed = self.edited(written.tokens[:, : self.judged], every=every)
        lengths = self.lengths(written.tokens.shape[1]) or [written.tokens.shape[1]]
        by_score: dict[str, Any] = {}
        for kind in scores.KINDS[method.name]:
            family = method.scheme.family
            of = scores.scores_of(method, kind, authors, texts, lengths, base.nulls, self.vocab)
            nulls = {n: base.nulls.scores(kind, n, family) for n in lengths}
            pooled = [n for n in POOLED if n in lengths] or lengths
            together = (
                of[:, [lengths.index(n) for n in pooled]],
                np.concatenate([nulls[n] for n in pooled], axis=1),
            )
            judged = of[:, lengths.index(self.judged)] if self.judged in lengths else of[:, -1]
            edited = {}
            for name, edits_of in changed.items():
                after = scores.scores_of(
                    method, kind, authors, edits_of, [None], base.nulls, self.vocab
                )
                at = 50 if "cropped" in name and 50 in lengths else lengths[-1]
                at = self.judged if self.judged in lengths and "cropped" not in name else at
                edited[name] = figures(after, nulls[at])
            by_score[kind] = {
                "by_length": {
                    str(n): figures(of[:, [i]], nulls[n], tpr=False) for i, n in enumerate(lengths)
                },
                "pooled": figures(*together),
                "edited": edited,
                "scores": packed(judged),
                "median": round(float(np.median(judged)), 3),
            }
            if method in (MARK, RACE):
                by_score[kind]["part"] = self.part(method, kind, authors, written, base)
        return {"detection": by_score}

    def edited(self, tokens: np.ndarray, *, every: bool) -> dict[str, list[list[int]]]:
        """Return texts after every edit, or after two of them, tokenised again."""
        by_edit = {}
        for name, edit in edits.EDITS.items():
            if every or name == edits.CORRUPTED:
                prgs = [Prg.from_seed(self.plan.seed, f"{name} {j}") for j in range(len(tokens))]
                by_edit[name] = [
                    self.again(edit(text, self.vocab, prg))
                    for text, prg in zip(tokens.tolist(), prgs, strict=True)
                ]
        for name, share in edits.PARAPHRASES.items():
            if every or name == edits.PARAPHRASED:
                prg = Prg.from_seed(self.plan.seed, name)
                rewritten = edits.paraphrased(
                    tokens, self.prompts[: len(tokens)], share, self.drafter, self.never, prg
                )
                by_edit[name] = [self.again(text) for text in rewritten]
        return by_edit

    def part(
        self, method: Method, kind: str, authors: Sequence[Author], written: Written, base: Base
    ) -> dict[str, Any]:
        """Measure how well a marked third of an unmarked text is detected: by the whole, and by its
        parts.
        """
        third = self.plan.tokens // 3
        of = scores.of_contexts if kind in scores.OF_CONTEXTS else scores.of_candidates
        whole, anywhere, covered = [], [], []
        for j, author in enumerate(authors):
            own = base.samples[0].tokens[j]
            mixed = [*own[:third], *written.tokens[j, third : 2 * third], *own[-third:]]
            pairs = of(author.keys[0], self.again(mixed))
            whole.append(scores.score(kind, pairs, method.scheme.family))
            spans, log = spans_of(scores.marks_of(pairs), 0.01)
            anywhere.append(-log / np.log(10))
            said = {i for span in spans for i in range(span.first, span.last)}
            covered.append([len(said & set(range(third, 2 * third))), len(said)])
        nulls = [
            [-spans_of(scores.marks_of(one), 0.01)[1] / np.log(10) for one in row]
            for row in base.nulls.pairs(kind in scores.OF_CONTEXTS)
        ]
        hits, said = np.array(covered).T
        return {
            "tokens": [third, 3 * third],
            "whole": figures(np.array(whole)[:, None], base.nulls.scores(kind, 3 * third)),
            "parts": figures(np.array(anywhere)[:, None], np.array(nulls)),
            "recall": metrics.mean(hits / third),
            "precision": round(float(hits.sum() / max(1, said.sum())), 4),
        }

    def by_score(
        self, method: Method, authors: Sequence[Author], written: Written, base: Base
    ) -> list[dict[str, Any]]:
        """Compare families and scores on the same texts. With chunks of one token the family
        changes nothing of the text, so that all four are tried.
        """
        marked = [
            scores.distinct(scores.of_candidates(author.keys[0], self.again(tokens)), self.judged)
            for author, tokens in zip(authors, written.tokens, strict=True)
        ]
        others = [
            [scores.distinct(one, self.judged) for one in row[:: self.plan.samples]]
            for row in base.nulls.pairs(False)
        ]
        own = method.scheme.family
        tried = [(own, name) for name in ("fisher", "lrt", "lrt-published")]
        sums = [Family(name) for name in FAMILIES] if method.k == 1 else [own]
        rows = []
        for family, name in [*((family, "sum") for family in sums), *tried]:
            of = [-log_p(u, family, name, method.m, method.k) / np.log(10) for u in marked]
            nulls = [[-log_p(u, family, name, method.m, method.k) for u in row] for row in others]
            rows.append(
                {
                    "family": family.name,
                    "score": name,
                    **figures(np.array(of)[:, None], np.array(nulls) / np.log(10)),
                    "median": round(float(np.median(of)), 3),
                }
            )
        return rows

    # ---- forgery

    def forgery(self, cell: WatermarkCell) -> dict[str, Any]:
        """Write many texts of one key, round after round; measure what a forger makes of them, and
        guesses.
        """
        method, base = replace(MARK, history=cell.method.history), self.base(cell.temperature)
        one = Author.of(method, self.plan.seed, f"{cell.name} forged")
        texts: list[list[int]] = []
        rounds = []
        each = max(1, len(self.prompts) // ROUNDS)
        for first in range(0, each * ROUNDS, each):
            self.say(f"{cell.name}: texts of one key from {first + 1} on")
            authors = [
                Author(one.keys, one.histories, one.prg.child(f"text {first + j}"))
                for j in range(min(each, len(self.prompts) - first))
            ]
            if not authors:
                break
            written = self.written(method, authors, cell.temperature, self.judged, first)
            mine = [self.again(tokens) for tokens in written.tokens]
            of = scores.scores_of(method, "sum", authors, mine, [None], base.nulls, self.vocab)
            rounds.append(
                {
                    "first": first,
                    "marked": round(float(written.marked.mean()), 4),
                    "median": round(float(np.median(of)), 3),
                    **figures(of, base.nulls.scores("sum", self.judged)),
                }
            )
            texts += written.tokens.tolist()
        return {
            "rounds": rounds,
            "forged": self.forged(cell, one, texts, base),
            "guesses": forgery.guesses(
                texts,
                base.samples[0].tokens[:, : self.judged].tolist(),
                base.samples[1].tokens.tolist(),
                one.keys[0],
                Prg.from_seed(self.plan.seed, f"{cell.name} guesses"),
            ),
        }

    def forged(
        self, cell: WatermarkCell, one: Author, texts: Sequence[list[int]], base: Base
    ) -> list[dict[str, Any]]:
        """Return the p-values of what each forger writes, from marked texts, and from unmarked
        ones.
        """
        unmarked = base.samples[0].tokens[:, : self.judged].tolist()
        rows = []
        for control, source in ((False, texts), (True, unmarked)):
            for seen in sorted({min(n, len(texts)) for n in SEEN}):
                prg = Prg.from_seed(self.plan.seed, f"{cell.name} forge {control} {seen}")
                made = {
                    name: [forge(source[:seen], self.judged, prg) for _ in range(FORGED)]
                    for name, forge in forgery.FORGERS.items()
                }
                if seen == len(texts):
                    self.say(f"{cell.name}: drafting forgeries")
                    made["draft"] = forgery.draft(
                        source, self.judged, self.drafter, self.prompts[:FORGED], self.never, prg
                    )
                for name, forgeries in made.items():
                    authors, again = [one] * len(forgeries), [self.again(t) for t in forgeries]
                    lengths = [n for n in FORGED_TOKENS if n <= self.judged] or [self.judged]
                    of = scores.scores_of(
                        MARK, "sum", authors, again, lengths, base.nulls, self.vocab
                    )
                    rows.append(
                        {
                            "forger": name,
                            "control": control,
                            "seen": seen,
                            "by_length": {
                                str(n): {
                                    "median": round(float(np.median(of[:, i])), 2),
                                    "accepted": round(float((of[:, i] >= 3).mean()), 4),
                                }
                                for i, n in enumerate(lengths)
                            },
                        }
                    )
        return rows


def figures(
    marked: np.ndarray, others: np.ndarray, *, tpr: bool = True
) -> dict[str, metrics.Interval]:
    """Return the figures of scores [prompt, ...]."""
    row = {
        "auc": metrics.by_prompt(metrics.auc, marked, others),
        "pauc": metrics.by_prompt(metrics.partial_auc, marked, others),
    }
    if tpr:
        row["tpr"] = metrics.by_prompt(metrics.true_positives, marked, others)
    return row


def agreement(one: np.ndarray, other: np.ndarray, chunk: int) -> dict[str, Any]:
    """Compare two texts of the same prompt [text, token]: how often the first chunk is the same,
    the first `AGAIN` tokens are, and how many they have in common from the start.
    """
    length = min(AGAIN, one.shape[1], other.shape[1])
    same = one[:, :length] == other[:, :length]
    common = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    return {
        "tokens": length,
        "chunk": metrics.mean((common >= min(chunk, length)).astype(float)),
        "text": metrics.mean((common == length).astype(float)),
        "common": metrics.mean(common.astype(float)),
    }


def drafting(written: Written) -> dict[str, Any]:
    """Return the tokens per step of a race whose drafts are drawn with its noise. A step emits
    drafts up to the first that differs, and one token more; the text is the same with any drafts,
    so that steps follow from where the draft model draws the text's own token.
    """
    counted: dict[str, Any] = {"accepted": metrics.mean(written.matched.mean(axis=1))}
    counted["overlap"] = metrics.mean(written.overlap.mean(axis=1))
    tokens = np.full(len(written.matched), written.matched.shape[1], float)
    for drafts in DRAFTS:
        steps = np.array([steps_of(row, drafts) for row in written.matched], float)
        counted[str(drafts)] = metrics.ratio(tokens, steps)
        counted[f"{drafts} by text"] = packed(steps)
    return counted


def steps_of(matched: np.ndarray, drafts: int) -> int:
    """Return how many steps write a text, a bonus token in each."""
    at = steps = 0
    while at < len(matched):
        run = matched[at : at + drafts]
        at += (int(np.argmin(run)) if not run.all() else len(run)) + 1
        steps += 1
    return steps


def packed(values: np.ndarray) -> str:
    """Write many numbers on one line."""
    return " ".join(f"{x:.3g}" for x in values.ravel())


def unpacked(text: str) -> np.ndarray:
    return np.array(text.split(), np.float64)
