"""A corpus: one text of each batch of references, by a method that is chosen by its name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from models.family import ModelConfig
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.offline.durable import replace_whole
from spu_llm.systems.dp_text import ledger_file
from spu_llm.systems.dp_text.accounting import ADD_OR_REMOVE
from spu_llm.systems.dp_text.baselines import adapmixed, amin, augpe
from spu_llm.systems.dp_text.generator import Generator, Made, batches, dealt, together
from spu_llm.systems.dp_text.methods import (
    HOLDS_BUT_FOR_ROUNDING,
    Method,
    full_vocabulary,
    invisible_ink,
    public_only,
)
from spu_llm.systems.dp_text.parameters import Parameters, check_budget
from spu_llm.systems.dp_text.prompts import Prompts
from spu_llm.systems.dp_text.statement import spends_of, statement

METHODS = {
    "invisibleink": "difference clipping and top-k+",
    "full-vocabulary": "the same without top-k+",
    "public-only": "the model without references: spends nothing",
    "amin": "Amin et al. 2024: clipped logits behind a sparse vector test, corrected",
    "amin-published": "the same with the charges as published, which are too low",
    "adapmixed": "AdaPMixED, corrected: mixed distributions, a loss that depends on the data",
    "adapmixed-published": "the same as published: references left out, its program's mixing",
    "augpe": "AugPE: variations that references vote for",
}


_ANY_NUMBER = ("invisibleink", "full-vocabulary", "public-only")
MOST_TEXTS = 1_000_000  # under add-or-remove, which does not bound them by the references


@dataclass(frozen=True)
class CorpusRequest:
    """A corpus to write. epsilon: None for public-only alone."""

    method: str
    epsilon: float | None
    delta: float
    batch: int
    texts: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    adjacency: str = "replace-by-null"
    centre: bool = False
    iterations: int = augpe.ITERATIONS


def method_for(wanted: CorpusRequest) -> Method:
    """Return the method, with parameters that spend the budget. InputError where there is none, or
    where it is asked for what it does not have. Of AugPE: `augpe_for`.
    """
    w = wanted
    if w.method not in METHODS:
        raise InputError(f"there is no method {w.method!r}; choose from {', '.join(METHODS)}")
    ours = w.method in ("invisibleink", "full-vocabulary")
    if w.centre and not ours:
        raise InputError(f"--centre is of invisibleink and full-vocabulary, not of {w.method}")
    _check_adjacency(w)
    if w.method == "public-only":
        check_budget(1.0, w.delta)
        return public_only(
            Parameters(w.batch, 0.0, w.temperature, w.max_new_tokens, w.top_k, w.adjacency)
        )
    if w.epsilon is None:
        raise InputError(f"{w.method} needs --epsilon")
    # Whatever the method, its sizes are checked alike.
    parameters = Parameters.for_budget(
        w.epsilon,
        w.delta,
        batch=w.batch,
        temperature=w.temperature,
        top_k=w.top_k,
        max_new_tokens=w.max_new_tokens,
        adjacency=w.adjacency,
        centre=w.centre,
    )
    if ours:
        return {"invisibleink": invisible_ink, "full-vocabulary": full_vocabulary}[w.method](
            parameters
        )
    name, _, published = w.method.partition("-")
    kinds: dict[str, Callable[..., Method]] = {
        "amin": partial(amin.for_budget, adjacency=w.adjacency),
        "adapmixed": adapmixed.for_budget,
    }
    return kinds[name](
        w.epsilon,
        w.delta,
        batch=w.batch,
        max_new_tokens=w.max_new_tokens,
        temperature=w.temperature,
        published=bool(published),
    )


def _check_adjacency(wanted: CorpusRequest) -> None:
    """Raise InputError for a method whose other references do not stay as they are where one comes
    or goes: in the rows that they are computed in, or in what their number says.
    """
    if wanted.adjacency == ADD_OR_REMOVE and wanted.method not in _ANY_NUMBER:
        raise InputError(
            f"--adjacency {ADD_OR_REMOVE} is of {', '.join(_ANY_NUMBER)}, not of {wanted.method}"
        )


def augpe_for(wanted: CorpusRequest) -> augpe.AugPE:
    """Return AugPE at this budget; InputError without epsilon, or with centring."""
    _check_adjacency(wanted)
    if wanted.epsilon is None or wanted.centre:
        raise InputError("augpe needs --epsilon, and has no --centre")
    return augpe.for_budget(
        wanted.epsilon,
        wanted.delta,
        max_new_tokens=wanted.max_new_tokens,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        adjacency=wanted.adjacency,
        iterations=wanted.iterations,
    )


def check_texts(texts: int, groups: Sequence[int], batch: int) -> None:
    """Raise InputError unless every text has a batch of its own; groups: how many references have
    the same labels.
    """
    most = sum(-(-references // batch) for references in groups)
    if not 1 <= texts <= most:
        raise InputError(
            f"{sum(groups)} references make {most} batches of {batch} (the last one of each label "
            f"may be filled up), a text each; --texts must be 1 to {most}, found {texts}"
        )


def check_number(wanted: CorpusRequest, groups: Sequence[int]) -> None:
    """Raise InputError unless there can be so many texts. Under add-or-remove any number may be
    wanted, since that of the references is not public.
    """
    if wanted.adjacency != ADD_OR_REMOVE:
        check_texts(wanted.texts, groups, wanted.batch)
    elif len(groups) > 1:
        raise InputError(f"labels say which references there are: {ADD_OR_REMOVE} has none")
    elif not 1 <= wanted.texts <= MOST_TEXTS:
        raise InputError(f"--texts must be 1 to {MOST_TEXTS}, found {wanted.texts}")


@dataclass(frozen=True)
class Model:
    """A model as `Generator` takes it, and its digest."""

    config: ModelConfig
    weights: Any
    digest: str


@dataclass(frozen=True)
class Sources:
    """Sources of texts. groups: references with the same labels, and their prompts; facts:
    what the prompts follow from, as JSON has it; labels: the names of labels. vary: prompts by
    which AugPE has a text written anew, of which it draws one each time; none: it goes on from the
    text as from a reference.
    """

    groups: Sequence[tuple[Prompts, Sequence[str]]]
    facts: dict[str, Any]
    labels: dict[str, list[str]] = field(default_factory=dict)  # of each group, by name
    vary: Sequence[Prompts] = ()

    @property
    def references(self) -> list[str]:
        """Return all references with their labels, for the ledger."""
        texts = []
        for number, (_, some) in enumerate(self.groups):
            of_group = [values[number] for values in self.labels.values()]
            texts += [json.dumps([*of_group, text]) if of_group else text for text in some]
        return texts

    @property
    def rooms(self) -> tuple[int, int]:
        """Return the room that the longest public and private prompts need."""
        prompts = [prompts for prompts, _ in self.groups]
        return max(len(p.public) for p in prompts), max(p.room for p in prompts)


def of_query(prompts: Prompts, references: Sequence[str]) -> Sources:
    """Return the sources of texts that go on with a query."""
    return Sources([(prompts, references)], {"query": prompts.query})


def write_corpus(
    out: Path,
    wanted: CorpusRequest,
    model: Model,
    sources: Sources,
    say: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Write the texts to `out`, its ledger and its statement, which is returned; or go on with what
    an earlier run began there. InputError before anything is spent.
    """
    prompts, _ = sources.groups[0]
    references = sources.references
    asked = asdict(wanted)
    if wanted.method != "augpe":
        del asked["iterations"]
    run = {
        **asked,
        **sources.facts,
        "reference_tokens": prompts.reference_tokens,
        "model": model.digest,
        "tokenizer": prompts.tokenizer.digest,
    }
    say_text = _progress(wanted.texts, say)
    if wanted.method == "augpe":
        settings = augpe_for(wanted)
        if wanted.texts < 1:
            raise InputError(f"--texts must be 1 or more, found {wanted.texts}")
        promised = statement(
            name="augpe",
            event=settings.event,
            facts=asdict(settings),
            run=run,
            texts=1,
            guarantee=HOLDS_BUT_FOR_ROUNDING,
            adjacency=wanted.adjacency,
            delta=wanted.delta,
        )
        with ledger_file.opened(out, run, references, spends_of(promised)) as file:
            write_statement(out, promised)
            if 0 < file.done < wanted.texts:
                # Other processors may compute other last bits, and so another corpus by the same
                # noise.
                raise InputError(
                    f"{out} has {file.done} of {wanted.texts} texts, which AugPE releases at once; "
                    "give another --out, which is charged anew"
                )
            if file.done < wanted.texts:
                prg = file.begin(wanted.texts)
                made, _ = augpe.corpus(
                    settings,
                    model.config,
                    model.weights,
                    prompts,
                    references,
                    wanted.texts,
                    prg,
                    say,
                    sources.vary,
                )
                file.add([_line(text, prompts, {}) for text in made])
        return promised
    method = method_for(wanted)
    check_number(wanted, [len(some) for _, some in sources.groups])
    promised = statement(
        name=method.name,
        event=method.event,
        facts=method.facts,
        guarantee=method.guarantee,
        adjacency=wanted.adjacency,
        delta=wanted.delta,
        texts=wanted.texts,
        run=run,
    )
    rooms = sources.rooms
    at_once = together(method, rooms[1] if rooms else prompts.room, wanted.texts)
    generators = [
        Generator(method, model.config, model.weights, prompts, rooms, at_once)
        for prompts, _ in sources.groups
    ]
    parts = [
        (group, batch)
        for group, (_, some) in enumerate(sources.groups)
        for batch in _parts(wanted, some)
    ]

    def alike(number: int) -> int:
        """Return how many texts from this one on have its labels and go together."""
        following = parts[number : min(number + at_once, wanted.texts)]
        return sum(
            1 for _ in itertools.takewhile(lambda part: part[0] == parts[number][0], following)
        )

    def make(numbers: range, prg: Prg) -> list[dict[str, Any]]:
        group = parts[numbers.start][0]
        labels = {name: values[group] for name, values in sources.labels.items()}
        texts = generators[group].texts(
            [parts[number][1] for number in numbers],
            prg,
            lambda tokens: say_text(numbers.start, tokens, len(numbers)),
        )
        return [_line(text, prompts, labels) for text in texts]

    with ledger_file.opened(out, run, references, spends_of(promised)) as file:
        write_statement(out, promised)
        say_text(file.done, 0, 1)
        ledger_file.write(file, wanted.texts, make, alike)
    return promised


def _parts(wanted: CorpusRequest, references: Sequence[str]) -> list[list[str]]:
    """Return the references of each text."""
    if wanted.adjacency == ADD_OR_REMOVE:
        return dealt(references, wanted.texts, wanted.batch)
    return batches(references, wanted.batch)


def statement_path(out: Path) -> Path:
    return out.with_name(out.name + ".privacy.json")


def write_statement(out: Path, promised: dict[str, Any]) -> None:
    """Write the statement beside the texts; InputError where that cannot be."""
    path = statement_path(out)
    try:
        replace_whole(path, (json.dumps(promised, indent=2) + "\n").encode())
        path.chmod(0o644)  # it goes with the texts
    except OSError as exc:
        raise InputError(f"--out: cannot write {path}: {exc.strerror}") from None


def _line(text: Made, prompts: Prompts, labels: dict[str, str]) -> dict[str, Any]:
    return {
        **labels,
        "text": prompts.tokenizer.decode(text.tokens),
        "tokens": text.tokens,
        "ended": text.ended,
    }


def _progress(texts: int, say: Callable[[str], None]) -> Callable[[int, int, int], None]:
    def say_text(number: int, tokens: int, count: int = 1) -> None:
        first, last = min(number + 1, texts), min(number + count, texts)
        said = f"text {first}" if count == 1 else f"texts {first} to {last}"
        say(f"{said} of {texts}" + (f": {tokens} tokens" if tokens else ""))

    return say_text
