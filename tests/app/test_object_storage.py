"""Pools of both parties with their results in object storage, from `prepare` to a completion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from models.family import logits
from models.hf import load_model
from models.tokenizer import Tokenizer
from spu_llm.app import cli
from spu_llm.core.values import ROLES
from spu_llm.offline.files import STORE_FILE
from spu_llm.offline.opener_files import RESULTS
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Start

PROMPT, NEW = "def read(", 2
REQUEST = ["--max-new-tokens", str(NEW), "--standard", "--temperature", "0"]


def ran(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(list(args))
    assert isinstance(end.value.code, int)
    return end.value.code


def objects(root: Path, role: str) -> list[Path]:
    return [path for path in (root / f"{role}-objects").rglob("*") if path.is_file()]


def greedy(pair: Pair) -> list[int]:
    """Return the private model's own continuation, in plaintext."""
    config, params = load_model(pair.private)
    tokens = Tokenizer.load(pair.public).encode(PROMPT)
    for _ in range(NEW):
        tokens.append(int(np.argmax(logits(params, config, jnp.asarray(tokens))[-1])))
    return tokens[-NEW:]


@pytest.mark.slow
def test_a_completion_takes_what_lay_outside(
    start: Start, pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for role in ROLES:
        url = f"file://{tmp_path}/{role}-objects"
        assert ran("pool", str(tmp_path / role), "--store", url) == 0
    server = start(*pair.serve("--pool", str(tmp_path / "provider")))
    port, pool = server.until_listening(), str(tmp_path / "client")
    client = start(
        *("prepare", "--server", f"127.0.0.1:{port}", "--insecure", "--pool", pool),
        *("--draft-model", str(pair.public), "--prompt", PROMPT, *REQUEST),
    )
    assert client.wait(RUN_S) == 0, client.stderr
    stored = {role: len(objects(tmp_path, role)) for role in ROLES}
    assert stored["client"] == stored["provider"] > 20
    assert not [p for role in ROLES for p in (tmp_path / role).rglob(RESULTS)]
    capsys.readouterr()
    assert ran("pool", pool, "--json", str(tmp_path / "listed.json")) == 0
    assert f"is kept at file://{tmp_path}/client-objects" in capsys.readouterr().out
    listed = json.loads((tmp_path / "listed.json").read_text())
    assert listed["peers"][0]["store_bytes"] > 10 * listed["disk_bytes"] > 0

    file, place = tmp_path / "text.json", tmp_path / "client-objects"
    options = "--prompt", PROMPT, "--pool", pool, *REQUEST, "--json", str(file)
    place.rename(tmp_path / "away")  # as a disk that is not mounted
    client = start(*pair.generate(port, *options))
    assert client.wait(END_S) == 1
    assert f"object storage at file://{place} is not there" in client.stderr.splitlines()[-1]
    server.until("stderr", "the client's worker failed")
    (tmp_path / "away").rename(place)
    client = start(*pair.generate(port, *options))
    assert client.wait(RUN_S) == 0, client.stderr
    assert json.loads(file.read_text())["token_ids"] == greedy(pair)
    assert "making correlated randomness, 0 of 6 batches" in client.stderr  # products' positions
    assert all(len(objects(tmp_path, role)) < stored[role] for role in ROLES)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("objects", "is no place for objects; give a URL like"),
        ("file:///proc/nowhere", "object storage at file:///proc/nowhere"),
        ("s3://key:secret@bucket", "credentials by the environment"),
        ("https://host/folder?sig=secret", "'https://host/folder?...' is no place for objects"),
    ],
)
def test_a_place_that_is_none(
    url: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("pool", str(tmp_path / "pool"), "--store", url) == 2
    shown = capsys.readouterr().err
    assert said in shown and "secret" not in shown
    assert not (tmp_path / "pool" / STORE_FILE).exists()


def test_serving_needs_its_place(start: Start, pair: Pair, tmp_path: Path) -> None:
    place = tmp_path / "objects"
    assert ran("pool", str(tmp_path / "pool"), "--store", f"file://{place}") == 0
    shutil.rmtree(place)
    place.write_text("no folder")
    server = start(*pair.serve("--pool", str(tmp_path / "pool")))
    assert server.wait(END_S) == 2
    assert f"object storage at file://{place}" in server.stderr.splitlines()[-1]
