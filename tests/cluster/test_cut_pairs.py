"""The network of one pair of producers is cut in the midst of a batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.machines import machines
from tests.cluster.preparing import NEW, completed, greedy, prepare
from tests.kit.cut_wire import CutWire
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S, eventually
from tests.kit.pools import batches
from tests.kit.processes import Start


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["cut", "stall"])
def test_a_pair_that_is_cut_off_costs_its_batch(
    start: Start, pair: Pair, tmp_path: Path, deed: str
) -> None:
    pool, theirs, file = tmp_path / "client", tmp_path / "provider", tmp_path / "made.json"
    port = start(*pair.serve("--pool", str(theirs), "--jobs", "1")).until_listening()
    with machines(2) as nodes, CutWire(port) as wire:
        # The other pair, and who counts, come straight to the provider.
        options = ["--steps", str(NEW - 1), "--json", str(file)]
        door = ["--door", f"127.0.0.1:{wire.port}"]
        client = prepare(start, pair, port, pool, nodes, *options, *door)
        # The pair is in the midst of its batches: a session moves 6 MB to set itself up.
        assert eventually(lambda: wire.moved > 9_000_000, RUN_S)
        getattr(wire, deed)()
        assert client.wait(3 * RUN_S) == 0, client.stderr
    assert client.stderr.count("a pair of producers failed") == 1, client.stderr
    made = json.loads(file.read_text())
    assert made["steps"] >= NEW - 1
    # All that one party has, the other one has, but for the batch that was in work.
    kept, kept_there = batches(pool), batches(theirs)
    assert kept == kept_there and not any(kept.values())
    assert sum(row["available_units"] > 0 for row in made["correlations"]) > 1
    odd = set(batches(pool, inbox=True)) ^ set(batches(theirs, inbox=True))
    assert len(odd) <= 1
    result = completed(start, pair, port, pool, tmp_path / "text.json")
    assert result["token_ids"] == greedy(pair)
    used, used_there = batches(pool), batches(theirs)
    assert used == used_there and sum(used.values()) > 0
