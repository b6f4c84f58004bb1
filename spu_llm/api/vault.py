"""A user of vault mode: prompts to a vault that the user trusts, text back."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from models.tokenizer import StreamDecoder, Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.api.events import OnEvent, Stage, Text
from spu_llm.core.errors import InputError, PeerError, WireError
from spu_llm.core.prg import Prg
from spu_llm.systems.confidential.book import key_in
from spu_llm.systems.confidential.learned import learned
from spu_llm.systems.confidential.outgoing import (
    WITHOUT_SECRETS,
    ObfuscationOptions,
    marked_prompt,
    outgoing,
    told_of,
)
from spu_llm.systems.confidential.placing import place_of
from spu_llm.systems.confidential.spans import Prompt
from spu_llm.vault.attested import Policy
from spu_llm.vault.told import Fakes, MarkedRequest, Model, Place
from spu_llm.vault.user import Wish, generate


@dataclass(frozen=True)
class VaultOptions:
    """The settings of a text to write. The engine learns the limit, and all text that it writes."""

    max_new_tokens: int = 32
    temperature: float = 0.7  # 0 is greedy
    seed: int | None = None  # fixes sampling
    obfuscation: ObfuscationOptions = field(default_factory=ObfuscationOptions)
    # The vault makes the fakes: a folder with the key that says which prompt is the user's.
    fakes_in_vault: Path | None = None


@dataclass(frozen=True)
class VaultText:
    """The text that a model wrote after a prompt, and its report. Its fields in JSON (`to_json`)
    are the command line's `--json`.
    """

    text: str
    token_ids: list[int]
    seconds: dict[str, float]  # by phase, as the vault counted them
    bytes: dict[str, dict[str, int]]  # payload of arrays between vault and engine, by phase
    learned: dict[str, list[str]]
    obfuscation: dict[str, Any]
    config: dict[str, Any]
    elapsed_seconds: float  # since the vault was called

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "elapsed_seconds"}


def complete_by_vault(
    place: Place,
    prompt: str,
    options: VaultOptions = VaultOptions(),
    on_event: OnEvent = lambda event: None,
    *,
    tokenizer: Path | None = None,
    policy: Policy | None = None,
) -> VaultText:
    """Complete a prompt, which may have <confidential> and <redacted> spans, by the vault at
    `place`.

    The vault learns the prompt; `VaultText.learned` says what the engine learns. tokenizer:
    directory with that of the engine's model; the shipped one by default. policy: what the vault's
    evidence of where it runs has to say (`vault.attested`), before it gets the prompt. on_event:
    gets each event in the calling thread. SpuLlmError, of the kind that says who failed.
    """
    words = Tokenizer.load(tokenizer or shipped("public"))
    on_event(Stage("reading the prompt"))
    marked = marked_prompt(prompt, options.obfuscation, words)
    make = _made_there if options.fakes_in_vault is not None else _made_here
    asked, out = make(prompt, marked, options, words, on_event)
    met: list[Model] = []

    def wish(model: Model) -> Wish | MarkedRequest:
        if model.tokenizer != words.digest:
            raise InputError("the model has another tokenizer; give its directory as --tokenizer")
        met.append(model)
        return asked

    def on_fakes(fakes: Fakes) -> None:
        assert isinstance(asked, MarkedRequest)
        if bool(marked.targets) != (len(fakes.lengths) > 1):
            raise WireError("the vault has hidden something else than was redacted")
        out.lengths = fakes.lengths
        out.own = place_of(bytes.fromhex(asked.key), prompt, len(fakes.lengths))
        out.facts = {**fakes.facts, "says": fakes.says} if fakes.says else {}

    decoder = StreamDecoder(words)
    parts: list[str] = []

    def emit(part: str) -> None:
        if part:
            parts.append(part)
            on_event(Text(part))

    def on_tokens(lanes: Any, tokens: Any) -> None:
        own = [t for lane, t in zip(lanes, tokens, strict=True) if lane == out.own]
        emit(decoder.push(t for t in own if t not in words.eos_ids))

    started = time.monotonic()
    on_event(Stage("reaching the vault"))
    try:
        answered = generate(
            place, wish, lambda name: on_event(Stage(name)), on_tokens, policy, on_fakes
        )
    except PeerError as exc:
        how = options.obfuscation
        if met and marked.targets and how.secrets is None and options.fakes_in_vault is None:
            raise type(exc)(f"{exc}; {WITHOUT_SECRETS}") from exc
        raise
    emit(decoder.finish())
    facts = learned(met[0].shape, out.lengths, answered.tokens)
    facts["engine"] += told_of(len(out.lengths), out.facts)
    return VaultText(
        text="".join(parts),
        token_ids=answered.tokens[out.own],
        seconds=answered.seconds,
        bytes=answered.bytes,
        learned=facts,
        obfuscation={name: fact for name, fact in out.facts.items() if name != "says"},
        config={"model": met[0].config, "temperature": options.temperature},
        elapsed_seconds=time.monotonic() - started,
    )


@dataclass
class _SentPrompts:
    """The prompts that went out, as this process made them or as the vault describes them."""

    lengths: list[int]
    own: int
    facts: dict[str, Any]


def _made_here(
    prompt: str, marked: Prompt, options: VaultOptions, words: Tokenizer, on_event: OnEvent
) -> tuple[Wish, _SentPrompts]:
    """Make the fakes in this process; the vault is told no more than it must be."""
    if marked.targets:
        on_event(Stage("finding fakes"))
    out = outgoing(marked, options.obfuscation, words, shipped("public"))
    wish = Wish(
        out.rows,
        out.public,
        options.max_new_tokens,
        options.temperature,
        options.seed,
        out.compact,
        out.own if out.compact else 0,  # exact prompts are alike to the vault
    )
    return wish, _SentPrompts([len(row) for row in out.rows], out.own, out.facts)


def _made_there(
    prompt: str, marked: Prompt, options: VaultOptions, words: Tokenizer, on_event: OnEvent
) -> tuple[MarkedRequest, _SentPrompts]:
    """Leave making fakes to the vault, which is told the prompt with its tags, and the key of its
    place.
    """
    how = options.obfuscation
    if how.secrets is not None or how.draft_model is not None:
        raise InputError(
            "the vault makes fakes with --secrets and --draft-model of its own (vault open)"
        )
    how.check()
    assert options.fakes_in_vault is not None
    request = MarkedRequest(
        prompt,
        options.max_new_tokens,
        float(options.temperature),
        how.redact,
        how.fakes,
        how.min_fakes,
        float(how.eta),
        how.as_published,
        float(how.epsilon),
        _place_key(options.fakes_in_vault).hex(),
        options.seed,
    )
    return request, _SentPrompts([], 0, {})


def _place_key(folder: Path) -> bytes:
    """Return a key for the vault: not the folder's own, from which a book's draws would follow."""
    return Prg(key_in(folder)).child("places in a vault").words((4,)).tobytes()
