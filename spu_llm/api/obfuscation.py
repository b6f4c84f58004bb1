"""A prompt among fakes, for any endpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from models.tokenizer import Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.core.errors import InputError, PeerError
from spu_llm.systems.confidential.outgoing import (
    WITHOUT_SECRETS,
    ObfuscationOptions,
    marked_prompt,
    outgoing,
    told_of,
)
from spu_llm.systems.watermark.endpoint import HttpSampler

__all__ = ["AmongFakes", "ObfuscationOptions", "among_fakes", "answered"]


@dataclass(frozen=True)
class AmongFakes:
    """Texts of prompts in the order in which all of them are to be sent."""

    prompts: list[str]
    own: int  # which of them is the user's
    learned: list[str]  # by whoever reads all of them
    facts: dict[str, Any]


def among_fakes(prompt: str, options: ObfuscationOptions = ObfuscationOptions()) -> AmongFakes:
    """Return a prompt with <redacted> spans among fakes, for any model. What is sent must not
    depend on which one is the user's: send all, in this order, with the same settings.

    InputError where nothing is redacted, or nothing may be sent.
    """
    words = Tokenizer.load(options.draft_model or shipped("public"))
    marked = marked_prompt(prompt, options, words)
    if not marked.targets:
        raise InputError(
            "nothing in the prompt is <redacted>, so all of it would be read; mark what to hide, "
            "or give --redact"
        )
    out = outgoing(marked, options, words, shipped("public"))
    prompts = [words.decode(row) for row in out.rows]
    if len(set(prompts)) < len(prompts) or prompts[out.own] != marked.marked.text:
        raise InputError("fakes are no texts of their own; give another --draft-model")
    return AmongFakes(prompts, out.own, told_of(len(out.rows), out.facts), out.facts)


def answered(
    among: AmongFakes,
    url: str,
    model: str,
    max_new_tokens: int,
    temperature: float,
    on_answer: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Return what the completion endpoint at `url` (.../v1/completions) says to each prompt, asked
    one after another. on_answer: gets how many are answered. PeerError when the endpoint does not;
    what was sent until then goes out again only with the same fakes where options had `secrets`.
    """
    with closing(HttpSampler(url, model, temperature)) as endpoint:
        texts: list[str] = []
        for prompt in among.prompts:
            try:
                (drawn,) = endpoint.sample(prompt, 1, max_new_tokens)
            except PeerError as exc:
                raise PeerError(
                    f"{exc}; {len(texts)} of {len(among.prompts)} prompts are answered. "
                    f"{WITHOUT_SECRETS.capitalize()}"
                ) from exc
            assert isinstance(drawn.content, str)
            texts.append(drawn.content)
            on_answer(len(texts))
    return texts
