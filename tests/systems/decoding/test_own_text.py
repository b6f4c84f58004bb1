"""Text before the prompt: the provider's own, and what both may know."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from models.family import logits
from models.hf import load_model
from models.tokenizer import Tokenizer
from tests.kit.command_line import refused
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Start

SYSTEM, PREFIX, PROMPT = "zqzq vwvw", "def ", "read("
NEAR = 0.05  # of a logit: what a forward on shares may be off by, here


@pytest.mark.slow
def test_a_text_goes_on_after_all_that_stands_before_it(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    """Each token is the likeliest one after the public text, the provider's and the prompt; the
    client hears of the first of these how long it is, rounded up.
    """
    own, file = tmp_path / "system.txt", tmp_path / "result.json"
    own.write_text(SYSTEM)
    server = start(*pair.serve("--system-prompt", str(own), "--prefix-pad", "16", "--once"))
    client = start(
        *pair.generate(server.until_listening(), "--public-prefix", PREFIX, "--prompt", PROMPT),
        "--temperature",
        "0",
        "--draft-length",
        "2",
        "--max-new-tokens",
        "5",
        "--json",
        str(file),
    )
    assert client.wait(RUN_S) == 0, client.stderr
    assert server.wait(RUN_S) == 0, server.stderr
    result, tokenizer = json.loads(file.read_text()), Tokenizer.load(pair.private)
    config, params = load_model(pair.private)
    text = [t for part in (PREFIX, SYSTEM, PROMPT) for t in tokenizer.encode(part)]
    for token in result["token_ids"]:
        row = np.asarray(logits(params, config, jnp.asarray(text))[-1])
        assert row[token] > row.max() - NEAR
        text.append(token)
    learned = result["learned"]
    assert "length of the provider's own text, padded: 16 tokens" in learned["client"]
    public = len(tokenizer.encode(PREFIX))
    assert f"the public prefix, {public} tokens" in learned["provider"]
    for said in (client.stdout, client.stderr, file.read_text()):
        assert SYSTEM not in said


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (None, [], "cannot read"),
        (b"", [], "is empty"),
        (b"\xff\xfe", [], "line 1 is not UTF-8"),
        (b"zq" * 40, [], "takes 96 positions, but the model's context is 64; shorten it"),
        (b"zq", ["--prefix-pad", "0"], "--prefix-pad must be 1 to 4096"),
        (b"zq", ["--prefix-pad", "64"], "or give a smaller --prefix-pad"),
        (b"zq", ["--studies"], "studies run the model alone"),
    ],
)
def test_a_system_prompt_that_cannot_be_served(
    capsys: pytest.CaptureFixture[str],
    pair: Pair,
    tmp_path: Path,
    content: bytes | None,
    options: list[str],
    said: str,
) -> None:
    own = tmp_path / "system.txt"
    if content is not None:
        own.write_bytes(content)
    assert said in refused(capsys, *pair.serve("--system-prompt", str(own), *options))


def test_a_prompt_too_long_after_the_providers_text_is_refused(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    own = tmp_path / "system.txt"
    own.write_text(SYSTEM)
    server = start(*pair.serve("--system-prompt", str(own), "--prefix-pad", "32"))
    client = start(*pair.generate(server.until_listening(), "--prompt", "zq" * 20))
    client.assert_failed(2, "model's context is 32; shorten it to 31", within_s=END_S)


@pytest.mark.slow
def test_correlations_is_made_ahead_for_it(start: Start, pair: Pair, tmp_path: Path) -> None:
    """Its table of positions has a hint of its own, which a dry run asks for, too."""
    own = tmp_path / "system.txt"
    own.write_text(SYSTEM)
    pools = [str(tmp_path / name) for name in ("provider's", "client's")]
    server = start(*pair.serve("--system-prompt", str(own), "--pool", pools[0]))
    port = server.until_listening()
    address = ["--server", f"127.0.0.1:{port}", "--insecure", "--pool", pools[1]]
    asked = [
        "--draft-model",
        str(pair.public),
        "--draft-length",
        "2",
        "--max-new-tokens",
        "4",
        "--public-prefix",
        PREFIX,
        "--prompt",
        PROMPT,
    ]
    made, taken = tmp_path / "made.json", tmp_path / "taken.json"
    prepare = start("prepare", *address, *asked, "--steps", "3", "--json", str(made))
    assert prepare.wait(RUN_S) == 0, prepare.stderr
    client = start("generate", *address, *asked, "--json", str(taken))
    assert client.wait(RUN_S) == 0, client.stderr
    sent = [json.loads(file.read_text())["bytes"]["offline"] for file in (made, taken)]
    assert sum(sent[1].values()) < 0.5 * sum(sent[0].values())
