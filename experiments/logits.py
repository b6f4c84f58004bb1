"""How far the secure forward's logits are from float32's.

A secure function runs held-out text through the private model and opens every row of logits to the
client, which no completion does. The reference needs the private weights; the command, which runs
both parties on one machine, computes it after the session. The client's worker never has them.

Criterion: no logit is off by more than `MAX_ERROR`, and the most likely token is the same at
`MIN_AGREEMENT` of the positions. Where it is not, two logits lie closer together than twice the
largest error (this follows, so it cannot fail); the report says how close.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.local import machine, run_study
from models.cache import empty_block, see
from models.generate import share_weights
from models.gpt2 import GPT2Config, embed_one_hot, head, logits, step
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from models.training.snippets import read_snippets
from protocols.soundness import require_sound, sound
from spu_llm.errors import InputError
from spu_llm.reveal import reveal
from spu_llm.secure import PartySession, SecureFunction
from spu_llm.values import CLIENT, Owner

PROGRAM = "logits"
WINDOW_TOKENS = 50
MAX_ERROR = 0.05
MIN_AGREEMENT = 0.99


# ---- the program of both workers


def build(config: GPT2Config) -> SecureFunction:
    """Secure forward of the client's tokens [n]: logits [n, vocab] to the client."""

    def forward(weights: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        n = tokens.shape[0]
        one_hot = jax.nn.one_hot(tokens, config.vocab_size, dtype=jnp.float32)
        x = embed_one_hot(weights, one_hot, jnp.arange(n))
        room = empty_block(config.n_layer, config.n_head, n, config.head_dim)
        rows, _, outside = step(weights, config, x, room, 0, see(0, n, n))
        opened = reveal(head(weights, rows), to=Owner.CLIENT, label="logits (study)")
        return opened, sound(outside)

    return SecureFunction(forward, (Owner.PROVIDER, Owner.CLIENT), "logits")


def run(session: PartySession, job: dict[str, Any], send: Callable[..., None]) -> dict[str, Any]:
    """Open the logits of every window to the client, who sends them on as events.

    Public settings: `windows` and `window_tokens`. The client's own: `window_ids`, token ids.
    An event "logits" carries `window` and `rows`: float32 [window_tokens, vocab] in base64.
    """
    config = GPT2Config(**job["model"])
    windows, length = int(job["request"]["windows"]), int(job["request"]["window_tokens"])
    if windows < 1 or not 1 <= length <= config.n_positions:
        raise InputError(f"{windows} windows of {length} tokens do not fit this model")
    forward = build(config)
    with session.meter.in_phase("offline"):
        params = load_model(Path(job["model_dir"]))[1] if session.rank != CLIENT else None
        weights = share_weights(session, config, params)
        send("stage", name="compiling")
        session.prepare(forward, weights, jax.ShapeDtypeStruct((length,), np.int32))
    for i in range(windows):
        send("stage", name=f"window {i + 1} of {windows}, {length} tokens")
        with session.meter.in_phase("online"):
            tokens = session.private(
                CLIENT, lambda i=i: job["window_ids"][i], (length,), np.int32  # type: ignore[misc]
            )
            opened, in_range = session.call(forward, weights, tokens)
            rows = session.get(opened)
        if rows is not None:
            require_sound(session.get(in_range))
            content = np.asarray(rows, "<f4").tobytes()
            send("logits", window=i, rows=base64.b64encode(content).decode("ascii"))
    return {"seconds": session.meter.seconds, "learned": session.ledger.learned()}


# ---- analysis


@dataclass(frozen=True)
class Flip:
    """A position whose most likely token differs, and how close float32 held it."""

    position: int  # among all positions
    reference_token: int
    secure_token: int
    margin: float  # float32 logit of the reference's token minus that of the other


@dataclass(frozen=True)
class Comparison:
    """Secure logits against float32's."""

    positions: int
    largest_error: float
    mean_error: float  # of the absolute differences
    agreement: float  # share of positions with the same most likely token
    flips: list[Flip]
    perplexity_float32: float  # per token
    perplexity_secure: float

    @property
    def failures(self) -> list[str]:
        """What the criterion finds wrong; empty when it holds."""
        found = []
        if not self.largest_error <= MAX_ERROR:
            found.append(f"largest error {self.largest_error:.4f} exceeds {MAX_ERROR}")
        if not self.agreement >= MIN_AGREEMENT:
            found.append(f"top-1 agreement {self.agreement:.2%} is below {MIN_AGREEMENT:.0%}")
        return found


def compare(tokens: np.ndarray, reference: np.ndarray, secure: np.ndarray) -> Comparison:
    """Compare logits [window, n, vocab] over the windows `tokens` [window, n]."""
    error = np.abs(np.asarray(secure, np.float64) - reference)
    vocab = reference.shape[-1]
    flat, other = reference.reshape(-1, vocab), secure.reshape(-1, vocab)
    wanted, found = flat.argmax(axis=-1), other.argmax(axis=-1)
    flips = [
        Flip(i, int(wanted[i]), int(found[i]), float(flat[i, wanted[i]] - flat[i, found[i]]))
        for i in np.flatnonzero(wanted != found).tolist()
    ]
    return Comparison(
        positions=len(flat),
        largest_error=float(error.max()),
        mean_error=float(error.mean()),
        agreement=1 - len(flips) / len(flat),
        flips=flips,
        perplexity_float32=perplexity(tokens, reference),
        perplexity_secure=perplexity(tokens, secure),
    )


def perplexity(tokens: np.ndarray, rows: np.ndarray) -> float:
    """Per token, of all tokens but each window's first; `rows` are logits [window, n, vocab]."""
    z = np.asarray(rows, np.float64)[:, :-1]
    z = z - z.max(axis=-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return math.exp(-np.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean())


# ---- the command


def windows_from(texts: Sequence[str], tokenizer: Tokenizer, count: int, length: int) -> np.ndarray:
    """Token ids int32 [count, length], cut from places spread evenly over the texts."""
    pieces = [
        ids[at : at + length]
        for ids in map(tokenizer.encode, texts)
        for at in range(0, len(ids) - length + 1, length)
    ]
    if len(pieces) < count:
        raise InputError(
            f"the held-out text has {len(pieces) * length} positions, fewer than --positions"
        )
    return np.array(pieces[:: len(pieces) // count][:count], np.int32)


def measure(model: Path, held_out: Path, positions: int) -> dict[str, Any]:
    """The comparison on about `positions` positions of the text in `held_out`, as JSON fields."""
    config = load_config(model)
    if positions < 2:
        raise InputError(f"--positions must be at least 2, found {positions}")
    length = min(WINDOW_TOKENS, config.n_positions, positions)
    count = math.ceil(positions / length)
    texts = [snippet.text for snippet in read_snippets(held_out)]
    tokens = windows_from(texts, Tokenizer.load(model), count, length)
    opened = np.zeros((count, length, config.vocab_size), np.float32)

    def keep(event: dict[str, Any]) -> None:
        if event["event"] == "logits":
            rows = np.frombuffer(base64.b64decode(event["rows"]), "<f4")
            opened[event["window"]] = rows.reshape(opened.shape[1:])

    outcome, agreed = run_study(
        PROGRAM,
        model,
        {"windows": count, "window_tokens": length},
        {"window_ids": tokens.tolist()},
        tokenizer=model,
        on_event=keep,
    )
    params = load_model(model)[1]
    forward = jax.jit(lambda p, ids: logits(p, config, ids))
    reference = np.stack([np.asarray(forward(params, ids)) for ids in tokens])
    result = compare(tokens, reference, opened)
    return {
        "passed": not result.failures,
        "failures": result.failures,
        **asdict(result),
        "seconds": outcome.result["seconds"],
        "learned": outcome.result["learned"],
        "machine": asdict(machine()),
        "config": {"model": model.name, "held_out": held_out.name, **agreed},
    }


def table(result: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    lines = [
        "| logits of the secure forward | |",
        "|---|---|",
        f"| positions | {result['positions']} |",
        f"| largest error | {result['largest_error']:.4f} (at most {MAX_ERROR}) |",
        f"| mean absolute error | {result['mean_error']:.5f} |",
        f"| top-1 agreement | {result['agreement']:.2%} (at least {MIN_AGREEMENT:.0%}) |",
        f"| perplexity, float32 | {result['perplexity_float32']:.3f} |",
        f"| perplexity, secure | {result['perplexity_secure']:.3f} |",
    ]
    for flip in result["flips"]:
        lines.append(f"| flip at position {flip['position']} | margin {flip['margin']:.5f} |")
    lines += ["", "criterion: " + ("; ".join(result["failures"]) or "holds")]
    return "\n".join(lines)
