"""One secure function, three ways; shares in every form; what must be refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import LeakError, ManifestMismatch
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Arith, Bool, Owner, Private, public
from spu_llm.runtime import spu_runtime
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation, reconstruct
from spu_llm.testing import toy_reshare

C, P, J, X = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT, Owner.PUBLIC
RNG = np.random.default_rng(0)
X_CLIENT = RNG.normal(size=(4, 5)).astype(np.float32)
W_PROVIDER = RNG.normal(size=(5, 3)).astype(np.float32)


def both(session: PartySession, function: SecureFunction, *extra: Any) -> Any:
    x = session.private(CLIENT, lambda: X_CLIENT, X_CLIENT.shape, np.float32)
    w = session.private(PROVIDER, lambda: W_PROVIDER, W_PROVIDER.shape, np.float32)
    return session.call(function, x, w, *extra)


def test_three_ways_agree(simulation: Simulation) -> None:
    """Plain JAX and both parties of a simulation; two processes are tested in tests/app."""

    def fn(x: Any, w: Any, c: Any) -> dict[str, Any]:
        y = jnp.tanh(x @ (w * 0.5)) + c
        signs = reveal(y < 0, to=C, label="signs")
        first = jnp.argmax(signs.ravel())
        return {
            "shared": y,
            "signs": signs,
            "row": reveal(jax.nn.one_hot(first, 4) @ y, to=P, label="row"),
            "first": reveal(first, to=X, label="first"),
        }

    function = SecureFunction(fn, (C, P, X), "three ways")
    constant = np.float32(0.25)
    plain = PlaintextSession().call(function, X_CLIENT, W_PROVIDER, constant)
    client, provider = simulation.run(lambda s: both(s, function, public(constant)))
    for name in plain:
        words = reconstruct([client[name], provider[name]])
        # SPU's tanh is off by up to 4e-3.
        np.testing.assert_allclose(words, plain[name].value, atol=1e-2, err_msg=name)
    assert client["signs"].value is not None and provider["signs"].value is None
    assert client["row"].value is None and provider["row"].value is not None
    np.testing.assert_array_equal(client["first"].value, provider["first"].value)


FORMS = {
    "arithmetic": (lambda x, w: x @ w, Arith),
    "boolean, 1 bit": (lambda x, w: x @ w < 0, Bool),
    "boolean cast to float": (lambda x, w: (x @ w < 0).astype(jnp.float32), Bool),
    "floor": (lambda x, w: jnp.floor(x @ w), Bool),
    "integer": (lambda x, w: (x @ w * 8).astype(jnp.int32), (Arith, Bool)),
}


@pytest.mark.parametrize("name", FORMS)
def test_shares_of_every_form_cross_segments_and_open(simulation: Simulation, name: str) -> None:
    """SPU's form -> our value -> ledger, and -> a second segment: the same number arrives."""
    make, kind = FORMS[name]
    first = SecureFunction(make, (C, P), f"form {name}")
    second = SecureFunction(
        lambda v: (v.astype(jnp.float32) * 1.0 + 1.0, reveal(v, to=X, label="opened")), (J,), "use"
    )

    def program(session: PartySession) -> Any:
        value = both(session, first)
        return value, session.call(second, value)

    client, provider = simulation.run(program)
    assert isinstance(client[0], kind), client[0]
    expected = np.asarray(make(X_CLIENT, W_PROVIDER))
    # A value next to a rounding edge may round the other way under fixed point.
    close = np.isclose(client[1][1].value.astype(float), expected.astype(float), atol=1e-3)
    assert close.mean() > 0.9
    opened = client[1][1].value
    np.testing.assert_allclose(
        reconstruct([client[1][0], provider[1][0]]), opened.astype(float) + 1.0, atol=1e-3
    )


def test_op_between_segments(simulation: Simulation) -> None:
    """An op takes a segment's shares and hands its own to the next segment."""
    function = SecureFunction(
        lambda x, w: toy_reshare(x @ w, rounds=2) * 2.0, (C, P), "op between segments"
    )
    results = simulation.run(lambda s: both(s, function))
    np.testing.assert_allclose(reconstruct(results), X_CLIENT @ W_PROVIDER * 2, atol=1e-3)


def test_private_value_may_stand_in_for_a_shared_one(simulation: Simulation) -> None:
    function = SecureFunction(lambda x, w: x @ w, (J, P), "private for shared")
    results = simulation.run(lambda s: both(s, function))
    np.testing.assert_allclose(reconstruct(results), X_CLIENT @ W_PROVIDER, atol=1e-3)


def test_executable_is_compiled_once(simulation: Simulation, monkeypatch: Any) -> None:
    compiled = []
    compile_with_spu = spu_runtime.frontend.compile
    monkeypatch.setattr(
        spu_runtime.frontend,
        "compile",
        lambda *a, **k: compiled.append(1) or compile_with_spu(*a, **k),
    )
    function = SecureFunction(lambda x, w: jnp.sum(x @ w, 0) * 1.25, (C, P), "cached")
    simulation.run(lambda s: [both(s, function) for _ in range(3)])
    assert len(compiled) == 1
    again = SecureFunction(lambda x, w: jnp.sum(x @ w, 0) * 1.25, (C, P), "same content")
    simulation.run(lambda s: both(s, again))
    assert len(compiled) == 1


def test_segment_that_returns_a_public_value_is_refused() -> None:
    """A broken twin of a segment: what it computes from both parties' secrets comes out public."""
    function = SecureFunction(lambda x, w: (x @ w)[:0].sum(), (C, P), "public result")
    with Simulation() as simulation, pytest.raises(LeakError, match="public"):
        simulation.run(lambda s: both(s, function))


def test_revealing_what_is_already_public_is_refused() -> None:
    function = SecureFunction(lambda c: reveal(c, to=C, label="c"), (X,), "reveal public")
    with Simulation() as simulation, pytest.raises(LeakError, match="public before"):
        simulation.run(lambda s: s.call(function, public(np.float32(1))))


def test_wrong_owner_is_refused_before_anything_runs() -> None:
    function = SecureFunction(lambda x, w: x @ w, (C, P), "owners")

    def program(session: PartySession) -> Any:
        x = session.private(PROVIDER, lambda: X_CLIENT, X_CLIENT.shape, np.float32)
        w = session.private(PROVIDER, lambda: W_PROVIDER, W_PROVIDER.shape, np.float32)
        return session.call(function, x, w)

    with Simulation() as simulation, pytest.raises(ValueError, match="should be client"):
        simulation.run(program)


def test_parties_with_different_programs_stop() -> None:
    functions = [SecureFunction(lambda x, w, s=s: x @ w * s, (C, P), "program") for s in (1.0, 2.0)]
    with Simulation() as simulation, pytest.raises(ManifestMismatch, match="programs differ"):
        simulation.run(lambda s: both(s, functions[s.rank]))


def test_shared_value_has_no_plaintext_outside_reveal(simulation: Simulation) -> None:
    function = SecureFunction(lambda x, w: x @ w, (C, P), "shared")
    with pytest.raises(TypeError, match="only `reveal` opens it"):
        simulation.run(lambda s: s.get(both(s, function)))


def test_printing_values_never_shows_words() -> None:
    value = Private(CLIENT, (1,), np.dtype(np.float32), np.array([42.125], np.float32))
    share = Arith(np.array([42], np.uint64), np.dtype(np.float32), 18)
    assert "42" not in repr(value) + repr(share)


def test_metering_is_repeatable(simulation: Simulation) -> None:
    """Segment bytes repeat within 1 % after warm-up, messages exactly; ops exactly."""
    function = SecureFunction(
        lambda x, w: reveal(jnp.tanh(x @ w), to=C, label="y"), (C, P), "metered"
    )

    def program(session: PartySession) -> Any:
        both(session, function)
        start = len(session.meter.entries)
        both(session, function)
        both(session, function)
        return session.meter.entries[start:]

    entries = simulation.run(program)[CLIENT]
    segments = [e.traffic for e in entries if e.kind == "segment"]
    ops = [e.traffic for e in entries if e.kind == "op"]
    assert len(segments) == len(ops) == 2
    assert segments[0].messages == segments[1].messages
    assert abs(segments[0].bytes - segments[1].bytes) <= 0.01 * segments[1].bytes
    assert ops[0] == ops[1] and ops[0].received_bytes == 8 * 12 and ops[0].messages == 1
