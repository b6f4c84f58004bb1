"""Who listens while a session is at work: the provider's one port, and nobody else that others on
the machine can reach.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.kit.pair import Pair
from tests.kit.processes import Process, Start

LISTENS = "0A"  # as /proc/net/tcp has it


def listening(process: Process) -> set[tuple[str, int]]:
    """Return the network namespace and the port of every socket of this process that listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    place = os.readlink(f"/proc/{process.pid}/ns/net")
    collected = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                collected.add((place, int(fields[1].rpartition(":")[2], 16)))
    return collected


def test_only_the_provider_s_port_can_be_reached(start: Start, pair: Pair) -> None:
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    others = {int(line.split()[1].rpartition(":")[2], 16) for line in table}
    server = start(*pair.serve())
    port = server.until_listening()
    client = start(*pair.generate(port, "--prompt", "a", "--max-new-tokens", "30"))
    client.until_phase("prefilling")
    here = os.readlink("/proc/self/ns/net")
    processes = [*server.processes(), *client.processes()]
    workers = [p for p in processes if p.is_worker]
    assert len(workers) == 2
    if os.readlink(f"/proc/{workers[0].pid}/ns/net") == here:
        pytest.skip("network namespaces are not allowed: workers listen on loopback")
    collected = set().union(*map(listening, processes))
    assert {at for at in collected if at[0] == here} == {(here, port)}
    # Both workers listen, SPU among them, where nobody else is.
    apart = [listening(worker) for worker in workers]
    assert all(apart) and not {at for own in apart for at in own if at[0] == here}
    for at in set().union(*apart):
        if at[1] not in others:
            with pytest.raises(OSError):
                socket.create_connection(("127.0.0.1", at[1]), 1)
