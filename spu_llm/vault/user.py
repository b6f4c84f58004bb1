"""A user's end of vault mode: prompts to the vault, tokens back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spu_llm.core.errors import WireError
from spu_llm.net.messages import Messages
from spu_llm.vault import told
from spu_llm.vault.attested import Policy

_VAULT_S = 45.0  # a vault may wait for its engine, and for the engine's weights
VAULT = "the vault"


@dataclass(frozen=True)
class Wish:
    """The request of a user, of prompts that go together (`told.VaultRequest`)."""

    prompts: Sequence[Sequence[int]]
    public: Sequence[int]
    max_new_tokens: int
    temperature: float
    seed: int | None = None
    fakes: Sequence[int] = ()
    own: int = 0


@dataclass(frozen=True)
class Answered:
    """Tokens of every lane; seconds and bytes (payload of arrays between vault and engine) by
    phase, as the vault counted them.
    """

    tokens: list[list[int]]
    seconds: dict[str, float]
    bytes: dict[str, dict[str, int]]


OnFakes = Callable[[told.Fakes], None]
OnTokens = Callable[[Sequence[int], Sequence[int]], None]  # lanes, and a token of each


def generate(
    place: told.Place,
    wish: Callable[[told.Model], Wish | told.MarkedRequest],
    on_stage: Callable[[str], None] = lambda name: None,
    on_tokens: OnTokens = lambda lanes, tokens: None,
    policy: Policy | None = None,
    on_fakes: OnFakes = lambda fakes: None,
) -> Answered:
    """Ask the vault at `place`, whose evidence a policy is to allow. `wish` is told the engine's
    model first, and may refuse it. on_fakes: is told what the vault has made, where it was asked
    to, before there are tokens.
    """
    vault = told.call(place, VAULT)
    vault.answer_s = _VAULT_S
    try:
        vault.say("hello")
        evidence = vault.hear("evidence").get("token")
        if policy is not None:
            policy.check(evidence, vault.certificate)
        model: told.Model = told.told(told.Model, vault.hear("model"), VAULT)
        wanted = wish(model)
        if isinstance(wanted, Wish):
            _send(vault, wanted, model)
            count = len(wanted.prompts)
        else:
            told.say_record(vault, "marked", wanted)
            fakes = _fakes(vault, on_stage, wanted.min_fakes)
            count = len(fakes.lengths)
            on_fakes(fakes)
        texts: list[list[int]] = [[] for _ in range(count)]
        while (message := vault.hear("stage", "tokens", "end"))["type"] != "end":
            if message["type"] == "stage":
                on_stage(str(message.get("name"))[:200])
                continue
            lanes, tokens = _of_lanes(message, len(texts), model.shape.vocab_size)
            for lane, token in zip(lanes, tokens, strict=True):
                texts[lane].append(token)
            on_tokens(lanes, tokens)
        return Answered(texts, message["seconds"], message["bytes"])
    finally:
        vault.close()


def _send(vault: Messages, wanted: Wish, model: told.Model) -> None:
    asked = told.VaultRequest(
        [len(p) for p in wanted.prompts],
        list(wanted.public),
        wanted.max_new_tokens,
        float(wanted.temperature),
        list(wanted.fakes),
        wanted.own,
        wanted.seed,
    )
    told.check_asked(asked, model.shape)
    told.say_record(vault, "prompts", asked)
    vault.send(np.concatenate([np.asarray(p, np.int32) for p in wanted.prompts]))


def _fakes(vault: Messages, on_stage: Callable[[str], None], fewest: int) -> told.Fakes:
    """Hear what the vault has made of a prompt with tags: one prompt, or `fewest` beside it."""
    while (message := vault.hear("stage", "fakes"))["type"] == "stage":
        on_stage(str(message.get("name"))[:200])
    fakes: told.Fakes = told.told(told.Fakes, message, VAULT)
    made = len(fakes.lengths) - 1
    if not (made == 0 or fewest <= made < told.MAX_LANES) or min(fakes.lengths) < 1:
        raise WireError("the vault states prompts that cannot be")
    if bool(made) != bool(fakes.says):
        raise WireError("the vault does not say how well its prompts hide the user's")
    return fakes


def _of_lanes(message: dict[str, Any], lanes: int, vocab: int) -> tuple[list[int], list[int]]:
    lanes_of, tokens = message.get("lanes"), message.get("tokens")
    for numbers, below in ((lanes_of, lanes), (tokens, vocab)):
        if not isinstance(numbers, list) or not all(
            type(n) is int and 0 <= n < below for n in numbers
        ):
            raise WireError("the vault sent tokens that do not exist")
    assert isinstance(lanes_of, list) and isinstance(tokens, list)
    if len(lanes_of) != len(tokens):
        raise WireError("the vault sent tokens of no lane")
    return lanes_of, tokens
