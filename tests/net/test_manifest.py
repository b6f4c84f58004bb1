"""What the parties agree on, and how a difference is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core.errors import ManifestMismatch, WireError
from spu_llm.net.manifest import MAX_FIELDS, Manifest, agree, with_nonce

CLIENT: Manifest = {"nonce": "0" * 32, "jobs": 1, "spu.frac_bits": 18, "request.max_tokens": 32}
PROVIDER: Manifest = {"nonce": "1" * 32, "jobs": 1, "spu.frac_bits": 18, "model.layers": 22}

# Names with a meaning of their own in `agree`; other tests are about them.
OWN = ("nonce", "session", "jobs", "tokenizer")
names = st.text("abcdefghijklmnopqrstuvwxyz_.", min_size=1, max_size=12).filter(
    lambda name: not name.startswith(("model.", "request.")) and name not in OWN
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text("abc xyz", max_size=9),
)


def test_merged_settings_and_session_id() -> None:
    merged = agree(CLIENT, PROVIDER)
    assert merged == {
        "jobs": 1,
        "spu.frac_bits": 18,
        "request.max_tokens": 32,
        "model.layers": 22,
        # sha256 of "spu-llm session\n" and the JSON list of both nonces and the settings.
        "session": "0afc2c3a41c963ca6e326b21f46339a6ea039c6062116ae6d8a76544d273f8d5",
    }


def test_session_id_depends_on_each_nonce() -> None:
    ids = {
        agree(CLIENT, PROVIDER)["session"],
        agree({**CLIENT, "nonce": "2" * 32}, PROVIDER)["session"],
        agree(CLIENT, {**PROVIDER, "nonce": "2" * 32})["session"],
    }
    assert len(ids) == 3
    assert with_nonce({})["nonce"] != with_nonce({})["nonce"]


def test_every_difference_is_named_with_both_values() -> None:
    with pytest.raises(ManifestMismatch) as caught:
        agree(
            {**CLIENT, "spu.frac_bits": 20, "ot": "ferret", "seed": True},
            {**PROVIDER, "seed": 1, "ring": "FM64"},
        )
    assert str(caught.value) == (
        'settings differ: ot: client has "ferret", provider has no value; '
        'ring: client has no value, provider has "FM64"; '
        "seed: client has true, provider has 1; "
        "spu.frac_bits: client has 20, provider has 18"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers": 3}, "not the client's to state"),
        ({"session": "x"}, "states session"),
        ({"shape": [1, 2]}, "shape is a list, not a scalar"),
        ({"rate": float("nan")}, "rate is not finite"),
        ({"size": 1 << 63}, "size does not fit 64 bits"),
        ({"text": "x" * 8001}, "text has 8001 characters; at most 8000"),
        ({"text": "\x1b[2J"}, "cannot be printed"),
        ({"bad name\n": 1}, "bad name"),
        ({f"f{i}": i for i in range(MAX_FIELDS)}, "fields; at most 200"),
        ({"nonce": "abc"}, "no nonce of 32 hex digits"),
        ({"nonce": "1" * 32}, "the same nonce"),
        ({"jobs": 0}, "client manifest has no number of jobs"),
        ({"jobs": True}, "no number of jobs"),
    ],
)
def test_malformed_manifests(change: dict[str, object], message: str) -> None:
    with pytest.raises(WireError, match=message):
        agree({**CLIENT, **change}, PROVIDER)


def test_provider_may_not_state_the_request() -> None:
    with pytest.raises(WireError, match="provider manifest states request.max_tokens"):
        agree(CLIENT, {**PROVIDER, "request.max_tokens": 1})


@given(st.dictionaries(names, scalars, max_size=6), st.dictionaries(names, scalars, max_size=6))
def test_equal_fields_agree_and_others_are_named(client: Manifest, provider: Manifest) -> None:
    assert agree(CLIENT | client, PROVIDER | client).items() >= client.items()
    different = {
        name
        for name in client.keys() | provider.keys()
        if name not in client or name not in provider or repr(client[name]) != repr(provider[name])
    }
    if different:
        with pytest.raises(ManifestMismatch) as caught:
            agree(CLIENT | client, PROVIDER | provider)
        assert str(caught.value).count(": client ") == len(different)
        assert all(f"{name}: client " in str(caught.value) for name in different)


def test_of_jobs_the_lesser_number_counts() -> None:
    for client, provider, wanted in ((3, 2, 2), (2, 5, 2), (4, 4, 4), (10**9, 10**9, 48)):
        assert agree({**CLIENT, "jobs": client}, {**PROVIDER, "jobs": provider})["jobs"] == wanted


def test_a_client_alone_may_leave_the_tokenizer_out() -> None:
    """A program without text needs none; a provider that states none is another one."""
    stated = {"tokenizer": "d1"}
    assert "tokenizer" not in agree(CLIENT, PROVIDER | stated)  # type: ignore[operator]
    for client in (stated, {"tokenizer": None}):
        for provider in ({}, {"tokenizer": "d2"}):
            with pytest.raises(ManifestMismatch, match="tokenizer"):
                agree(CLIENT | client, PROVIDER | provider)  # type: ignore[operator]
