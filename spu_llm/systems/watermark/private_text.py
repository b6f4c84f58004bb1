"""Private completions whose text a client's key marks: by the noise of a race, or by choosing among
candidates. What the worker has to know of keys, and the rules that follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from protocols.verification.race import Race
from protocols.verification.variants import Rule
from spu_llm.core.errors import InputError
from spu_llm.systems.decoding.branching import Branching, Single
from spu_llm.systems.decoding.generate import Completion
from spu_llm.systems.decoding.limits import MAX_CANDIDATES
from spu_llm.systems.decoding.records import CANDIDATES_ALONE, RulesModule
from spu_llm.systems.program import Send, read
from spu_llm.systems.watermark.candidates import Candidates, usual_tokens
from spu_llm.systems.watermark.cdfs import Family
from spu_llm.systems.watermark.history import History
from spu_llm.systems.watermark.keys import Key, Scheme
from spu_llm.systems.watermark.marked_race import MarkedRace
from spu_llm.systems.watermark.race_marks import MarkedNoise
from spu_llm.systems.watermark.selecting import Chooser, group_of
from spu_llm.systems.watermark.units import units_of

USED = "contexts used"  # an event of the client's worker


@dataclass(frozen=True)
class Mark:
    """Keys of a watermark and their scheme (`spu_llm.systems.watermark.keys`)."""

    secrets: list[str] = field(repr=False)  # bytes in hex
    ngram: int
    # Of each key: names of what it was used for before, contexts of a race or seeds; bytes in hex.
    used: list[str] = field(repr=False)
    method: str = "race"
    units: str = "tokens"
    family: str = "uniform"  # this and k: of candidates, which alone may have several keys
    k: int = 1

    @property
    def rules(self) -> RulesModule:
        """Return what a completion's inputs have of this mark."""
        return RulesModule(__name__, asdict(self))


def rules(
    settings: dict[str, Any],
    completion: Completion,
    before: int,
    tokenizer: Tokenizer,
    streams: Streams,
    send: Send,
) -> tuple[Rule, Branching]:
    """Return how tokens are drawn, and what is chosen of a step, by a mark (`decoding.records`).
    What it is used for is told before the text is. InputError for a mark of another kind than was
    asked for.
    """
    mark = read(Mark, settings, "the mark is malformed")
    rule, candidates = completion.verifier, completion.request.candidates

    def on_used(names: Sequence[bytes]) -> None:
        send(USED, names=[of_one.hex() for of_one in names])

    if (candidates > 1) != (mark.method == "candidates"):
        raise InputError(CANDIDATES_ALONE)
    keys = tuple(Key(bytes.fromhex(secret)) for secret in mark.secrets)
    histories = tuple(History.of(bytes.fromhex(used)) for used in mark.used)
    if candidates > 1:
        scheme = Scheme(mark.ngram, Family(mark.family, mark.k), mark.units)
        chooser = Chooser(
            keys,
            scheme,
            units_of(scheme.units, tokenizer),
            group_of(candidates, len(keys), MAX_CANDIDATES),
            histories,
            streams.sampling.child("choice"),
        )
        usual = usual_tokens(tokenizer)
        return rule, Candidates(chooser, tokenizer.eos_ids, streams, usual, on_used)
    if len(keys) != 1 or not isinstance(rule, Race) or not rule.noise:
        raise InputError("a mark is made of the noise of --verify race, under one key")
    vocab = completion.layout.config.vocab_size
    noise = MarkedNoise(keys[0], mark.ngram, vocab, histories[0], streams.sampling)
    return MarkedRace(rule, noise, before, lambda names: on_used([names])), Single(streams)
