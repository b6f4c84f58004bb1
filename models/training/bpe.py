"""Training of the byte-level BPE tokenizer, and writing of its Hugging Face files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from models.files import GENERATION_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from models.tokenizer import END_OF_TEXT


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens; id 0 is `<|endoftext|>`, which both begins and
    ends a document.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer, positions: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    settings = {
        "tokenizer_class": "GPT2TokenizerFast",
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
    }
    end = tokenizer.token_to_id(END_OF_TEXT)
    generation = {"bos_token_id": end, "eos_token_id": end}
    write_files(directory, tokenizer, settings, generation)


def write_files(
    directory: Path, tokenizer: Tokenizer, settings: dict[str, Any], generation: dict[str, Any]
) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / TOKENIZER_FILE), pretty=False)
    for name, value in ((TOKENIZER_CONFIG_FILE, settings), (GENERATION_FILE, generation)):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
