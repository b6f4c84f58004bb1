"""What a provider gives to one session, and what both hear when it has had all of it."""

from __future__ import annotations

import pytest

from tests.app.conftest import Pair
from tests.app.processes import Start

END_S = 15.0


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--session-memory", "20"], "the provider gives a session 20 MB of memory"),
        (["--session-traffic", "1"], "ends a session that moves more than 1 MB"),
    ],
)
def test_a_session_that_takes_too_much_ends_alone(
    start: Start, pair: Pair, option: list[str], said: str
) -> None:
    stub = "client:prefilling:floods" if "--session-traffic" in option else "client:decoding:holds"
    server = start(*pair.serve(*option), stub=stub)
    port = server.until_listening()
    client = start(*pair.generate(port), stub=stub)
    client.assert_failed(1, said, within_s=END_S)
    server.until("stderr", f"session failed: the provider {said.removeprefix('the provider ')}")
    assert not [p for p in server.processes() if p.is_worker]


def test_a_session_has_an_end(
    start: Start, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spu_llm.core.errors import LimitError
    from spu_llm.service import limits

    class Still:
        def snapshot(self) -> object:
            return type("Counters", (), {"wire_bytes_sent": 0, "wire_bytes_received": 0})

    guard = limits.Guard(limits.Limits(minutes=5), Still(), None)  # type: ignore[arg-type]
    guard.look()
    now = limits.time.monotonic()
    monkeypatch.setattr(limits.time, "monotonic", lambda: now + 5 * 60)
    with pytest.raises(LimitError, match="after 5 minutes"):
        guard.look()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--client-sessions", "2"], "there is none with --insecure"),
        (["--client-disk", "9"], "--client-disk bounds what is kept in --pool"),
        (["--client-disk", "9", "--pool", "p"], "there is none with --insecure"),
        (["--session-minutes", "0"], "--session-minutes must be 1 or more"),
        (["--session-memory", "0"], "--session-memory must be 1 or more, in MB"),
    ],
)
def test_limits_that_make_no_sense(
    start: Start, pair: Pair, options: list[str], said: str
) -> None:
    start(*pair.serve(*options)).assert_failed(2, said, within_s=END_S)
