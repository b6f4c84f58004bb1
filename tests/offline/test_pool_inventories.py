"""Inventories, which say what a stored pool still has: any bytes are taken or refused."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spu_llm.core.errors import PoolError, WireError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.offline.pool import INVENTORY_BYTES, MAX_BATCHES, Pool
from tests.kit.dealing import TRIPLE, refuses
from tests.offline.parties import Parties, batch_folder, files_of

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


ID = "0123456789abcdef" * 2
BAD_INVENTORIES = {
    "empty": b"",
    "not text": b"\xff\xff",
    "list": b"[]",
    "null": b"null",
    "number": b"1",
    "cut": b'{"' + ID.encode(),
    "deep": b"[" * 200_000,
    "deep tables": b'{"a":' * 100_000,
    "too long": b" " * INVENTORY_BYTES + b"{}",
    "unknown name": b'{"a": 1}',
    "upper case": json.dumps({ID.upper(): 1}).encode(),
    "surrogate": b'{"\\ud800": 1}',
    "path": b'{"../../x": 1}',
    "twice": f'{{"{ID}": 1, "{ID}": 1}}'.encode(),
    "negative": json.dumps({ID: -1}).encode(),
    "fraction": json.dumps({ID: 1.0}).encode(),
    "not a number": f'{{"{ID}": NaN}}'.encode(),
    "truth": json.dumps({ID: True}).encode(),
    "text": json.dumps({ID: "1"}).encode(),
    "null index": json.dumps({ID: None}).encode(),
    "table": json.dumps({ID: {}}).encode(),
    "huge number": f'{{"{ID}": {"9" * 100_000}}}'.encode(),
    "huge exponent": f'{{"{ID}": 1e999999}}'.encode(),
}


@pytest.mark.parametrize("kind", BAD_INVENTORIES)
def test_bad_inventories_are_refused(stored: Parties, kind: str) -> None:
    _check_refused(stored, BAD_INVENTORIES[kind])


@pytest.mark.parametrize("used", [17, 10**17])
def test_more_used_than_there_is(stored: Parties, used: int) -> None:
    data = json.dumps({ID: 3, batch_folder(stored, CLIENT).name: used}).encode()
    _check_refused(stored, data)


def _check_refused(parties: Parties, data: bytes) -> None:
    root = parties.directories[CLIENT]
    assert root is not None
    before = {path: path.read_bytes() for path in files_of(root)}
    pool = Pool(CLIENT, Prg.from_os(), refuses, session=b"s", directory=root)
    with pytest.raises(WireError) as refusal:
        pool.resume(data)
    pool.close()
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 200
    assert {path: path.read_bytes() for path in files_of(root)} == before


ANY_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200),
        ANY_JSON.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(
            st.one_of(st.just("ours"), st.from_regex(r"[0-9a-f]{32}", fullmatch=True)),
            st.one_of(st.integers(-2, 20), ANY_JSON),
        ),
    )
)
@example({"ours": 16})
@example({"ours": 15})
@example({"ours": 0})
def test_any_inventory_is_taken_or_refused(stored: Parties, sent: Any) -> None:
    """WireError is all that the peer can cause, and a refused inventory changes no file."""
    root = stored.directories[CLIENT]
    assert root is not None
    name = batch_folder(stored, CLIENT).name
    if isinstance(sent, dict):
        sent = json.dumps({name if k == "ours" else k: v for k, v in sent.items()}).encode()
    backup = root.parent / "backup"
    if not backup.exists():
        shutil.copytree(root, backup)
    pool = Pool(CLIENT, Prg.from_os(), refuses, session=b"s", directory=root)
    try:
        pool.resume(sent)
    except WireError:
        pool.close()
        assert {p.relative_to(root): p.read_bytes() for p in files_of(root)} == {
            p.relative_to(backup): p.read_bytes() for p in files_of(backup)
        }
        return
    used = max(3, json.loads(sent).get(name, 16))
    assert pool.available(TRIPLE) == 16 - used
    pool.take(TRIPLE, 16 - used)
    pool.close()
    shutil.rmtree(root)
    shutil.copytree(backup, root)


def test_an_inventory_that_would_be_refused_is_not_sent(
    stored: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spu_llm.offline.pool.INVENTORY_BYTES", 10)
    stored_pool = Pool(
        CLIENT, Prg.from_os(), refuses, session=b"s", directory=stored.directories[CLIENT]
    )
    with pytest.raises(PoolError, match="1 batches, more than can be compared"):
        stored_pool.inventory()
    stored_pool.close()


def test_no_more_is_stored_than_can_be_compared(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {f"{i:032x}": 10**6 for i in range(MAX_BATCHES)}
    assert len(json.dumps(ids)) < INVENTORY_BYTES
    monkeypatch.setattr("spu_llm.offline.pool.MAX_BATCHES", 2)
    parties.take(TRIPLE, TRIPLE.chunk)  # used up: it does not count
    parties.prepare(TRIPLE, 2 * TRIPLE.chunk)
    for pool in parties.pools:
        with pytest.raises(PoolError, match="prepare fewer steps"):
            pool.prepare(TRIPLE, 3 * TRIPLE.chunk)
        assert pool.available(TRIPLE) == 2 * TRIPLE.chunk
