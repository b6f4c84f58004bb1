"""Who a party is on a network: a certificate and its key, and the certificates of whom it trusts.

An identity is a directory with `cert.pem` and `key.pem`, as `make` writes it (`spu-llm keygen`).
What is trusted is one PEM file: certificates of peers themselves, which are thereby pinned, or of
authorities that sign them. The key is ECDSA P-256, which every TLS library takes; certificates are
good for both ends of a connection.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from spu_llm.core.closed import check_closed
from spu_llm.core.errors import InputError

CERTIFICATE, KEY = "cert.pem", "key.pem"
MAX_DAYS = 3650
SOON = timedelta(days=14)  # an end of validity that one is warned of
_EARLIER = timedelta(minutes=5)  # that clocks may differ by
_MAX_FILE = 1 << 20
_MALFORMED = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True)
class Certificate:
    """The fields of a certificate that are shown. `fingerprint`: SHA-256 of its DER form, in hex;
    `name`: the first name or address that it is for, or its subject; `until`: UTC.
    """

    fingerprint: str
    name: str
    until: datetime

    def __str__(self) -> str:
        return f"{self.name} ({self.fingerprint[:16]}, valid until {self.until:%Y-%m-%d})"


@dataclass(frozen=True)
class Identity:
    """This party's certificate, checked against its key, and whom it trusts. All as it was judged,
    in PEM form, whatever the files hold by now: `pem` is the own certificate (a chain) with its
    key, `anchors` the certificates of whom it trusts.
    """

    directory: Path
    own: Certificate
    trust: Path
    anchors: str
    pinned: tuple[Certificate, ...]
    authorities: tuple[Certificate, ...]
    pem: bytes = field(repr=False)

    @property
    def chain(self) -> Path:
        return self.directory / CERTIFICATE


def describe(der: bytes) -> Certificate:
    """Return what is shown of a certificate in DER form; ValueError when it is none."""
    try:
        return _described(x509.load_der_x509_certificate(der))
    except _MALFORMED as exc:
        raise ValueError(str(exc)) from None


def make(directory: Path, name: str, days: int) -> Certificate:
    """Make a new key and a certificate for `name`, a host name or an address, signed by itself.

    InputError when there is one already, or it cannot be written.
    """
    if not 1 <= days <= MAX_DAYS:
        raise InputError(f"--days must be 1 to {MAX_DAYS}, found {days}")
    certificate, pem = _signed(name, days)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The key first: a certificate without one would be of no use. A key without a certificate
        # is of none, either, and would be in the way.
        with ExitStack() as undone:
            _write_once(directory / KEY, pem, 0o600)
            undone.callback((directory / KEY).unlink)
            _write_once(
                directory / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644
            )
            undone.pop_all()
    except FileExistsError as exc:
        raise InputError(f"{exc.filename} is there already; choose another --out") from None
    except OSError as exc:
        raise InputError(f"cannot write to {directory}: {exc.strerror}") from None
    return _described(certificate)


@dataclass(frozen=True)
class OneTime:
    """A certificate for one purpose, in PEM form; `pem` adds its key. No file holds either."""

    certificate: str
    pem: bytes = field(repr=False)

    @staticmethod
    def made() -> OneTime:
        """Make a key and a certificate, good for a month."""
        certificate, key = _signed("one-time", days=30)
        chain = _pem([certificate])
        return OneTime(chain.decode(), chain + key)

    def pinning(self, other: str) -> Identity:
        """Return the identity that trusts one certificate alone: `other`, in PEM form."""
        own = _described(x509.load_pem_x509_certificate(self.certificate.encode()))
        peer = _described(x509.load_pem_x509_certificate(other.encode()))
        nowhere = Path("one-time")
        return Identity(nowhere, own, nowhere, other, (peer,), (), self.pem)


def _signed(name: str, days: int) -> tuple[x509.Certificate, bytes]:
    """Return a certificate for `name`, signed by itself, and its key in PEM form."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(timezone.utc)
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(own)
        .issuer_name(own)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate, pem


def load(directory: Path, trust: Path) -> Identity:
    """Read an identity and whom it trusts. InputError, which says what to do, when files are
    missing, unreadable or do not belong together, the key is open to others, or this party's
    certificate, or all that are trusted, are not valid now; where some that are trusted are, the
    others are left out.
    """
    key_file = directory / KEY
    chain = _certificates(directory / CERTIFICATE, hint="; spu-llm keygen makes one")
    key_bytes = _read(key_file, hint="; spu-llm keygen makes one", secret=True)
    try:
        key = serialization.load_pem_private_key(key_bytes, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError(f"{key_file} is not an unencrypted private key in PEM form") from None
    if key.public_key() != chain[0].public_key():
        raise InputError(f"{key_file} is not the key of {directory / CERTIFICATE}")
    own = _described(chain[0])
    _check_time(chain[0], directory / CERTIFICATE)
    others = _in_time(_certificates(trust, hint="; --trust names the other party's certificate"))
    for one in others:
        _check_time(one, trust)
    pinned = tuple(_described(one) for one in others if not _signs_others(one))
    authorities = tuple(_described(one) for one in others if _signs_others(one))
    pem = _pem(chain) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Identity(directory, own, trust, _pem(others).decode(), pinned, authorities, pem)


def demanded_name(identity: Identity, host: str) -> str | None:
    """Return the name that a client demands of its provider's certificate: the host that was asked
    for, where an authority answers for it; None for pinned ones, which are known by themselves.
    InputError when there are both, or several providers: one could answer in another one's place.
    """
    if identity.authorities and identity.pinned or len(identity.pinned) > 1:
        raise InputError(
            f"{identity.trust} holds {len(identity.pinned)} certificates of peers and "
            f"{len(identity.authorities)} of authorities; a client trusts one provider, or "
            "authorities"
        )
    return host if identity.authorities else None


def _general_name(name: str) -> x509.GeneralName:
    """Return a host name or an address as a certificate states it; InputError for anything else."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    parts = name.rstrip(".").split(".")
    if len(name) > 253 or not all(
        0 < len(part) <= 63
        and part.isascii()
        and part.replace("-", "a").isalnum()
        and part[0] != "-" != part[-1]
        for part in parts
    ):
        raise InputError(f"--name must be a host name or an address, found {name[:80]!a}")
    return x509.DNSName(name)


def _write_once(path: Path, content: bytes, mode: int) -> None:
    """Write a new file, durably; one that cannot be written whole is removed."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with ExitStack() as undone:
        undone.callback(path.unlink)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        undone.pop_all()


def _read(path: Path, hint: str = "", *, secret: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            if secret:
                check_closed(file.fileno(), path)
            content = file.read(_MAX_FILE + 1)
    except FileNotFoundError:
        raise InputError(f"there is no {path}{hint}") from None
    except OSError as exc:
        raise InputError(f"cannot read {path}: {exc.strerror}") from None
    if len(content) > _MAX_FILE:
        raise InputError(f"{path} is larger than any certificate")
    return content


def _certificates(path: Path, hint: str) -> list[x509.Certificate]:
    """Read all certificates in a file, each of which can be read to its end."""
    content = _read(path, hint)
    if b"CERTIFICATE-----" not in content:
        raise InputError(f"{path} holds no certificates in PEM form")
    try:
        certificates = x509.load_pem_x509_certificates(content)
        for one in certificates:
            _described(one), _signs_others(one), one.public_key(), one.not_valid_before_utc
    except _MALFORMED as exc:
        raise InputError(f"{path} holds a malformed certificate: {exc}") from None
    return certificates


def _pem(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)


def _in_time(certificates: list[x509.Certificate]) -> list[x509.Certificate]:
    """Return the certificates that are valid now; all of them where none is. Of many clients one
    whose certificate is over must not keep the others out.
    """
    now = datetime.now(timezone.utc)
    valid = [
        one for one in certificates if one.not_valid_before_utc <= now <= one.not_valid_after_utc
    ]
    return valid or certificates


def _check_time(one: x509.Certificate, path: Path) -> None:
    now = datetime.now(timezone.utc)
    if now > one.not_valid_after_utc:
        raise InputError(
            f"{path}: the certificate of {_described(one).name} expired on "
            f"{one.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; make another one"
        )
    if now < one.not_valid_before_utc:
        raise InputError(
            f"{path}: the certificate of {_described(one).name} is not valid before "
            f"{one.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; check this machine's clock"
        )


def _signs_others(one: x509.Certificate) -> bool:
    """Return whether a certificate signs others: unless it says that it does not."""
    try:
        return one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return True


def _described(one: x509.Certificate) -> Certificate:
    fingerprint = one.fingerprint(hashes.SHA256()).hex()
    return Certificate(fingerprint, _name_of(one), one.not_valid_after_utc)


def _name_of(one: x509.Certificate) -> str:
    try:
        names = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return one.subject.rfc4514_string()
    for name in names:
        if isinstance(name, x509.DNSName | x509.IPAddress):
            return str(name.value)
    return one.subject.rfc4514_string()


def identity_in(identity: Path | None, trust: Path | None, *, insecure: bool) -> Identity | None:
    """Return this party's certificate and whom it trusts; None with `insecure`. InputError for
    files that cannot be used, and where neither or both are given.
    """
    given = [option is not None for option in (identity, trust)]
    if insecure:
        if any(given):
            raise InputError("--insecure uses no certificates; leave --identity and --trust out")
        return None
    if identity is None or trust is None:
        raise InputError(
            "give --identity DIR, which spu-llm keygen makes, and --trust FILE, the other party's "
            "certificate; or --insecure, for plain connections on a machine you trust"
        )
    return load(identity, trust)
