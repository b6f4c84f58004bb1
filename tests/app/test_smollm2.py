"""A model that people use, SmolLM2-135M-Instruct: all of it imported, its first two blocks between
two processes, and, slowly, all of it. Without the file, which `make model` fetches, nothing is run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.quants import dequantize
from safetensors.numpy import load_file

from models.alignment import changed
from models.chat import Message, Template, cut
from models.family import ModelConfig, Params, logits
from models.files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE
from models.hf import load_model, load_uncalibrated, save_model
from models.importing.run import import_model
from models.tokenizer import Tokenizer
from spu_llm.app import cli
from tests.kit.paths import ROOT
from tests.kit.patience import RUN_S
from tests.kit.processes import Start

FILE = ROOT / "build" / "models" / "smollm2-135m-instruct.gguf"
CHATS = ROOT / "models" / "smollm2" / "chats.jsonl"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
PUBLIC = 24  # tokens of its template before the first word of a chat
VOCAB = 2048  # tokens of the part that runs between two processes: a hint is 10 kB for each
MARGIN = 0.05  # of every decision in logits: far above what shares blur

pytestmark = pytest.mark.skipif(
    not FILE.exists(), reason=f"{FILE.relative_to(ROOT)} is not there: make model fetches it"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "whole"
    import_model(FILE, directory)
    return directory


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[ModelConfig, Params]:
    return load_model(model)


@pytest.fixture(scope="module")
def two_blocks(model: Path, loaded: tuple[ModelConfig, Params]) -> Path:
    """Return its first two blocks and tokens, with ranges."""
    directory = model.with_name("two")
    config, params = loaded
    part: Any = {**params, "blocks": params["blocks"][:2], "embed": params["embed"][:VOCAB]}
    save_model(directory, replace(config.with_layers(2), vocab_size=VOCAB), part)
    content = json.loads((model / TOKENIZER_FILE).read_text(encoding="utf-8"))
    tokens = {t: i for t, i in content["model"]["vocab"].items() if i < VOCAB}
    merges = [pair for pair in content["model"]["merges"] if "".join(pair) in tokens]
    content["model"] |= {"vocab": tokens, "merges": merges}
    (directory / TOKENIZER_FILE).write_text(json.dumps(content), encoding="utf-8")
    template = (model / TOKENIZER_CONFIG_FILE).read_text(encoding="utf-8")
    (directory / TOKENIZER_CONFIG_FILE).write_text(template, encoding="utf-8")
    calibrate(directory, 2)
    return directory


def calibrate(directory: Path, most: int | None = None) -> None:
    """Calibrate on the first chats of those that `make model` takes, or on all."""
    chats = directory.with_name(f"{directory.name}.jsonl")
    lines = CHATS.read_text(encoding="utf-8").splitlines(keepends=True)[:most]
    chats.write_text("".join(lines), encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        cli.main(["calibrate", "--model", str(directory), "--chats", str(chats)])
    assert end.value.code == 0


def asked(directory: Path, question: str) -> tuple[list[int], list[int]]:
    """Tokens of a chat: those of its public beginning, and the rest."""
    tokenizer = Tokenizer.load(directory)
    parts = cut(Template.load(directory).render, [Message("user", question)])
    head, rest = (tokenizer.encode(text, goes_on=True) for text in parts)
    return head, rest


def answer(
    start: Start, directory: Path, out: Path, question: str, tokens: int, within_s: float = RUN_S
) -> dict[str, Any]:
    """Return the result of one turn, with both parties on this machine."""
    chat = start(
        "chat",
        "--model",
        str(directory),
        "--prompt",
        question,
        "--temperature",
        "0",
        "--standard",
        "--max-new-tokens",
        str(tokens),
        "--json",
        str(out),
    )
    assert chat.wait(within_s) == 0, chat.stderr
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


@pytest.mark.slow
def test_all_of_its_weights_are_imported(model: Path) -> None:
    """As the library reads them, in float16, with the order of rotary pairs that LLaMA has."""
    reader = gguf.GGUFReader(FILE)
    collected = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    stored = load_file(model / WEIGHTS_FILE)
    assert len(stored) == len(collected) == 272
    for name, values in stored.items():
        tensor = collected[names.get_name(name, try_suffixes=(".weight",))]  # type: ignore[index]
        expected = dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        if "q_proj" in name or "k_proj" in name:
            pairs = expected.reshape(-1, 32, 2, expected.shape[-1])  # of each head of 64
            expected = pairs.swapaxes(1, 2).reshape(values.shape)
        np.testing.assert_array_equal(values, expected.astype(values.dtype), err_msg=name)


def test_it_answers_in_plaintext(model: Path, loaded: tuple[ModelConfig, Params]) -> None:
    config, params = loaded
    tokenizer = Tokenizer.load(model)
    public, secret = asked(model, QUESTION)
    assert (len(public), len(secret)) == (PUBLIC, 13)
    reply = [*tokenizer.encode(ANSWER, goes_on=True), min(tokenizer.eos_ids - {0})]
    tokens = jnp.asarray([*public, *secret, *reply])
    rows = np.asarray(logits(params, config, tokens))[-len(reply) - 1 : -1]
    assert rows.argmax(axis=1).tolist() == reply
    assert tokenizer.special_tokens["<|im_end|>"] == reply[-1]


def test_its_draft_model_is_completed(
    model: Path, loaded: tuple[ModelConfig, Params], tmp_path: Path
) -> None:
    """From the tensors that are not its own; it knows what the model would answer."""
    folder, out = ROOT / "models" / "smollm2" / "draft", tmp_path / "draft"
    assert (folder / WEIGHTS_FILE).stat().st_size <= 25e6
    changed.complete(folder, model, out)
    config, params = load_uncalibrated(out)
    sizes = [np.size(leaf) for leaf in jax.tree.leaves({**params, "embed": 0})]
    assert config.layers == 3 and sum(sizes) <= 12e6
    np.testing.assert_array_equal(params["embed"], loaded[1]["embed"])
    public, secret = asked(model, QUESTION)
    reply = Tokenizer.load(out).encode(ANSWER, goes_on=True)
    tokens = jnp.asarray([*public, *secret, *reply])
    p, q = (
        np.asarray(jax.nn.softmax(logits(params, config, tokens) / 0.7))[-len(reply) - 1 :]
        for config, params in (loaded, (config, params))
    )
    assert np.minimum(p, q).sum(axis=1).mean() > 0.3


@pytest.mark.slow
def test_its_first_two_blocks_answer_between_two_processes(
    start: Start, two_blocks: Path, tmp_path: Path
) -> None:
    config, params = load_model(two_blocks)
    public, secret = asked(two_blocks, "Hi")
    tokens = [*public, *secret]
    for _ in range(2):
        row = np.asarray(logits(params, config, jnp.asarray(tokens)))[-1]
        last, first = np.sort(row)[-2:]
        assert first - last > MARGIN
        tokens.append(int(row.argmax()))
    result = answer(start, two_blocks, tmp_path / "result", "Hi", 2)
    assert result["token_ids"] == tokens[-2:]
    assert f"the public prefix, {len(public)} tokens" in "".join(result["learned"]["provider"])


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_it_answers_between_two_processes(start: Start, model: Path, tmp_path: Path) -> None:
    calibrate(model)
    result = answer(start, model, tmp_path / "result", QUESTION, 8, 2 * RUN_S)
    assert result["text"] == ANSWER
