"""Two network namespaces with one cable between them: nothing but the provider's port is shared."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spu_llm.net import identity
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Start, credentials

slow = pytest.mark.slow
PROVIDER, CLIENT = "10.213.77.1", "10.213.77.2"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def _privileged() -> bool:
    if shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Names of the provider's and the client's."""
    if not _privileged():
        pytest.skip("network namespaces need root, and the command ip")
    names = (f"spu{os.getpid()}p", f"spu{os.getpid()}c")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            "ip",
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            names[1],
            "netns",
            names[1],
        )
        for name, address in zip(names, (PROVIDER, CLIENT), strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", name)
            for device in (name, "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@slow
def test_completions_between_two_namespaces(
    start: Start, pair: Pair, namespaces: tuple[str, str], tmp_path: Path
) -> None:
    """Two clients in turn, then four at once: every text as alone."""
    folders = {"provider": PROVIDER, "client": CLIENT}
    for name, address in folders.items():
        identity.make(tmp_path / name, address, 30)

    def known(own: str, other: str) -> list[str]:
        return credentials(tmp_path / own, tmp_path / other)

    server = start(
        "serve",
        "--model",
        str(pair.private),
        "--listen",
        f"{PROVIDER}:0",
        "--jobs",
        "1",
        "--client-sessions",
        "4",
        *known("provider", "client"),
        within=namespaces[0],
    )
    port = server.until_listening()
    prompts = ["kanarie vogel", "een ander begin"]

    def asked(number: int, prompt: str) -> list[str]:
        return [
            "generate",
            "--server",
            f"{PROVIDER}:{port}",
            "--draft-model",
            str(pair.public),
            "--prompt",
            prompt,
            "--temperature",
            "0",
            "--max-new-tokens",
            "4",
            "--json",
            str(tmp_path / f"{number}.json"),
            *known("client", "provider"),
        ]

    for number, prompt in enumerate(prompts):
        client = start(*asked(number, prompt), within=namespaces[1])
        assert client.wait(RUN_S) == 0, client.stderr
    together = [start(*asked(2 + i, prompts[i % 2]), within=namespaces[1]) for i in range(4)]
    for client in together:
        assert client.wait(RUN_S) == 0, client.stderr
    texts = [json.loads((tmp_path / f"{i}.json").read_text())["token_ids"] for i in range(6)]
    assert texts[0] != texts[1] and texts[2:] == [*texts[:2], *texts[:2]]
    assert server.stderr.count("session finished") == 6
    # Who is not on the cable does not even find the port.
    outside = start(*asked(9, prompts[0]))
    assert outside.wait(END_S) == 1 and "cannot reach provider" in outside.stderr
