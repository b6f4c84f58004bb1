"""Evidence of where a vault runs: what a policy takes, and who gets nothing without it. All tokens
are signed here, by no attestation service.
"""

from __future__ import annotations

import base64
import json
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core.errors import InputError, PeerError
from spu_llm.net import identity
from spu_llm.net.identity import CERTIFICATE, Certificate
from spu_llm.vault.attested import MOST_EVIDENCE, Policy, shown
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Start
from tests.vault.commands import engine, vault

ISSUER = "https://attestation.example"
FINGERPRINT = "ab" * 32
OF_VAULT = Certificate(FINGERPRINT, "vault.example", datetime(2100, 1, 1, tzinfo=timezone.utc))
KEY = ec.generate_private_key(ec.SECP256R1())
CLAIMS = {"type": "confidential-vm", "debug": False, "svn": [1, 2]}


def pem_of(key: Any) -> bytes:
    encoding, kind = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    data: bytes = key.public_key().public_bytes(encoding, kind)
    return data


def policy_in(folder: Path, signer: Any = KEY, **change: Any) -> Path:
    (folder / "service.pem").write_bytes(pem_of(signer))
    policy = {
        "key": "service.pem",
        "algorithm": "ES256",
        "issuer": ISSUER,
        "certificate_claim": "certificate",
        "claims": CLAIMS,
        **change,
    }
    path = folder / "policy.json"
    path.write_text(json.dumps({name: v for name, v in policy.items() if v is not None}))
    return path


def token(key: Any = KEY, algorithm: str = "ES256", **change: Any) -> str:
    claims = {
        "iss": ISSUER,
        "exp": time.time() + 300,
        "certificate": FINGERPRINT,
        **CLAIMS,
        "more": "is not asked for",
        **change,
    }
    said: str = jwt.encode({n: v for n, v in claims.items() if v is not None}, key, algorithm)
    return said


def forged(key: bytes) -> str:
    """Return a token under HS256, whose secret is the service's public key, by hand: the library
    makes none.
    """
    import hashlib
    import hmac

    def text(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    body = token().split(".")[1]
    signed = f"{text(json.dumps({'alg': 'HS256', 'typ': 'JWT'}).encode())}.{body}"
    return f"{signed}.{text(hmac.new(key, signed.encode(), hashlib.sha256).digest())}"


def test_a_machine_of_the_policy_is_taken(tmp_path: Path) -> None:
    Policy.read(policy_in(tmp_path)).check(token(), OF_VAULT)
    Policy.read(policy_in(tmp_path)).check(token(aud="somebody"), OF_VAULT)
    key = rsa.generate_private_key(65537, 2048)
    policy = Policy.read(policy_in(tmp_path, key, algorithm="PS256"))
    policy.check(token(key, "PS256"), OF_VAULT)


BAD = {
    "another key": lambda: token(ec.generate_private_key(ec.SECP256R1())),
    "expired": lambda: token(exp=time.time() - 120),
    "never expires": lambda: token(exp=None),
    "not yet": lambda: token(nbf=time.time() + 300),
    "another issuer": lambda: token(iss="https://else.example"),
    "no issuer": lambda: token(iss=None),
    "another certificate": lambda: token(certificate="cd" * 32),
    "no certificate": lambda: token(certificate=None),
    "another value": lambda: token(type="plain-vm"),
    "a claim is missing": lambda: token(debug=None),
    "true is not 1": lambda: token(debug=0),
    "another list": lambda: token(svn=[2, 1]),
    "no signature": lambda: token(key=None, algorithm="none"),
    "signed by the public key": lambda: forged(pem_of(KEY)),
    "another algorithm": lambda: token(rsa.generate_private_key(65537, 2048), "RS256"),
    "nothing": lambda: "",
    "half of a character": lambda: token(type="confidential-vm\ud800") + "\ud800",
    "too long": lambda: "a" * (MOST_EVIDENCE + 1),
    "no text": lambda: 7,
}


@pytest.mark.parametrize("make", BAD.values(), ids=list(BAD))
def test_other_evidence_is_refused(tmp_path: Path, make: Any) -> None:
    with pytest.raises(PeerError, match="evidence"):
        Policy.read(policy_in(tmp_path)).check(make(), OF_VAULT)


def test_a_connection_in_the_clear_has_no_evidence(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="this connection has none"):
        Policy.read(policy_in(tmp_path)).check(token(), None)


@given(st.text(max_size=200) | st.binary(max_size=60).map(lambda b: base64.b64encode(b).decode()))
def test_any_text_is_refused_in_a_line(text: str) -> None:
    policy = Policy(KEY.public_key(), "ES256", ISSUER, "certificate", {})
    with pytest.raises(PeerError):
        policy.check(text, OF_VAULT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": "HS256"}, "the algorithm must be one of"),
        ({"algorithm": "none"}, "the algorithm must be one of"),
        ({"algorithm": "RS256"}, "must be a public key or certificate in PEM form, for RS256"),
        ({"issuer": None}, "must be a JSON object with key"),
        ({"issuer": 3}, "are texts"),
        ({"claims": []}, "are texts"),
        ({"claims": {}}, "what kind of machine is meant"),
        ({"claims": None}, "must be a JSON object with key"),
        ({"key": 3}, "are texts"),
        ({"clams": {}}, "must be a JSON object with key"),
    ],
)
def test_a_policy_that_cannot_be_used(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Policy.read(policy_in(tmp_path, **change))


def test_a_weak_key_is_refused(tmp_path: Path) -> None:
    weak = rsa.generate_private_key(65537, 1024)
    with pytest.raises(InputError, match="2048 bits or more"):
        Policy.read(policy_in(tmp_path, weak, algorithm="RS256"))


def test_what_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert shown(None) == ""
    for content in ("", " \n", "a" * (MOST_EVIDENCE + 1)):
        path.write_text(content)
        with pytest.raises(InputError, match="must be a token"):
            shown(path)
    path.write_text("a.b.c\n")
    assert shown(path) == "a.b.c"


@pytest.mark.slow
def test_nobody_goes_on_without_evidence(start: Start, pair: Pair, tmp_path: Path) -> None:
    """Neither the user, with a prompt, nor the engine, with weights; with it, both do."""
    for name in ("owner", "vault", "user"):
        identity.make(tmp_path / name, f"{name}.example", 30)

    def trusting(own: str, other: str) -> list[str]:
        return ["--identity", str(tmp_path / own), "--trust", str(tmp_path / other / CERTIFICATE)]

    policy = ["--policy", str(policy_in(tmp_path))]
    own = identity.load(tmp_path / "vault", tmp_path / "user" / CERTIFICATE).own
    evidence = tmp_path / "token"
    evidence.write_text(token(certificate=own.fingerprint))
    user = ["--trust-user", str(tmp_path / "user" / CERTIFICATE)]
    served = engine(start, pair.private, *trusting("owner", "vault"), *policy)
    bare = vault(start, served.port, *trusting("vault", "owner"), *user)
    shows = ["--evidence", str(evidence)]
    kept = vault(start, served.port, *trusting("vault", "owner"), *user, *shows)

    def ask(port: int, *more: str) -> Any:
        place = ("--vault", f"127.0.0.1:{port}", "--tokenizer", str(pair.private))
        few = ("--max-new-tokens", "2", "--temperature", "0")
        return start("vault", "generate", *place, *few, *trusting("user", "vault"), *more)

    ask(bare.port, *policy).assert_failed(1, "shows no evidence of where it runs", within_s=END_S)
    ask(bare.port).assert_failed(1, "shows no evidence of where it runs", within_s=END_S)
    assert eventually(lambda: "shows no evidence" in served.command.stderr, END_S)
    taken = ask(kept.port, *policy)
    assert taken.wait(RUN_S) == 0, taken.stderr
    # What is shown is read anew.
    evidence.write_text(token(certificate=own.fingerprint, debug=True))
    ask(kept.port, *policy).assert_failed(1, "its claim debug is another", within_s=END_S)
    insecure = ("--vault", "127.0.0.1:1", "--insecure")
    asked = start("vault", "generate", *insecure, *policy)
    asked.assert_failed(2, "--policy is of certificates", within_s=END_S)
