"""Evidence of where a vault runs: a token of an attestation service, checked against a policy.

Services that verify the hardware reports of confidential machines answer with a JSON Web Token (RFC
7519): claims about the machine, signed by the service. A vault shows its token to its user before
any prompt, and to the engine before any weights. Either may have a policy, and goes on only where

- the service's key has signed the token, by the algorithm that the policy names;
- it comes from the issuer, and has not expired;
- each claim of the policy stands there with that value;
- one claim is the SHA-256 fingerprint of the certificate by which the vault has met them, so that
  a token of one machine is of no use to another.

A token holds until it expires: nothing else says that it is fresh. What is trusted is the service,
and that it signs such a claim only for a machine that holds the certificate's key: a vault must
make its identity inside, and put the fingerprint into the report. Whether that hardware keeps what
it promises is not this module's to say. It was tried with tokens that tests sign, with no service's
own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from spu_llm.core.errors import InputError, PeerError
from spu_llm.core.text_files import read_text
from spu_llm.net.identity import Certificate

MOST_EVIDENCE = 64 << 10  # bytes of a token
_CLOCKS_S = 60.0  # that clocks may differ by
# None by a secret that both have: whoever checks could sign then.
_ALGORITHMS = ("ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_LEAST_RSA = 2048
_TEXTS = ("key", "algorithm", "issuer", "certificate_claim")


@dataclass(frozen=True)
class Policy:
    """The policy that evidence must meet. key: the service's public key; certificate_claim: the
    claim that is the fingerprint (hex) of the vault's certificate; claims: other claims, and their
    values.
    """

    key: Any
    algorithm: str
    issuer: str
    certificate_claim: str
    claims: Mapping[str, Any]

    @staticmethod
    def read(path: Path) -> Policy:
        """Read a policy, an object of JSON with these fields, `key` the name of a PEM file beside
        it. InputError says what cannot be used.
        """
        try:
            given = json.loads(read_text(path, "--policy"))
        except ValueError:
            given = None
        if not isinstance(given, dict) or set(given) != {*_TEXTS, "claims"}:
            raise InputError(
                f"{path}, of --policy: must be a JSON object with {', '.join(_TEXTS)}, and claims"
            )
        claims = given["claims"]
        if not all(isinstance(given[name], str) for name in _TEXTS) or not isinstance(claims, dict):
            raise InputError(f"{path}, of --policy: all but claims, an object, are texts")
        if not claims:
            raise InputError(
                f"{path}, of --policy: claims must say what kind of machine is meant; the "
                "fingerprint alone is of any that the service knows"
            )
        if given["algorithm"] not in _ALGORITHMS:
            raise InputError(
                f"{path}, of --policy: the algorithm must be one of {', '.join(_ALGORITHMS)}"
            )
        return Policy(
            _public_key(path.parent / given["key"], given["algorithm"]),
            given["algorithm"],
            given["issuer"],
            given["certificate_claim"],
            claims,
        )

    def check(self, evidence: Any, certificate: Certificate | None) -> None:
        """Raise PeerError unless the evidence holds for a vault with this certificate."""
        if certificate is None:
            raise PeerError("evidence is of a certificate, and this connection has none")
        if not isinstance(evidence, str) or not evidence:
            raise PeerError("the vault shows no evidence of where it runs")
        if len(evidence) > MOST_EVIDENCE or not evidence.isascii():
            raise PeerError("the vault's evidence does not hold: it is no token")
        try:
            claims = jwt.decode(
                evidence,
                self.key,
                algorithms=[self.algorithm],
                issuer=self.issuer,
                leeway=_CLOCKS_S,
                options={"require": ["exp", "iss", self.certificate_claim], "verify_aud": False},
            )
        except jwt.PyJWTError as exc:
            raise PeerError(f"the vault's evidence does not hold: {exc}") from None
        wanted = {**self.claims, self.certificate_claim: certificate.fingerprint}
        for name, value in wanted.items():
            # As JSON has it: true is not 1 there.
            if name not in claims or _written(claims[name]) != _written(value):
                raise PeerError(f"the vault's evidence does not hold: its claim {name} is another")


def shown(path: Path | None) -> str:
    """Return the token in a file, as it is now; "" for None. InputError where it cannot be read."""
    if path is None:
        return ""
    token = read_text(path, "--evidence").strip()
    if not token or len(token) > MOST_EVIDENCE:
        raise InputError(f"{path}, of --evidence: must be a token of 1 to {MOST_EVIDENCE} bytes")
    return token


def _public_key(path: Path, algorithm: str) -> Any:
    """Return the public key in a PEM file, or that of a certificate there."""
    pem = read_text(path, "the policy's key").encode()
    try:
        if b"BEGIN CERTIFICATE" in pem:
            key: Any = x509.load_pem_x509_certificate(pem).public_key()
        else:
            key = serialization.load_pem_public_key(pem)
        ready = jwt.get_algorithm_by_name(algorithm).prepare_key(key)
    except (ValueError, TypeError, UnsupportedAlgorithm, jwt.PyJWTError) as exc:
        raise InputError(
            f"{path}: must be a public key or certificate in PEM form, for {algorithm}"
        ) from exc
    if isinstance(ready, RSAPublicKey) and ready.key_size < _LEAST_RSA:
        raise InputError(f"{path}: an RSA key must have {_LEAST_RSA} bits or more")
    return ready


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
