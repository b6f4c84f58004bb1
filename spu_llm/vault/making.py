"""Fakes that a vault makes by itself, for a user who sends a prompt with its tags (Gim, Li, Zhong,
section 3.3: the vault samples, by a model that it has, and knows the place by the user's key).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.core.prg import KEY_BYTES
from spu_llm.systems.confidential.outgoing import ObfuscationOptions, marked_prompt, outgoing
from spu_llm.systems.confidential.placing import place_of, placed
from spu_llm.vault.told import MAX_LANES, Fakes, MarkedRequest, VaultRequest


@dataclass(frozen=True)
class Maker:
    """A vault's own means. public_model: directory; secrets: folder of its user's book, if any."""

    public_model: Path
    secrets: Path | None = None

    def made(
        self, wish: MarkedRequest, tokenizer: str
    ) -> tuple[VaultRequest, list[list[int]], Fakes]:
        """Return the request for a prompt among fakes, all prompts in order, and what their user is
        told. tokenizer: the digest of the engine's. InputError where nothing may be sent.
        """
        words = Tokenizer.load(self.public_model)
        if words.digest != tokenizer:
            raise InputError(
                "the vault's public model has another tokenizer than the engine's model; it needs "
                "another --draft-model"
            )
        key = _key(wish.key)
        options = ObfuscationOptions(
            redact=wish.redact,
            fakes=wish.fakes,
            min_fakes=wish.min_fakes,
            eta=wish.eta,
            secrets=self.secrets,
            draft_model=self.public_model,
            as_published=wish.as_published,
            epsilon=wish.epsilon,
        )
        if not wish.fakes < MAX_LANES:
            raise InputError(f"--fakes must be below {MAX_LANES}, found {wish.fakes}")
        out = outgoing(
            marked_prompt(wish.prompt, options, words), options, words, self.public_model
        )
        prompts = placed(key, wish.prompt, out.rows, out.own)
        lengths = [len(prompt) for prompt in prompts]
        asked = VaultRequest(
            lengths,
            out.public,
            wish.max_new_tokens,
            wish.temperature,
            out.compact,
            place_of(key, wish.prompt, len(prompts)),
            wish.seed,
        )
        facts = dict(out.facts)
        return asked, prompts, Fakes(lengths, facts.pop("says", ""), facts)


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InputError(f"the key of the prompt's place has {KEY_BYTES} bytes")
    return key
