"""Train the shipped models: `python -m models.training.train --out models/shipped`.

Three stages, each from fixed seeds: the tokenizer, the private model on the training files, and the
public draft model distilled from the private one, so that the private model accepts most of its
drafts (POST: the server publishes a small model aligned with its private one).
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from models.gpt2 import GPT2Config, init_params
from models.hf import load_model, save_model
from models.training.batches import batches, consecutive_windows, encode_documents
from models.training.bpe import train_tokenizer, write_tokenizer
from models.training.corpus import CorpusFile, list_files, read_text, write_manifest
from models.training.optimise import Loss, Schedule, cross_entropy, distillation, fit
from models.training.snippets import cut_snippets, write_snippets

VOCABULARY = 4096
PRIVATE = GPT2Config(VOCABULARY, n_positions=256, n_embd=256, n_layer=4, n_head=4)
PUBLIC = GPT2Config(VOCABULARY, n_positions=256, n_embd=128, n_layer=2, n_head=4)
PRIVATE_SCHEDULE = Schedule(steps=5000, batch=4, learning_rate=1.5e-3)
PUBLIC_SCHEDULE = Schedule(steps=2000, batch=4, learning_rate=3e-3)
HELD_OUT_WINDOWS = 64  # for the losses printed on the way
SNIPPETS = 64  # shipped, of at most SNIPPET_CHARACTERS each
SNIPPET_CHARACTERS = 2000


@dataclass(frozen=True)
class Data:
    """The encoded corpus and its tokenizer."""

    tokenizer: Tokenizer
    training: list[np.ndarray]
    held_out: np.ndarray  # [window, n_positions + 1]


def prepare(out: Path, files: list[CorpusFile]) -> Data:
    """Train the tokenizer, write it to both directories, and encode the corpus."""
    training = [read_text(file) for file in files if not file.held_out]
    held_out = [read_text(file) for file in files if file.held_out]
    tokenizer = train_tokenizer(training, VOCABULARY)
    for name in ("private", "public"):
        write_tokenizer(out / name, tokenizer, PRIVATE.n_positions)
    documents = encode_documents(tokenizer, training)
    windows = consecutive_windows(encode_documents(tokenizer, held_out), PRIVATE.n_positions + 1)
    # Spread over all held-out files.
    chosen = np.linspace(0, len(windows) - 1, HELD_OUT_WINDOWS).astype(int)
    print(f"corpus: {sum(map(len, documents))} training tokens", flush=True)
    return Data(tokenizer, documents, windows[chosen])


def train(
    out: Path,
    data: Data,
    name: str,
    config: GPT2Config,
    schedule: Schedule,
    seed: int,
    loss: Loss,
    frozen: Any,
) -> None:
    """Train a model, with initial weights and batches from `seed`, and save it in `out/name`."""
    rng = np.random.default_rng(seed)
    fit(
        name,
        init_params(config, jax.random.key(seed)),
        loss,
        frozen,
        batches(data.tokenizer, data.training, config.n_positions + 1, schedule.batch, rng),
        data.held_out,
        schedule,
        lambda params: save_model(out / name, config, params),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the models")
    out = parser.parse_args().out
    # Two host devices train faster on two cores than one; XLA reads this when it starts.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    files = list_files()
    write_manifest(out / "corpus.json", files)
    snippets = cut_snippets(files, SNIPPETS, SNIPPET_CHARACTERS, seed=0)
    write_snippets(out / "held_out.jsonl", snippets)
    data = prepare(out, files)
    train(out, data, "private", PRIVATE, PRIVATE_SCHEDULE, 1, cross_entropy(PRIVATE), {})
    _, teacher = load_model(out / "private")
    distilled = distillation(PUBLIC, PRIVATE, kl=0.5, rejection=1.0, truth=0.05)
    train(out, data, "public", PUBLIC, PUBLIC_SCHEDULE, 2, distilled, teacher)
    print(f"done in {(time.monotonic() - start) / 60:.1f} min", flush=True)


if __name__ == "__main__":
    main()
