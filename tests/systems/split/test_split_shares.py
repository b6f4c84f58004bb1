"""Mode mpc of `spu-llm split` as two processes: texts, correlated randomness that is made ahead,
and what is refused; and what the host receives of boundary rows.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from models.family import family_of, logits
from models.gpt2 import GPT2Config
from models.hf import load_model, save_model
from models.split import Split
from models.tokenizer import Tokenizer
from spu_llm.attacks.split_views import views_of_middle
from spu_llm.core.settings import SpuConfig
from spu_llm.offline.silent.ring import SPARE_BITS
from spu_llm.systems.split.attacks import inversion, norms
from spu_llm.systems.split.attacks.views import HostView, Public
from spu_llm.systems.split.secure_viewed import as_rows
from tests.kit.models import PUBLIC, VOCAB, endless, save_tokenizer, tiny_params
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Start

MODEL = GPT2Config(VOCAB, n_positions=64, n_embd=16, n_layer=3, n_head=2)
PROMPT, NEW, DRAFTS = "def read(", 6, 2


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a model of three blocks, and one that drafts."""
    root = tmp_path_factory.mktemp("three")
    pair = Pair(root / "private", root / "public")
    for directory, config, seed in zip(pair, (MODEL, PUBLIC), (1, 2), strict=True):
        save_model(directory, config, endless(tiny_params(config, seed)))
        save_tokenizer(directory)
    return pair


def command(role: str, pair: Pair, *more: str) -> list[str]:
    return ["split", role, "--mode", "mpc", "--model", str(pair.private), "--insecure", *more]


def client(role: str, pair: Pair, port: int, *more: str) -> list[str]:
    address = ["--server", f"127.0.0.1:{port}", "--draft-model", str(pair.public)]
    asked = ["--prompt", PROMPT, "--max-new-tokens", str(NEW), "--draft-length", str(DRAFTS)]
    return command(role, pair, *address, *asked, *more)


def check_hidden(model: Path, texts: list[list[int]], unmasked: list[np.ndarray]) -> None:
    """Check that what is under the masks of these texts, each run twice, is their fronts' rows
    after a norm, and that a host which saw it would read almost all tokens.
    """
    config, params = load_model(model)
    public = Public(config, family_of(config).fold(params, config), Split(1, 1), texts)
    rows = [as_rows(words, SpuConfig().frac_bits) for words in unmasked]
    for seen, wanted in zip(rows, [*public.front(texts)] * 2, strict=True):
        np.testing.assert_allclose(seen, norms.normalised(config, wanted)[0], atol=1e-4)
    guess = inversion.attack(HostView(norms.before_norm(public, rows)), public)
    assert np.mean(np.equal(guess, [*texts, *texts])) > 0.9


def greedy(pair: Pair) -> list[int]:
    config, params = load_model(pair.private)
    tokens = Tokenizer.load(pair.private).encode(PROMPT)
    for _ in range(NEW):
        tokens.append(int(np.argmax(logits(params, config, jnp.asarray(tokens))[-1])))
    return tokens[-NEW:]


@pytest.mark.slow
def test_a_text_is_the_whole_models(start: Start, three: Pair, tmp_path: Path) -> None:
    server = start(*command("serve", three, "--listen", "127.0.0.1:0"))
    port, file = server.until_listening(), tmp_path / "result.json"
    run = start(*client("generate", three, port, "--temperature", "0", "--json", str(file)))
    assert run.wait(RUN_S) == 0, run.stderr
    result = json.loads(file.read_text())
    assert result["token_ids"] == greedy(three)
    told = " ".join(result["learned"]["provider"])
    assert "prompt length" in told and "end of text" in told
    assert not any(word in told for word in ("temperature", "accepted", "row"))
    assert "rows" in " ".join(result["learned"]["client"])
    assert not any("temperature" in name for name in result["config"])
    server.send(signal.SIGTERM)
    assert server.wait(END_S) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_what_is_not_served_is_refused(start: Start, three: Pair, tmp_path: Path) -> None:
    """In one line, and another client may come."""
    server = start(*command("serve", three, "--listen", "127.0.0.1:0"))
    port, other = server.until_listening(), tmp_path / "other"
    save_model(other, MODEL, endless(tiny_params(MODEL, 3)))
    save_tokenizer(other)
    for more, words in (
        (["--split", "2,0"], "serves --mode mpc --split 1,1, not --mode mpc --split 2,0"),
        (["--model", str(other)], "the parties have models with different ends"),
        (["--precision", "float16"], "--precision is of --mode plain or noir; leave it out"),
    ):
        refused = start(*client("generate", three, port, *more))
        assert refused.wait(RUN_S) == 2 and words in refused.stderr
    whole = start(*three.generate(port))
    assert whole.wait(RUN_S) == 2 and "serves the middle of a split model alone" in whole.stderr


@pytest.mark.slow
def test_correlations_is_prepared_and_taken(start: Start, three: Pair, tmp_path: Path) -> None:
    pools = tmp_path / "provider", tmp_path / "client"
    server = start(*command("serve", three, "--listen", "127.0.0.1:0", "--pool", str(pools[0])))
    port = server.until_listening()
    files = [tmp_path / "prepared", tmp_path / "result"]
    own = ["--pool", str(pools[1])]
    asked = ["--steps", str(NEW - 1)], ["--temperature", "0"]
    for role, more, file in zip(("prepare", "generate"), asked, files, strict=True):
        run = start(*client(role, three, port, *own, *more, "--json", str(file)))
        assert run.wait(RUN_S) == 0, run.stderr
    prepared, result = (json.loads(file.read_text()) for file in files)
    assert prepared["steps"] >= NEW - 1
    assert result["token_ids"] == greedy(three)
    # What is left offline is SPU's own set-up, which `prepare` had, too.
    offline = [sum(r["bytes"]["offline"].values()) for r in (prepared, result)]
    assert offline[1] < 1.05 * (offline[0] - sum(row["bytes"] for row in prepared["correlations"]))
    server.send(signal.SIGTERM)
    assert server.wait(END_S) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_what_the_host_receives_is_uniform(three: Pair) -> None:
    """Of two texts that differ everywhere, each twice: words that no row follows from, and that
    differ by such words where the text is the same. The lowest bits are those that no mask has, and
    zero; chi-square of each byte above these, 14 tests: one of them is a false alarm once in
    10^9 times.
    """
    length = 60
    texts = [list(range(40, 40 + length)), list(range(100, 100 + length))]
    views = views_of_middle(three.private, Split(1, 1), [*texts, *texts], steps=2)
    check_hidden(three.private, texts, views.unmasked)
    assert all(view.dtype == np.uint64 for view in views.received)
    words: Any = np.stack(views.received)
    assert words.shape == (4, length, MODEL.n_embd)
    for uniform in (words, words[:2] - words[2:]):
        assert not (uniform % (1 << SPARE_BITS)).any()
        for low, column in enumerate(uniform.astype("<u8").reshape(-1, 1).view(np.uint8).T):
            zeros = min(8, max(0, SPARE_BITS - 8 * low))  # of this byte
            counts = np.bincount(column >> zeros, minlength=256 >> zeros)
            assert counts.sum() == uniform.size
            assert zeros == 8 or chisquare(counts).pvalue > 1e-9 / 14
