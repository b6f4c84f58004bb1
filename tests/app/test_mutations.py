"""Files of a model, changed at random: read as libraries read them, or one line and exit code 2.

Twenty changes of each kind, of `config.json` and `tokenizer.json` of both families. The references
are the configuration classes of `transformers`, and `tokenizers` without truncation and padding.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from models.gpt2 import GPT2Config
from models.hf import load_model, save_model
from models.tokenizer import Tokenizer
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from tests.kit.models import LLAMA, PRIVATE, VOCAB, endless, save_tokenizer, tiny_params
from tests.kit.processes import ERROR
from tests.models.tokenizers_of import sentencepiece

SEEDS = range(20)
FAMILIES = ("gpt2", "llama")
TEXTS = (
    "",
    "def read(path):\n    return path",
    "hello world",
    "héllo  漢字 🙂",
    "<|endoftext|>a</s>b",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a directory of each family; LLaMA's with SentencePiece's tokenizer."""
    collected = {}
    for family, config in zip(FAMILIES, (PRIVATE, LLAMA), strict=True):
        directory = collected[family] = tmp_path_factory.mktemp(family)
        params = tiny_params(config, 1)
        save_model(directory, config, endless(params) if family == "gpt2" else params)
        save_tokenizer(directory)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 0}))
    return collected


# ---- changes: each returns a file's content, or its text


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Containers and keys, of which every level has as many as the next."""
    actual, level = [], [content]
    while level:
        parts = [(outer, key) for outer in level for key in _keys(outer)[:40]]
        actual += [parts] if parts else []
        level = [outer[key] for outer, key in parts if isinstance(outer[key], dict | list)]
    return actual  # type: ignore[return-value]


def _keys(outer: Any) -> list[Any]:
    return list(outer) if isinstance(outer, dict) else list(range(len(outer)))


def _place(content: Any, rng: random.Random) -> tuple[Any, Any]:
    return rng.choice(rng.choice(_places(content)))


def drop(content: Any, rng: random.Random) -> Any:
    outer, key = _place(content, rng)
    del outer[key]
    return content


def other_type(content: Any, rng: random.Random) -> Any:
    outer, key = _place(content, rng)
    outer[key] = rng.choice(["x", 1, 1.5, True, False, None, [], {}, ["x"], {"x": 1}])
    return content


def extreme(content: Any, rng: random.Random) -> Any:
    outer, key = _place(content, rng)
    outer[key] = rng.choice(
        [
            0,
            -1,
            2,
            3,
            2**31,
            2**32,
            10**12,
            10**400,
            -0.0,
            1e-300,
            1e308,
            float("inf"),
            float("-inf"),
            float("nan"),
        ]
    )
    return content


def nested(content: Any, rng: random.Random) -> Any:
    outer, key = _place(content, rng)
    for _ in range(rng.choice([1, 2, 30, 900])):
        outer[key] = rng.choice([[outer[key]], {"type": outer[key]}])
    return content


def twice(content: Any, rng: random.Random) -> str:
    outer, key = _place(content, rng)
    while not isinstance(outer, dict):
        outer, key = _place(content, rng)
    marker = "a field to come twice"
    outer[marker] = rng.choice([None, 3, "x", outer[key]])
    return json.dumps(content).replace(json.dumps(marker), json.dumps(key))


def swapped(content: Any, rng: random.Random) -> Any:
    level = rng.choice(_places(content))
    (outer, key), (other, name) = rng.choice(level), rng.choice(level)
    outer[key], other[name] = other[name], outer[key]
    return content


def truncated(content: Any, rng: random.Random) -> str:
    text = json.dumps(content)
    return text[: rng.randrange(len(text))]


def unknown(content: Any, rng: random.Random) -> Any:
    outer, key = _place(content, rng)
    if isinstance(outer[key], str) and rng.random() < 0.5:
        words = ["linear", "Unigram", "\u202e", "\ud800", "é", "", outer[key] * 2]
        outer[key] = rng.choice(words)
    elif isinstance(outer, dict):
        names = ["unknown", "hidden_size", "rope_scaling", "type", "num_hidden_layers"]
        outer[rng.choice(names)] = rng.choice([1, 16, None, {"type": "linear"}, "default"])
    else:
        outer.insert(key, rng.choice([1, "x", None, outer[key]]))
    return content


KINDS = [drop, other_type, extreme, nested, twice, swapped, truncated, unknown]


def changed(path: Path, kind: Callable[[Any, random.Random], Any], seed: int) -> None:
    """Change content by a kind and a number, which decide alone what the change is."""
    rng = random.Random(f"{path.name} {kind.__name__} {seed}")
    content = kind(json.loads(path.read_text()), rng)
    path.write_text(content if isinstance(content, str) else _as_json(content))


def _as_json(content: Any) -> str:
    """Return JSON text, also of what is nested deeper than the library writes."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(content)
    finally:
        sys.setrecursionlimit(limit)


def refused(args: list[str], capsys: pytest.CaptureFixture[str], message: str) -> None:
    """Check that a command refuses the file, with this one line."""
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert (end.value.code, printed.out) == (2, "") and line.startswith(ERROR)
    assert len(line) < 1000 and line.isprintable()
    assert message.split(" ")[-1] in line


# ---- config.json


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_config(
    models: dict[str, Path],
    family: str,
    kind: Callable[[Any, random.Random], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text"
    text.write_text("def read(path):")
    met = set()
    for seed in SEEDS:
        directory = Path(shutil.copytree(models[family], tmp_path / str(seed)))
        changed(directory / "config.json", kind, seed)
        try:
            config, params = load_model(directory)
            ends = Tokenizer.load(directory).eos_ids
        except InputError as error:
            command = ["calibrate", "--model", str(directory), "--text", str(text)]
            refused(command, capsys, str(error))
            met.add("refused")
            continue
        raw = json.loads((directory / "config.json").read_text())
        assert _meaning(config) == _reference(raw), (seed, raw)
        assert config.vocab_size == VOCAB
        if raw.get("eos_token_id") is not None:
            assert ends == set(np.atleast_1d(raw["eos_token_id"]).tolist())
        met.add("read")
    assert met == {"refused"} if kind in (twice, truncated) else met == {"refused", "read"}


_ALIKE = {"gelu_pytorch_tanh": "gelu_new"}


def _meaning(config: Any) -> dict[str, Any]:
    """Return what decides a model's logits, as it was read here."""
    shape = config.shape()
    del shape["vocab_size"]
    if isinstance(config, GPT2Config):
        return shape | {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
        }
    shape = {
        name: value
        for name, value in shape.items()
        if name == "rope_theta" or not name.startswith("rope_")
    }
    return shape | {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope": config.rotary.describe() or {"rope_type": "default"},
    }


def _reference(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the same as `transformers` reads it."""
    import transformers

    unread = ("architectures", "torch_dtype")  # here; the weights say
    fields = {name: value for name, value in raw.items() if name not in unread}
    actual = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(fields)
    names = list(_meaning(PRIVATE if raw["model_type"] == "gpt2" else LLAMA))
    stated = {}
    if "rope" in names:
        names.remove("rope")
        rope = actual.rope_scaling or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        scaled = {"factor": rope["factor"]} if kind == "linear" else {}
        stated = {"rope": {"rope_type": kind, **scaled}}
    values = {name: getattr(actual, name) for name in names}
    return stated | {name: _ALIKE.get(str(value), value) for name, value in values.items()}


# ---- tokenizer.json


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_tokenizer(
    models: dict[str, Path],
    family: str,
    kind: Callable[[Any, random.Random], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    met = set()
    for seed in SEEDS:
        directory = Path(shutil.copytree(models[family], tmp_path / str(seed)))
        path = directory / "tokenizer.json"
        if family == "llama":
            sentencepiece("first").save(str(path))
        changed(path, kind, seed)
        command = ["watermark", "keygen", "--tokenizer", str(directory), "--out"]
        try:
            ours = Tokenizer.load(directory)
        except InputError as error:
            refused([*command, str(directory / "key")], capsys, str(error))
            met.add("refused")
            continue
        _assert_read_alike(ours, json.loads(path.read_text()), family)
        met.add("read")
    assert "refused" in met and ("read" in met or kind not in (drop, swapped, unknown))


def _assert_read_alike(ours: Tokenizer, content: Any, family: str) -> None:
    """Texts have the tokens, and tokens the texts, that they have in the library."""
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.model.dropout = None
    library.no_truncation()
    library.no_padding()
    assert library.get_vocab_size() == ours.vocab_size
    some = [*range(0, ours.vocab_size, 7), *range(ours.vocab_size - 20, ours.vocab_size)]
    for text in TEXTS:
        try:
            ids = library.encode(text, add_special_tokens=False).ids
        except Exception:
            with pytest.raises(InputError):
                ours.encode(text, goes_on=True)
            continue
        assert ours.encode(text, goes_on=True) == ids
        some += ids
        wanted = library.decode(ids, skip_special_tokens=True)
        # The library may leave the first space out, which a text that goes on needs.
        assert ours.decode(ids) in (wanted, f" {wanted}" if family == "llama" else wanted)
    for token in some if family == "gpt2" else []:
        assert ours.decode([token]) == library.decode([token], skip_special_tokens=True)
