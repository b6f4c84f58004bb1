"""A tiny model pair in Hugging Face layout, random weights, for tests of everything around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from models.family import ModelConfig, Params, family_of
from models.files import TOKENIZER_FILE
from models.gpt2 import GPT2Config
from models.hf import save_model
from models.llama import LlamaConfig
from models.t5 import GATED_GELU, T5Config
from models.tokenizer import END_OF_TEXT
from models.training.unigram import END, PAD, UNKNOWN, with_parts, write_unigram

VOCAB = 288
PRIVATE = GPT2Config(VOCAB, n_positions=64, n_embd=16, n_layer=1, n_head=2)
PUBLIC = GPT2Config(VOCAB, n_positions=64, n_embd=8, n_layer=1, n_head=2)
LLAMA = LlamaConfig(
    VOCAB,
    max_position_embeddings=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)

T5 = T5Config(
    VOCAB,
    d_model=16,
    d_kv=8,
    d_ff=24,
    num_layers=1,
    num_decoder_layers=2,
    num_heads=2,
    n_positions=64,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    feed_forward_proj=GATED_GELU,
)


def tiny_params(config: ModelConfig, seed: int) -> Params:
    """Random float32 weights, larger than initial ones so that distributions are not flat."""
    params = family_of(config).init(config, jax.random.key(seed))
    return jax.tree.map(lambda w: np.asarray(w) * (6.0 if w.ndim == 2 else 1.0), params)


def endless(params: Params) -> Params:
    """Return `params` with a logit near -n_embd for the end of text (token 0): no run ends by
    chance.
    """
    params["ln_f"]["bias"] = np.ones_like(params["ln_f"]["bias"])
    params["wte"][0] = -1.0
    return params


def padded(params: Params, rows: int = 64) -> Params:
    """Return `endless` parameters with further rows of the vocabulary, each likelier than all
    tokens.
    """
    wte = params["wte"]
    likeliest = np.ones((rows, wte.shape[1]), wte.dtype)
    return params | {"wte": np.concatenate([wte, likeliest])}  # type: ignore[operator]


def save_tokenizer(directory: Path, seed_text: str = "def read(path):\n    return path\n") -> None:
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Enough repeated text for every merge the vocabulary has room for.
    words = "alpha beta gamma delta epsilon zeta eta theta"
    bpe.train_from_iterator([seed_text + words] * 4, trainer)
    assert bpe.get_vocab_size() == VOCAB
    bpe.save(str(directory / TOKENIZER_FILE))


def make_t5_pair(root: Path) -> tuple[Path, Path]:
    """Directories of a private T5 and of one that often agrees; their tokenizer is Unigram."""
    # Not trained: which pieces Unigram's training keeps may differ from run to run.
    pieces = [*"▁\n():_abcdefghijklmnopqrstuvwxyz", "def▁", "read", "return▁", "path", "▁▁▁▁"]
    vocab = [(name, 0.0) for name in (PAD, END, UNKNOWN)]
    vocab += [(piece, -4.0 if len(piece) == 1 else -2.0) for piece in pieces]
    tokenizer = with_parts(tokenizers.Tokenizer(models.Unigram(vocab, unk_id=2)))
    tokenizer.add_special_tokens([PAD, END, UNKNOWN, "<extra_id_1>", "<extra_id_0>"])
    config = replace(T5, vocab_size=tokenizer.get_vocab_size())
    params: Any = tiny_params(config, 31)
    params = jax.tree.map(lambda w: w / 4 if w.ndim == 2 else w, params)
    params["embed"] = 0.3 * params["embed"]  # so that the last token is not all that counts
    noise = tiny_params(config, 131)
    drafts = jax.tree.map(lambda w, e: w + 0.002 * e if w.ndim == 2 else w, params, noise)
    directories = root / "private", root / "public"
    for directory, held in zip(directories, (params, drafts), strict=True):
        write_unigram(directory, tokenizer, config.n_positions)
        save_model(directory, config, held)
    return directories


def make_pair(root: Path, private_rows: int = 0, public_rows: int = 0) -> tuple[Path, Path]:
    """Directories of a private and a public model that share a tokenizer, with so many rows of the
    vocabulary that no token has.
    """
    directories = []
    kinds = ("private", PRIVATE, 1, private_rows), ("public", PUBLIC, 2, public_rows)
    for name, config, seed, rows in kinds:
        directory = root / name
        directory.mkdir(parents=True)
        params = padded(endless(tiny_params(config, seed)), rows)
        save_model(directory, replace(config, vocab_size=VOCAB + rows), params)
        save_tokenizer(directory)
        directories.append(directory)
    return directories[0], directories[1]
