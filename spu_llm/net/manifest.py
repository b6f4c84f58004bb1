"""What a session is: settings that both parties state, compared before anything secret moves.

A manifest is a flat mapping from names to scalars. `model.*` is the provider's to state,
`request.*` the client's, `nonce` each party's own; of `jobs`, cores that either party gives, the
lesser number counts. All other fields must be equal on both sides, but for `tokenizer`, which a
client without text leaves out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Literal

from spu_llm.core.errors import ManifestMismatch, WireError
from spu_llm.core.parallel import MAX_JOBS

Scalar = str | int | float | bool | None
Manifest = dict[str, Scalar]
Role = Literal["client", "provider"]

PROVIDER_PREFIX = "model."
CLIENT_PREFIX = "request."
NONCE = "nonce"
TOKENIZER = "tokenizer"
SESSION = "session"
JOBS = "jobs"

MAX_FIELDS = 200
MAX_STRING = 8000

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,80}")
_NONCE = re.compile(r"[0-9a-f]{32}")


def with_nonce(fields: Mapping[str, Scalar]) -> Manifest:
    """Return a copy that carries a fresh nonce of 16 random bytes, for one session."""
    return {**fields, NONCE: os.urandom(16).hex()}


def agree(
    client_manifest: Mapping[str, object], provider_manifest: Mapping[str, object]
) -> Manifest:
    """Return the session's settings, the same on both sides, with its id under `session`.

    The id (64 hex digits) binds both nonces and every setting. `ManifestMismatch` names each
    shared field whose value or type differs or that one side lacks; `WireError` on a malformed
    manifest. Without the client's `tokenizer` there is none among the settings.
    """
    client = _check_manifest("client", client_manifest)
    provider = _check_manifest("provider", provider_manifest)
    client_nonce = _take_nonce("client", client)
    provider_nonce = _take_nonce("provider", provider)
    if client_nonce == provider_nonce:
        raise WireError("both manifests carry the same nonce: one is a copy of the other")
    jobs = min(_take_jobs("client", client), _take_jobs("provider", provider))
    if TOKENIZER not in client:
        provider.pop(TOKENIZER, None)
    differences = [
        f"{name}: client {_stated(client, name)}, provider {_stated(provider, name)}"
        for name in sorted(client.keys() | provider.keys())
        if not name.startswith((PROVIDER_PREFIX, CLIENT_PREFIX))
        and _stated(client, name) != _stated(provider, name)
    ]
    if differences:
        raise ManifestMismatch("settings differ: " + "; ".join(differences))
    merged = client | provider | {JOBS: jobs}
    text = json.dumps([client_nonce, provider_nonce, merged], sort_keys=True)
    merged[SESSION] = hashlib.sha256(b"spu-llm session\n" + text.encode()).hexdigest()
    return merged


def _check_manifest(side: Role, fields: Mapping[str, object]) -> Manifest:
    """Return what `side` stated; `WireError` on anything that it may not state."""
    if len(fields) > MAX_FIELDS:
        raise WireError(f"{side} manifest has {len(fields)} fields; at most {MAX_FIELDS}")
    return {name: _check_field(side, name, value) for name, value in fields.items()}


def _check_field(side: Role, name: str, value: object) -> Scalar:
    if not _NAME.fullmatch(name):
        raise WireError(f"{side} manifest has a field with a bad name: {name[:80]!a}")
    if name == SESSION:
        raise WireError(f"{side} manifest states {name}, which follows from both nonces")
    if name.startswith(PROVIDER_PREFIX if side == "client" else CLIENT_PREFIX):
        raise WireError(f"{side} manifest states {name}, which is not the {side}'s to state")
    if isinstance(value, str):
        if len(value) > MAX_STRING:
            raise WireError(
                f"{side} manifest: {name} has {len(value)} characters; at most {MAX_STRING}"
            )
        if not value.isprintable():
            raise WireError(f"{side} manifest: {name} has characters that cannot be printed")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise WireError(f"{side} manifest: {name} is not finite")
    elif isinstance(value, int):
        if abs(value) >= 1 << 63:
            raise WireError(f"{side} manifest: {name} does not fit 64 bits")
    elif value is not None:
        raise WireError(f"{side} manifest: {name} is a {type(value).__name__}, not a scalar")
    return value


def _take_nonce(side: Role, manifest: Manifest) -> str:
    nonce = manifest.pop(NONCE, None)
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise WireError(f"{side} manifest has no nonce of 32 hex digits")
    return nonce


def _take_jobs(side: Role, manifest: Manifest) -> int:
    jobs = manifest.pop(JOBS, None)
    if type(jobs) is not int or jobs < 1:  # a bool is an int to isinstance
        raise WireError(f"{side} manifest has no number of jobs")
    return min(jobs, MAX_JOBS)


def _stated(manifest: Manifest, name: str) -> str:
    # JSON text tells 1, 1.0, true and "1" apart, and escapes what a terminal would act on.
    return f"has {json.dumps(manifest[name])}" if name in manifest else "has no value"
