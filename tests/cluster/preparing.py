"""`prepare --ray` with a tiny model, and a completion that takes what it made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.family import logits
from models.hf import load_model
from models.tokenizer import Tokenizer
from tests.cluster.machines import Machines
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S
from tests.kit.processes import Command, Start

PROMPT, NEW = "def read(", 3
REQUEST = ["--max-new-tokens", str(NEW), "--standard", "--temperature", "0"]


def prepare(
    start: Start, pair: Pair, port: int, pool: Path, nodes: Machines, *more: str
) -> Command:
    return start(
        "prepare",
        *("--server", f"127.0.0.1:{port}", "--insecure", "--pool", str(pool)),
        *("--draft-model", str(pair.public), "--prompt", PROMPT, *REQUEST),
        *("--ray", nodes.address, "--pairs", "2", *more),
    )


def completed(start: Start, pair: Pair, port: int, pool: Path, file: Path) -> dict[str, Any]:
    """Return the result of a completion that takes what was prepared."""
    options = ["--prompt", PROMPT, "--pool", str(pool), "--json", str(file), *REQUEST]
    client = start(*pair.generate(port, *options))
    assert client.wait(RUN_S) == 0, client.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def greedy(pair: Pair) -> list[int]:
    """Return the private model's own continuation, in plaintext."""
    config, params = load_model(pair.private)
    tokens = Tokenizer.load(pair.public).encode(PROMPT)
    for _ in range(NEW):
        tokens.append(int(np.argmax(logits(params, config, jnp.asarray(tokens))[-1])))
    return tokens[-NEW:]
