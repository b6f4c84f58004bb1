"""A corpus of texts that are drawn between two parties: one session each, accounted for before it;
one session for all where the provider has references, too, which it spends in one session alone.

Unlike a text that one party draws alone (`ledger_file`), one that was begun and did not come to its
end cannot be drawn again as it was: both parties' randomness is gone, and the provider has seen its
tokens. Its batch is spent, and an empty text, marked as lost, takes its place; so with all texts of
a session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protocols.dp.choice import Choice
from spu_llm.systems.dp_text import ledger_file
from spu_llm.systems.dp_text.corpus import check_texts, write_statement
from spu_llm.systems.dp_text.parameters import Parameters
from spu_llm.systems.dp_text.prompts import Prompts
from spu_llm.systems.dp_text.secure_budget import ANY_SPREAD, choice_of, text_event
from spu_llm.systems.dp_text.secure_records import SharedRequest, TextRequest
from spu_llm.systems.dp_text.statement import spends_of, statement

GUARANTEE = (
    "holds before anything is generated, whatever the references are, against semi-honest parties "
    "with bounded computing; of delta, a thousandth at most is for the bounds of the noise"
)

# make(number of the first, this party's references of each text of a session)
#   -> {"texts": [[token, ..], ..], "learned": {..}, ..}
Make = Callable[[int, Sequence[Sequence[str]]], dict[str, Any]]


@dataclass(frozen=True)
class SecureCorpusRequest:
    """A corpus to write between two parties. places: room for candidates; the rest is the client's
    own choice of prompts and texts. of_provider: references of each batch that are the provider's,
    where both have the model.
    """

    parameters: Parameters
    delta: float
    places: int
    prompts: Prompts
    texts: int
    of_provider: int = 0

    @property
    def own(self) -> int:
        """Return how many references of a batch are this party's."""
        return self.parameters.batch - self.of_provider

    @property
    def choice(self) -> Choice:
        return choice_of(self.parameters, ANY_SPREAD, 2 if self.of_provider else 1)

    @property
    def of_session(self) -> int:
        """Return the number of texts of a session. Another session would read the provider's
        references from the first on again, and spend them twice.
        """
        return self.texts if self.of_provider else 1

    @property
    def request(self) -> TextRequest:
        """Return the request of one session."""
        p = self.parameters
        assert p.top_k is not None
        fields: dict[str, Any] = {
            "query": tuple(self.prompts.public),
            "room": self.prompts.room,
            "batch": p.batch,
            "clip": p.clip,
            "temperature": p.temperature,
            "max_new_tokens": p.max_new_tokens,
            "top_k": p.top_k,
            "places": self.places,
            "eos": tuple(sorted(self.prompts.tokenizer.eos_ids)),
            "texts": self.of_session,
        }
        if not self.of_provider:
            return TextRequest(**fields)
        after = tuple(self.prompts.private("")[1:])
        return SharedRequest(**fields, of_provider=self.of_provider, after=after)

    def prompts_of(self, references: Sequence[str]) -> list[list[int]]:
        """Return the prompts of this party's part of a batch, all of one length: what is short is
        filled up in front, as if other texts had ended there. Empty lists for null references.
        """
        filler = self.prompts.begin[:1]
        prompts = []
        for reference in references:
            prompt = self.prompts.private(reference)
            prompts.append(filler * (self.prompts.room - len(prompt)) + prompt if reference else [])
        return prompts + [[] for _ in range(self.own - len(references))]


def write_corpus(
    out: Path,
    asked: SecureCorpusRequest,
    references: Sequence[str],
    parts: Sequence[Sequence[str]],
    make: Make,
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Write the texts to `out`, its ledger and its statement; or go on with what an earlier run
    began there. The statement, and what the parties learned in the last session.
    """
    p = asked.parameters
    check_texts(asked.texts, [len(references)], asked.own)
    run = {
        **asdict(p),
        "delta": asked.delta,
        "texts": asked.texts,
        "places": asked.places,
        "query": asked.prompts.query,
        "reference_tokens": asked.prompts.reference_tokens,
        "tokenizer": asked.prompts.tokenizer.digest,
        "parties": 2,
        "of_provider": asked.of_provider,
    }
    choice = asked.choice
    promised = statement(
        name="invisibleink between two parties",
        guarantee=GUARANTEE,
        event=text_event(choice, asked.places, p.max_new_tokens, asked.delta),
        facts=asdict(p),
        run=run,
        adjacency=p.adjacency,
        delta=asked.delta,
        texts=asked.texts,
    )
    promised["noise"] = asdict(choice.noise) | {"bound": choice.bound, "unit": "2^-18"}
    learned: dict[str, list[str]] = {}
    with ledger_file.opened(out, run, references, spends_of(promised)) as file:
        write_statement(out, promised)
        if file.done < file.begun:
            file.begin(0)
            file.add([_line(asked, [], lost=True)] * asked.of_session)
        while file.done < asked.texts:
            file.begin(asked.of_session)
            made = make(file.done, parts[file.done : file.done + asked.of_session])
            learned = made["learned"]
            file.add([_line(asked, text) for text in made["texts"]])
    return promised, learned


def _line(asked: SecureCorpusRequest, tokens: Sequence[int], lost: bool = False) -> dict[str, Any]:
    eos = asked.prompts.tokenizer.eos_ids
    ended = bool(tokens) and tokens[-1] in eos
    kept = list(tokens[:-1] if ended else tokens)
    line = {"text": asked.prompts.tokenizer.decode(kept), "tokens": kept, "ended": ended}
    return line | ({"lost": True} if lost else {})
