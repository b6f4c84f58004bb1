"""What the three processes of vault mode tell each other, in the order they do.

    vault -> engine    hello                          engine -> vault   model (`Model`)
    vault -> engine    open (lanes, evidence)         engine -> vault   room
    vault -> engine    weights                        engine -> vault   all leaves, in tree order:
                                                      the embedding, each block, the head
    vault -> engine    start (lengths, public)        keys and values of public positions, by layer;
                                                      then the first tokens, int32 [lane]
    then for every token, of the lanes that go on:
      in every layer   engine -> vault  q             [lane, kv head, group, head_dim]
                       vault -> engine  A, m, gamma   shaped as q, and twice without head_dim
      engine -> vault  logits [lane, vocab]           vault -> engine   tokens, int32; -1: no more

    user -> vault      hello                          vault -> user     evidence, model
    user -> vault      prompts (`VaultRequest`),      vault -> user     stage, tokens ..., end
    all tokens as int32 [sum]
    or marked (`MarkedRequest`)                       vault -> user     fakes (`Fakes`), and so on

Evidence of where the vault runs (`attested`) is "" where it has none. Arrays are float32 but where
it says otherwise. Whoever gives up sends `error` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from models.family import ModelConfig, config_from, weight_shapes
from spu_llm.core.errors import InputError, SpuLlmError, WireError
from spu_llm.net import tls
from spu_llm.net.entrance import Met
from spu_llm.net.identity import Identity
from spu_llm.net.messages import Messages
from spu_llm.net.stream import connect
from spu_llm.systems.program import read

CONNECT_S = 20.0
END = -1  # in place of a token: a lane that does not go on
MAX_LANES = 256


@dataclass(frozen=True)
class Model:
    """The facts that an engine gives about its model: shape, what ends a text, and digests
    (SHA-256, hex) of its folded weights and of its tokenizer.
    """

    config: dict[str, Any]
    eos: list[int]
    weights: str
    tokenizer: str

    @property
    def shape(self) -> ModelConfig:
        try:
            return config_from(self.config)
        except ValueError as exc:
            raise WireError(f"the engine's model cannot be used: {exc}") from None


@dataclass(frozen=True)
class VaultRequest:
    """A user's wish: so many tokens after each of some prompts. public: positions, the same in
    every prompt, that the engine may compute on by itself. fakes: positions that fake prompts have
    for themselves, if they are to share what is around them (`compact`); own: which prompt is none.
    seed: fixes sampling.
    """

    lengths: list[int]
    public: list[int]
    max_new_tokens: int
    temperature: float
    fakes: list[int]
    own: int
    seed: int | None = None


@dataclass(frozen=True)
class MarkedRequest:
    """A user's wish that leaves making fakes to the vault: the prompt with its tags, and how they
    are to be made (`ObfuscationOptions`). key: 32 bytes, in hex, that say where the prompt stands
    among them (`systems.confidential.placing`).
    """

    prompt: str
    max_new_tokens: int
    temperature: float
    redact: str | None
    fakes: int
    min_fakes: int
    eta: float
    as_published: str | None
    epsilon: float
    key: str
    seed: int | None = None


@dataclass(frozen=True)
class Fakes:
    """The facts that a vault gives about the prompts that it has made, in words and numbers: what
    the engine learns of them, their lengths, and how often a guess which one is the user's may be
    right.
    """

    lengths: list[int]
    says: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """The address where a process listens, and who is trusted there; None: whoever answers, in the
    clear.
    """

    host: str
    port: int
    identity: Identity | None


def answer(
    met: Met, name: str, work: Callable[[Met, Messages], None], failed: Callable[[str], None]
) -> None:
    """Do what a caller, of this name in messages, has come for. What fails is told to it and to
    `failed`, and ends nothing else.
    """
    try:
        messages = Messages(met.stream, name, certificate=met.peer)
        try:
            work(met, messages)
        except SpuLlmError as exc:
            messages.fail(str(exc))
            raise
        finally:
            messages.close()
    except SpuLlmError as exc:
        failed(str(exc))
    except Exception as exc:  # one of this program's own
        met.tcp.close()
        failed(f"{type(exc).__name__}: {exc}")


def call(place: Place, peer: str) -> Messages:
    """Return a connection to `peer`, which listens at `place`."""
    tcp = connect(place.host, place.port, CONNECT_S, peer)
    if place.identity is None:
        return Messages(tcp, peer)
    stream = tls.as_client(tcp, place.identity, place.host)
    return Messages(stream, peer, certificate=stream.peer)


def told(kind: Any, message: Mapping[str, Any], peer: str) -> Any:
    """Return the record in a message."""
    fields = {name: value for name, value in message.items() if name != "type"}
    try:
        return read(kind, fields, f"{peer} sent what cannot be read")
    except InputError as exc:
        raise WireError(str(exc)) from None


def say_record(messages: Messages, kind: str, record: Any) -> None:
    messages.say(kind, **asdict(record))


def parts_of(weights: Any) -> Iterator[Any]:
    """Yield folded weights as they are streamed: embedding, blocks, head."""
    yield {name: w for name, w in weights.items() if name not in ("blocks", "head")}
    yield from weights["blocks"]
    yield weights["head"]


def part_shapes(config: ModelConfig) -> Iterator[Any]:
    yield from parts_of(weight_shapes(config))


def check_asked(asked: VaultRequest, config: ModelConfig) -> None:
    """Raise InputError for what a model of this shape cannot do."""
    lengths, new = asked.lengths, asked.max_new_tokens
    if not 1 <= len(lengths) <= MAX_LANES:
        raise InputError(f"1 to {MAX_LANES} prompts go together, found {len(lengths)}")
    if min(lengths) < 1:
        raise InputError("the prompt has no tokens")
    if new < 1:
        raise InputError(f"--max-new-tokens must be 1 or more, found {new}")
    if max(lengths) + new > config.context:
        raise InputError(
            f"{max(lengths)} prompt tokens and {new} new ones do not fit the model's context of "
            f"{config.context}; shorten the prompt or lower --max-new-tokens"
        )
    if not 0 <= asked.temperature <= 100:
        raise InputError(f"--temperature must be 0 to 100, found {asked.temperature:g}")
    if any(not 0 <= p < min(lengths) for p in asked.public):
        raise InputError("a public position lies outside of a prompt")
    if len(set(asked.public)) == max(lengths):
        raise InputError("all of the prompt is public: there is nothing for a vault to keep")
    if asked.fakes:
        inside = sorted(set(asked.fakes)) == asked.fakes and 0 <= asked.fakes[0]
        if len(set(lengths)) > 1 or len(lengths) < 2 or not 0 <= asked.own < len(lengths):
            raise InputError("compact prompts are two or more of equal length, one of them the own")
        if not inside or asked.fakes[-1] >= lengths[0] or set(asked.fakes) & set(asked.public):
            raise InputError("positions of fakes lie inside the prompts, in order, none public")
        if len(asked.fakes) == lengths[0]:
            raise InputError("compact prompts share nothing; leave --as-published out")
