"""`gateway --ray`: producers fill the pool that an open chat takes from."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from models.draft import Drafter
from models.hf import load_model
from models.tokenizer import Tokenizer
from tests.cluster.machines import Machines, machines
from tests.kit.command_line import refused
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S
from tests.kit.processes import Start

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
CAME = "batches came from producers"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Machines]:
    with machines(1) as nodes:
        yield nodes


def greedy(model: Path, text: str, tokens: int) -> str:
    tokenizer, drafter = Tokenizer.load(model), Drafter(*load_model(model), 64)
    written = tokenizer.encode(text)
    for _ in range(tokens):
        written.append(int(drafter.logits(written).argmax()))
    return tokenizer.decode(written[-tokens:])


@pytest.mark.slow
def test_an_open_chat_takes_what_producers_make(
    start: Start, pair: Pair, nodes: Machines, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(pair.private, tmp_path / "model"))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    where = ["--model", str(model), "--listen", "127.0.0.1:0", "--insecure"]
    server = start("serve", *where, "--pool", str(tmp_path / "provider"))
    place = f"127.0.0.1:{server.until_listening()}"
    gateway = start(
        *("gateway", "--server", place, "--insecure", "--listen", "127.0.0.1:0", "--standard"),
        *("--pool", str(tmp_path / "client"), "--ray", nodes.address, "--pairs", "1"),
        *("--ahead-turn", "8", "--ahead-answer", "4"),
    )
    base = f"http://127.0.0.1:{gateway.until_listening()}/v1"
    gateway.until("stdout", CAME)
    client = openai.OpenAI(base_url=base, api_key="x", max_retries=0, timeout=RUN_S)
    said = [{"role": "user", "content": "hi"}]
    got = client.chat.completions.create(
        model="private",
        messages=said,  # type: ignore[arg-type]
        max_tokens=4,
        temperature=0,
    )
    assert got.choices[0].message.content == greedy(model, "<user>hi\n<assistant>", 4)
    gateway.send(signal.SIGTERM)
    assert gateway.wait(30) == 128 + signal.SIGTERM
    gateway.assert_gone(10)
    assert "Traceback" not in gateway.stderr and not gateway.errors


@pytest.mark.parametrize(
    ("options", "words"), [([], "give --server and --pool"), (["--pairs", "2"], "--ray")]
)
def test_bad_options_get_a_line(
    capsys: pytest.CaptureFixture[str], pair: Pair, tmp_path: Path, options: list[str], words: str
) -> None:
    model = Path(shutil.copytree(pair.private, tmp_path / "model"))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    more = options or ["--ray", "127.0.0.1:1"]
    assert words in refused(capsys, "gateway", "--model", str(model), *more)
