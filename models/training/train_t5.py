"""Train the shipped T5 pair: `python -m models.training.train_t5 --out models/shipped/t5`.

Three stages as in `models.training.train`: the tokenizer, the private model, and the public draft
model distilled from it, on the same files.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tokenizers import Tokenizer

from models.encoder_decoder import source_logits
from models.family import Params
from models.hf import load_model, save_model
from models.t5 import GATED_GELU, T5Config, init_params
from models.training.corpus import list_files, read_text
from models.training.optimise import Loss, Schedule, fit, rejected
from models.training.pairs import SOURCES, TARGET, Pairs, continued, pairs, stream_of
from models.training.unigram import sentinels_of, train_unigram, write_unigram

VOCABULARY, SENTINELS = 4096, 32
POSITIONS = 256
PRIVATE = T5Config(
    VOCABULARY, 128, 32, 384, 3, 4, 4, n_positions=POSITIONS, feed_forward_proj=GATED_GELU
)
PUBLIC = T5Config(
    VOCABULARY, 96, 32, 256, 1, 2, 3, n_positions=POSITIONS, feed_forward_proj=GATED_GELU
)
PRIVATE_SCHEDULE = Schedule(steps=5000, batch=16, learning_rate=4e-3, weight_decay=0.1)
PUBLIC_SCHEDULE = Schedule(steps=2000, batch=16, learning_rate=5e-3, weight_decay=0.1)
TOKENIZER_ONE_IN = 8  # files: Unigram takes many rounds over what it is trained on
HELD_OUT = 128  # pairs, for the losses printed on the way


@dataclass(frozen=True)
class Data:
    """The encoded corpus and its tokenizer."""

    tokenizer: Tokenizer
    training: list[np.ndarray]
    held_out: Pairs


def prepare(out: Path) -> Data:
    """Train the tokenizer, write it to both directories, and encode the corpus."""
    files = list_files()
    training = [read_text(file) for file in files if not file.held_out]
    held_out = [read_text(file) for file in files if file.held_out]
    tokenizer = train_unigram(training[::TOKENIZER_ONE_IN], VOCABULARY, SENTINELS)
    for name in ("private", "public"):
        write_unigram(out / name, tokenizer, POSITIONS)
    encoded = [
        [np.array(document.ids, np.int32) for document in tokenizer.encode_batch(texts)]
        for texts in (training, held_out)
    ]
    stream, length = stream_of(encoded[1], None), SOURCES[-1] + TARGET
    starts = np.linspace(0, len(stream) - length, HELD_OUT).astype(int)
    windows = stream[starts[:, None] + np.arange(length)]
    print(f"corpus: {sum(map(len, encoded[0]))} training tokens", flush=True)
    return Data(tokenizer, encoded[0], continued(windows, SOURCES[-1]))


def predicted(params: Params, config: T5Config, batch: Pairs) -> Array:
    """Return logits [pair, n, vocab] of a batch."""
    return jax.vmap(lambda s, t: source_logits(params, config, s, t))(batch.source, batch.begun)


def cross_entropy(config: T5Config) -> Loss:
    """Return a loss, the mean negative log likelihood of the target's tokens, in nats."""

    def loss(params: Params, frozen: Any, batch: Pairs) -> Array:
        logits = predicted(params, config, batch)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch.target))

    return loss


def distillation(config: T5Config, teacher: T5Config) -> Loss:
    """Return a loss, the weighted sum of `models.training.train` over the target's tokens."""

    def loss(params: Params, frozen: Any, batch: Pairs) -> Array:
        log_p = jax.nn.log_softmax(predicted(frozen, teacher, batch))
        log_q = jax.nn.log_softmax(predicted(params, config, batch))
        return rejected(log_p, log_q, batch.target, kl=0.5, rejection=1.0, truth=0.05)

    return loss


def train(
    out: Path,
    data: Data,
    name: str,
    config: T5Config,
    schedule: Schedule,
    seed: int,
    loss: Loss,
    frozen: Any,
) -> None:
    """Train a model, with initial weights and batches from `seed`, and save it in `out/name`."""
    fit(
        name,
        init_params(config, jax.random.key(seed)),
        loss,
        frozen,
        pairs(
            data.training,
            list(sentinels_of(data.tokenizer)),
            schedule.batch,
            np.random.default_rng(seed),
        ),
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
    data = prepare(out)
    train(out, data, "private", PRIVATE, PRIVATE_SCHEDULE, 1, cross_entropy(PRIVATE), {})
    _, teacher = load_model(out / "private", encoders=True)
    train(out, data, "public", PUBLIC, PUBLIC_SCHEDULE, 2, distillation(PUBLIC, PRIVATE), teacher)
    print(f"done in {(time.monotonic() - start) / 60:.1f} min", flush=True)


if __name__ == "__main__":
    main()
