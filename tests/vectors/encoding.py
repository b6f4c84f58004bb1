"""How a recorded vector is written as JSON; README.md has the format."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import protocols
from experiments.common import saved
from protocols.arithmetic.cached import Cached
from protocols.bits.polynomials import Gate
from protocols.verification.sampling import Widths
from spu_llm.core.correlation import Correlation, Correlations, Part
from spu_llm.core.integers import Factor
from spu_llm.core.values import CLIENT, ROLES, Arith, Bool, Owner, Private, Public, Value, as_words
from spu_llm.offline import versions

FORMAT = 1
FOLDER = Path(__file__).parent
VERSION_FILE = FOLDER / "VERSION"
Json = dict[str, Any]


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def version_line() -> str:
    """Return the version of all protocols, and a digest of all vectors, of the exact figures of
    steps and of the versions of what is prepared without SPU, as the file VERSION has them.
    """
    prepared = ", ".join([versions.SILENT, versions.PACKED, versions.TRANSFERS, versions.SLOTS])
    content = hashlib.sha256(prepared.encode())
    content.update(json.dumps(saved.load("exact"), sort_keys=True).encode())
    for path in files():
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{protocols.VERSION} {content.hexdigest()}\n"


def path_of(op: str) -> Path:
    return FOLDER / f"{op}.json"


def load(op: str) -> Json:
    recorded: Json = json.loads(path_of(op).read_text(encoding="utf-8"))
    return recorded


def text_of(recorded: Json) -> str:
    return _lines(recorded, 0) + "\n"


def _lines(recorded: Any, margin: int) -> str:
    """Write JSON in lines of up to 100 characters, but for strings that are longer."""
    short = json.dumps(recorded)
    if margin + len(short) < 99 or not isinstance(recorded, dict | list):
        return short
    if isinstance(recorded, dict):
        head = {k: json.dumps(k) + ": " for k in recorded}
        items = [head[k] + _lines(v, margin + 1 + len(head[k])) for k, v in recorded.items()]
        opening, closing = "{}"
    else:
        items = [_lines(x, margin + 1) for x in recorded]
        opening, closing = "[]"
    body = ",\n".join(items).replace("\n", "\n ")
    return f"{opening}\n {body}\n{closing}"


# ---- arrays


def to_hex(array: np.ndarray) -> str:
    """Return the elements in order, each little-endian."""
    return array.astype(array.dtype.newbyteorder("<")).tobytes().hex()


def from_hex(text: str, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Raise ValueError when the size is not that of the shape."""
    kind = np.dtype(dtype)
    flat = np.frombuffer(bytes.fromhex(text), kind.newbyteorder("<"))
    return flat.astype(kind).reshape(tuple(shape))


# ---- values


def kind_of(value: Value) -> Json:
    """Return what both parties know of a value."""
    plain = "private" if isinstance(value, Private) else "public"
    shared = "bool" if isinstance(value, Bool) else "arith"
    form = shared if isinstance(value, Arith | Bool) else plain
    kind: Json = {"form": form, "dtype": value.dtype.name, "shape": list(value.shape)}
    if isinstance(value, Private):
        kind["owner"] = ROLES[value.owner]
    if isinstance(value, Arith | Bool):
        kind |= {"bits": value.bits, "frac_bits": value.frac_bits}
    if isinstance(value, Cached):
        kind["rows"] = value.ids.tolist()
    return kind


def held(value: Value) -> str | None:
    """Return what a party has of it; None when that is nothing."""
    if isinstance(value, Arith | Bool):
        return to_hex(value.words)
    return None if value.value is None else to_hex(np.asarray(value.value))


def of_both(client: Value, provider: Value) -> Json:
    """Return one value, as the two parties have it."""
    kind = kind_of(client)
    assert kind == kind_of(provider), "the parties have different kinds of a value"
    return kind | {"client": held(client), "provider": held(provider)}


def value_of(recorded: Json, rank: int) -> Value:
    """Return a party's half."""
    shape, dtype = tuple(recorded["shape"]), np.dtype(recorded["dtype"])
    mine, form = recorded[ROLES[rank]], recorded["form"]
    if form in ("arith", "bool"):
        words = from_hex(mine, np.uint64, shape)
        return (Arith if form == "arith" else Bool)(
            words, dtype, recorded["frac_bits"], recorded["bits"]
        )
    plain = None if mine is None else from_hex(mine, dtype, shape)
    if form == "public":
        assert plain is not None
        return Public(plain)
    return Private(ROLES.index(recorded["owner"]), shape, dtype, plain)


# ---- static parameters


def to_static(static: Json) -> Json:
    def plain(x: Any) -> Any:
        if isinstance(x, enum.Enum):
            return x.value
        return dataclasses.asdict(x) if dataclasses.is_dataclass(x) else x  # type: ignore[arg-type]

    return {name: plain(x) for name, x in static.items()}


def from_static(recorded: Json) -> Json:
    made = dict(recorded)
    if "to" in made:
        made["to"] = Owner(made["to"])
    if "widths" in made:
        made["widths"] = Widths(**made["widths"])
    return made


# ---- correlations


def _part(part: Part) -> Json:
    return {"shape": list(part.shape), "holder": part.holder.value, "form": part.form.value}


def parts_of(correlation: Correlation) -> Json:
    """Return the kinds of its words, as they are recorded."""
    both = {"masks": correlation.masks, "results": correlation.results}
    return {name: [_part(part) for part in parts] for name, parts in both.items()}


def units_of(correlation: Correlation, both: Sequence[Correlations], fixed: Factor | None) -> Json:
    """Units that both parties took."""
    recorded: Json = {"name": correlation.name, "units": len(both[CLIENT].results[0])}
    recorded |= parts_of(correlation)
    for name in ("masks", "results"):
        arrays = zip(recorded[name], *(getattr(m, name) for m in both), strict=True)
        for part, client, provider in arrays:
            for role, words in zip(ROLES, (client, provider), strict=True):
                known = part["holder"] in (role, Owner.JOINT.value)
                part[role] = to_hex(words) if known else None
    if fixed is not None:
        words = as_words(fixed.entries)
        recorded["fixed"] = {"shape": list(words.shape), "provider": to_hex(words)}
    return recorded


def correlations_of(recorded: Json, rank: int) -> Correlations:
    """Return a party's half of recorded units: zeros for the peer's own masks."""

    def words(part: Json) -> np.ndarray:
        shape = (recorded["units"], *part["shape"])
        text = part[ROLES[rank]]
        return np.zeros(shape, np.uint64) if text is None else from_hex(text, np.uint64, shape)

    return Correlations(
        [words(part) for part in recorded["masks"]], [words(part) for part in recorded["results"]]
    )


def fixed_of(recorded: Json) -> Factor | None:
    """Return the provider's matrix that all units share, as words."""
    fixed = recorded.get("fixed")
    if fixed is None:
        return None
    return Factor(from_hex(fixed["provider"], np.uint64, fixed["shape"]), 64)


def gate_of(gate: Gate) -> Json:
    """Return what a gate computes, and which sums of products of masks its units hold."""
    polynomials = {"outputs": gate.outputs, "sums": gate.sums}
    return {
        "client": gate.client,
        "provider": gate.provider,
        "joint": gate.joint,
        **{name: [sorted(map(sorted, p)) for p in ps] for name, ps in polynomials.items()},
    }
