"""What two workers run together: the record of a program, and what goes into a session of it.

A request is what the client states and both parties know; inputs are a party's own and stay with
it. Both are frozen dataclasses, whose names and types hold on every way that they take: into the
manifest, out of the peer's, and to the worker.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from spu_llm.core.errors import InputError
from spu_llm.core.settings import OWN, SpuConfig

if TYPE_CHECKING:
    from models.family import ModelConfig

T = TypeVar("T")
Q = TypeVar("Q")  # a request
C = TypeVar("C")  # the client's own inputs

Send = Callable[..., None]  # send(event, **fields): an event for the supervisor
# hear(seconds): what its user has said since, within that time; None: nothing.
Hear = Callable[[float], Mapping[str, Any] | None]
Run = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Nothing:
    """No request, or no inputs."""


@dataclass(frozen=True)
class SystemPromptShape:
    """Rows that a text of the provider's own takes before every prompt, after what is public: both
    know so much. padded: how many of them, the first ones, may hold nothing.
    """

    rows: int = 0
    padded: int = 0

    def left(self, model: ModelConfig) -> ModelConfig:
        """Return the model as it is for all that is not the provider's own: with fewer positions,
        and fewer of the first ones that must be public.
        """
        return model.after(self.rows, self.rows - self.padded)


@dataclass(frozen=True)
class Served:
    """The facts that a provider's system tells a session's worker (`systems.served`)."""

    kind: str = ""
    """The name of the dataclass that `fields` are of; "" for none."""
    fields: dict[str, Any] = field(default_factory=dict, repr=False)
    alone: str = ""
    """What is served, in words, where it is a part of the model alone: memory then holds no more,
    and other programs are refused.
    """
    stream_key: str | None = field(default=None, repr=False)
    """The key, 32 bytes in hex, of what the provider draws as joint randomness; None: a fresh one.
    """

    @staticmethod
    def of(brought: Any, alone: str = "") -> Served:
        """Return a dataclass as a system brings it."""
        return Served(type(brought).__name__, dataclasses.asdict(brought), alone)

    def read(self, kind: type[T]) -> T | None:
        """Return what the system brings, where it is of this kind; else None."""
        if self.kind != kind.__name__:
            return None
        return read(kind, self.fields, f"the provider's {self.kind} is malformed")


@dataclass(frozen=True)
class ProviderInputs:
    """The inputs that every provider brings to a session."""

    model_dir: str
    sampling_seed: int | None = None
    """Makes the provider's randomness repeatable."""
    disk_bytes: dict[str, int] = field(default_factory=dict)
    """How much correlated randomness may take, by directory."""
    weights: int | None = None
    """A descriptor of the weights in memory (`models.resident`)."""
    system_prompt: list[int] = field(default_factory=list)
    """The tokens of the provider's own text before every prompt."""
    served: Served = Served()
    """What the system that is served adds."""


@dataclass(frozen=True)
class Job(Generic[Q, C]):
    """The inputs of a party when its program starts; the other one's are None."""

    request: Q
    model: ModelConfig  # as the provider states it
    of_client: C | None = None
    of_provider: ProviderInputs | None = None
    before: SystemPromptShape = SystemPromptShape()  # as the provider states it
    backend: str = OWN  # what computes forwards (`spu_llm.core.settings`)

    @property
    def client(self) -> C:
        """Return the client's own inputs; for the client alone."""
        assert self.of_client is not None
        return self.of_client

    @property
    def provider(self) -> ProviderInputs:
        """Return the provider's own inputs; for the provider alone."""
        assert self.of_provider is not None
        return self.of_provider


def served_whole(request: Any, held: ProviderInputs, model: ModelConfig) -> None:
    """Raise InputError unless the provider serves its whole model."""
    if held.served.alone:
        raise InputError(f"the provider serves {held.served.alone}")


@dataclass(frozen=True)
class Program:
    """`module` has `run(session, job, send)`, which returns this party's result as JSON fields:
    only workers import it. hears: `run` has a fourth argument, `hear`, for what comes while it
    runs.

    request, inputs: types of what the client asks for, and of what it puts in itself; fields of a
    request are scalars, or tuples of whole numbers or of words without commas. check: InputError
    for what cannot be run with the provider's model. text: the parties need one tokenizer.
    needs_pool: what its session makes is for later ones, and the provider must keep it.
    keeps_hints: hints of the weights outlive the session. spu: SPU's settings; None: `run` gets a
    `PlainSession`, and there is no SPU. backends: what may compute its forwards. encoders: models
    whose prompt an encoder reads are served, too. beside: of a request, whether what its session
    makes goes to the inbox of a pool that another session may have (`spu_llm.offline.inbox`).
    admit: InputError for what a provider that brings this, and this model, does not serve: its
    supervisor asks first, and what that says the client is told.
    """

    name: str
    module: str
    request: type = Nothing
    inputs: type = Nothing
    check: Callable[[Any, ModelConfig], None] = lambda request, model: None
    text: bool = True
    needs_pool: bool = False
    keeps_hints: bool = True
    spu: SpuConfig | None = SpuConfig()
    backends: tuple[str, ...] = (OWN,)
    encoders: bool = False
    hears: bool = False
    beside: Callable[[Any], bool] = lambda request: False
    admit: Callable[[Any, ProviderInputs, ModelConfig], None] = served_whole

    def load(self) -> Run:
        """Return the module's `run`."""
        run: Run = import_module(self.module).run
        return run

    def asked(self, fields: Mapping[str, object]) -> Any:
        """Return the request that a manifest states; InputError when it is none of this
        program's.
        """
        types_of = get_type_hints(self.request)
        split = {name: _split(types_of.get(name), value) for name, value in fields.items()}
        return read(
            self.request, split, f"the client's request has other fields than a {self.name}'s"
        )


def stated(request: Any) -> dict[str, Any]:
    """Return a request as settings of a session: scalars, and tuples as comma lists."""
    values = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    return {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in values.items()
    }


def _split(kind: Any, value: object) -> object:
    """Return the parts of a comma list where a tuple is expected; whatever else as it is."""
    if get_origin(kind) is not tuple or not isinstance(value, str):
        return value
    try:
        return [get_args(kind)[0](part) for part in value.split(",")] if value else []
    except ValueError:
        return value


def read(kind: type[T], fields: object, complaint: str) -> T:
    """Return the dataclass `kind` with these fields, as JSON has them; InputError, which begins
    with `complaint`, unless names and types are exactly its own.

    Types: scalars, dataclasses, `X | None`, `list[X]`, `tuple[X, ...]`, `dict[str, X]`, `Any`.
    """
    try:
        return _dataclass(kind, fields)
    except TypeError as exc:
        raise InputError(f"{complaint}: {exc}") from None


def _dataclass(kind: Any, fields: Any) -> Any:
    if not isinstance(fields, Mapping):
        raise TypeError("it is no object")
    types_of = get_type_hints(kind)
    wanted = {f.name: types_of[f.name] for f in dataclasses.fields(kind)}
    if odd := wanted.keys() ^ fields.keys():
        name = min(odd)
        raise TypeError(f"{name[:80]!a} is {'missing' if name in wanted else 'not known'}")
    return kind(**{name: _value(wanted[name], value, name) for name, value in fields.items()})


def _value(kind: Any, value: Any, name: str) -> Any:
    origin, of = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        (some,) = (k for k in of if k is not type(None))
        return None if value is None else _value(some, value, name)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_value(of[0], part, name) for part in value)
    if origin is dict and isinstance(value, dict):
        return {key: _value(of[1], part, name) for key, part in value.items()}
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value)
    if kind is Any or type(value) is kind:
        return value
    raise TypeError(f"{name} is {value!r:.80}, not of type {getattr(kind, '__name__', kind)}")
