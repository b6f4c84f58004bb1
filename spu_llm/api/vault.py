"""A user of vault mode: prompts to a vault that the user trusts, text back."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from models.tokenizer import StreamDecoder, Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.api.events import OnEvent, Stage, Text
from spu_llm.api.obfuscation import ObfuscationOptions, marked_prompt, outgoing
from spu_llm.core.errors import InputError
from spu_llm.systems.confidential.learned import learned
from spu_llm.vault.attested import Policy
from spu_llm.vault.told import Model, Place
from spu_llm.vault.user import Wish, generate


@dataclass(frozen=True)
class VaultOptions:
    """How a text is to be written. The engine learns the limit, and all text that it writes."""

    max_new_tokens: int = 32
    temperature: float = 0.7  # 0 is greedy
    seed: int | None = None  # fixes sampling
    obfuscation: ObfuscationOptions = field(default_factory=ObfuscationOptions)


@dataclass(frozen=True)
class VaultText:
    """What a model wrote after a prompt. Its fields in JSON (`to_json`) are the command line's
    `--json`.
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
    if marked.targets:
        on_event(Stage("finding fakes"))
    out = outgoing(marked, options.obfuscation, words)
    met: list[Model] = []

    def wish(model: Model) -> Wish:
        if model.tokenizer != words.digest:
            raise InputError("the model has another tokenizer; give its directory as --tokenizer")
        met.append(model)
        return Wish(
            out.rows,
            out.public,
            options.max_new_tokens,
            options.temperature,
            options.seed,
            out.compact,
            out.own,
        )

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
    answered = generate(place, wish, lambda name: on_event(Stage(name)), on_tokens, policy)
    emit(decoder.finish())
    facts = learned(met[0].shape, [len(row) for row in out.rows], answered.tokens)
    facts["engine"] += out.learned()
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
