"""How far the secure forward's logits are from float32's.

Two comparisons on held-out text, with one criterion: no logit is off by more than `MAX_ERROR`, and
the most likely token is the same at `MIN_AGREEMENT` of the positions. Where it is not, two logits
lie closer together than twice the largest error (this follows); the report says how close.

on shares   A secure function opens every row of logits to the client, which no completion does. The
            reference needs the private weights; the command, which runs both parties on one
            machine, computes it after the session. The client's worker never has them.
by pieces   The same forward in plaintext with every approximation in its form on shares: GELU's
            table, the lines of norms and of the softmax's sum, coarse maxima, exponentials that end
            at -16, narrow words in whole units. It costs little, so it is done at thousands of
            positions. What it leaves out is the rounding of shares, and that a comparison of narrow
            words may take a piece up to one unit beyond its end, which the fits allow for.
"""

from __future__ import annotations

import argparse
import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import commands, report
from experiments.common.two_parties import run_study
from models.cache import rows_after
from models.family import ModelConfig, Outside, Params, family_of, logits
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from models.training.snippets import SHIPPED, read_snippets
from protocols.functions.in_range import when_in_range
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core._jax import as_function, expanded, flat_jaxpr
from spu_llm.core.approx import form_on_shares
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, Owner
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.completion import held_weights
from spu_llm.systems.program import Job, Program, Send

WINDOW_TOKENS = 50
PIECES_POSITIONS = 5000
MAX_ERROR = 0.05
MIN_AGREEMENT = 0.99
QUANTILES = (0.5, 0.9, 0.99, 0.999)


# ---- the program of both workers


def forward(config: ModelConfig, weights: Any, tokens: jax.Array) -> tuple[jax.Array, Outside]:
    """Return logits [n, vocab] after each of the client's tokens [n], and what left its range."""
    n, family = tokens.shape[0], family_of(config)
    one_hot = jax.nn.one_hot(tokens, config.vocab_size, dtype=jnp.float32)
    x = family.embed(weights, config, one_hot, jnp.arange(n))
    rows, _, outside = family.forward(
        weights, config, x, rows_after(0, n, n), config.empty_cache(n)
    )
    return family.head(weights, rows), outside


def build(config: ModelConfig) -> SecureFunction:
    """Return the secure forward of the client's tokens [n]: logits [n, vocab] to the client."""

    def opened(weights: Any, tokens: jax.Array) -> jax.Array:
        rows, outside = forward(config, weights, tokens)
        rows = when_in_range(outside, rows)
        return reveal(rows, to=Owner.CLIENT, label="logits (study)")

    return SecureFunction(opened, (Owner.PROVIDER, Owner.CLIENT), "logits")


@dataclass(frozen=True)
class Windows:
    windows: int
    window_tokens: int

    def check(self, config: ModelConfig) -> None:
        """Raise InputError when the windows do not fit the model."""
        if self.windows < 1 or not 1 <= self.window_tokens <= config.context:
            raise InputError(
                f"{self.windows} windows of {self.window_tokens} tokens do not fit this model"
            )


@dataclass(frozen=True)
class LogitsInputs:
    window_ids: list[list[int]]


PROGRAM = Program("logits", __name__, Windows, LogitsInputs, check=Windows.check)


def run(session: PartySession, job: Job[Windows, LogitsInputs], send: Send) -> dict[str, Any]:
    """Open the logits of every window to the client, who sends them on as events.

    An event "logits" carries `window` and `rows`: float32 [window_tokens, vocab] in base64.
    """
    config, windows, length = job.model, job.request.windows, job.request.window_tokens
    secure = build(config)
    with session.meter.in_phase("offline"):
        weights = held_weights(session, config, job)
        send("stage", name="compiling")
        session.prepare(secure, weights, jax.ShapeDtypeStruct((length,), np.int32))
    for i in range(windows):
        send("stage", name=f"window {i + 1} of {windows}, {length} tokens")
        with session.meter.in_phase("online"):
            tokens = session.private(
                CLIENT,
                lambda i=i: job.client.window_ids[i],  # type: ignore[misc]
                (length,),
                np.int32,
            )
            rows = session.get(session.call(secure, weights, tokens))
        if rows is not None:
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
class LogitRows:
    """Secure logits of a text [n] against float32's, position by position, float64 or int64 [n];
    the last two are log-probabilities of the token that comes next, [n - 1].
    """

    largest: np.ndarray  # absolute error
    mean: np.ndarray
    reference_token: np.ndarray  # the most likely one
    secure_token: np.ndarray
    margin: np.ndarray  # as in `Flip`
    log_p_reference: np.ndarray
    log_p_secure: np.ndarray

    @staticmethod
    def of(tokens: np.ndarray, reference: np.ndarray, secure: np.ndarray) -> LogitRows:
        """Compare logits [n, vocab] of the text `tokens` [n]."""
        error = np.abs(np.asarray(secure, np.float64) - reference)
        wanted, secure_best = reference.argmax(axis=-1), secure.argmax(axis=-1)
        at = np.arange(len(tokens))
        margin = reference[at, wanted].astype(np.float64) - reference[at, secure_best]
        return LogitRows(
            error.max(axis=-1),
            error.mean(axis=-1),
            wanted,
            secure_best,
            margin,
            _log_p(tokens, reference),
            _log_p(tokens, secure),
        )


def _log_p(tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the log-probability of every token [n] but the first, by the logits [n, vocab] before
    it.
    """
    z = np.asarray(rows, np.float64)[:-1]
    z = z - z.max(axis=-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return np.asarray(log_p[np.arange(len(z)), tokens[1:]])


@dataclass(frozen=True)
class Comparison:
    """Secure logits against float32's."""

    positions: int
    largest_error: float
    mean_error: float  # of the absolute differences
    quantiles: dict[str, float]  # of the largest error of each position
    agreement: float  # share of positions with the same most likely token
    flips: list[Flip]
    perplexity_float32: float  # per token
    perplexity_secure: float

    @staticmethod
    def of(texts: Sequence[LogitRows]) -> Comparison:
        """Sum up texts of one vocabulary."""
        names = [field.name for field in fields(LogitRows)]
        rows = LogitRows(*(np.concatenate([getattr(text, n) for text in texts]) for n in names))
        flips = [
            Flip(i, int(rows.reference_token[i]), int(rows.secure_token[i]), float(rows.margin[i]))
            for i in np.flatnonzero(rows.reference_token != rows.secure_token).tolist()
        ]
        return Comparison(
            positions=len(rows.largest),
            largest_error=float(rows.largest.max()),
            mean_error=float(rows.mean.mean()),
            quantiles={f"{q:g}": float(np.quantile(rows.largest, q)) for q in QUANTILES},
            agreement=1 - len(flips) / len(rows.largest),
            flips=flips,
            perplexity_float32=math.exp(-rows.log_p_reference.mean()),
            perplexity_secure=math.exp(-rows.log_p_secure.mean()),
        )

    @property
    def failures(self) -> list[str]:
        """Return what the criterion finds wrong; empty when it holds."""
        reasons = []
        if not self.largest_error <= MAX_ERROR:
            reasons.append(f"largest error {self.largest_error:.4f} exceeds {MAX_ERROR}")
        if not self.agreement >= MIN_AGREEMENT:
            reasons.append(f"top-1 agreement {self.agreement:.2%} is below {MIN_AGREEMENT:.0%}")
        return reasons


def compare(tokens: np.ndarray, reference: np.ndarray, secure: np.ndarray) -> Comparison:
    """Compare logits [window, n, vocab] over the windows `tokens` [window, n]."""
    return Comparison.of([LogitRows.of(*w) for w in zip(tokens, reference, secure, strict=True)])


# ---- the same pieces in plaintext


def compiled_in_pieces(
    function: Callable[..., list[jax.Array]], length: int, others: Sequence[Any]
) -> Callable[..., Any]:
    """Compile a function of token ids [length] and of arrays like `others`, with everything that it
    approximates in its form on shares.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in others]
    closed = flat_jaxpr(function, [jax.ShapeDtypeStruct((length,), np.int32), *shapes])
    while (spelt_out := expanded(closed, form_on_shares)) is not closed:
        closed = spelt_out
    return jax.jit(as_function(closed))


def in_pieces(
    config: ModelConfig, params: Params, length: int
) -> Callable[[np.ndarray], tuple[np.ndarray, int]]:
    """Return a function of the tokens [length] of a window: logits [length, vocab] by the pieces
    that two parties compute with, and what says that an activation was out of range (0: none was).
    """
    leaves, tree = jax.tree.flatten(family_of(config).fold(params, config))

    def flat(tokens: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        rows, outside = forward(config, jax.tree.unflatten(tree, weights), tokens)
        return [rows, sum(outside.values(), jnp.int32(0))]

    compiled = compiled_in_pieces(flat, length, leaves)

    def run(tokens: np.ndarray) -> tuple[np.ndarray, int]:
        rows, outside = compiled(tokens, *leaves)
        return np.asarray(rows), int(outside)

    return run


def compare_pieces(model: Path, held_out: Path, positions: int) -> Comparison:
    """Compare logits by pieces with float32's at about `positions` positions of the text in
    `held_out`. InputError where an activation leaves the range that the pieces hold for.
    """
    config, params = load_model(model)
    tokens = _windows(model, held_out, positions)
    by_pieces = in_pieces(config, params, tokens.shape[1])
    rows = np.zeros((*tokens.shape, config.vocab_size), np.float32)
    for i, window in enumerate(tokens):
        rows[i], outside = by_pieces(window)
        if outside:
            raise InputError(f"window {i} of {held_out} leaves the ranges of the pieces")
    return compare(tokens, _float32(model, tokens), rows)


def _float32(model: Path, tokens: np.ndarray) -> np.ndarray:
    """Return the reference logits [window, n, vocab]."""
    config, params = load_model(model)
    forward = jax.jit(lambda p, ids: logits(p, config, ids))
    params = jax.device_put(params)
    return np.stack([np.asarray(forward(params, ids)) for ids in tokens])


# ---- the command


def _windows(model: Path, held_out: Path, positions: int) -> np.ndarray:
    """Return windows of about so many positions of the text in `held_out`."""
    length = min(WINDOW_TOKENS, load_config(model).context, positions)
    texts = [snippet.text for snippet in read_snippets(held_out)]
    return windows_from(texts, Tokenizer.load(model), math.ceil(positions / length), length)


def windows_from(texts: Sequence[str], tokenizer: Tokenizer, count: int, length: int) -> np.ndarray:
    """Return token ids int32 [count, length], cut from places spread evenly over the texts."""
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


def measure(
    model: Path, held_out: Path, positions: int, pieces_positions: int = PIECES_POSITIONS
) -> dict[str, Any]:
    """Make both comparisons on text in `held_out`, each on about as many positions as asked, as
    JSON fields; the comparison by pieces, which takes seconds, comes first.
    """
    config = load_config(model)
    commands.check_range("--positions", positions, 2)
    commands.check_range("--pieces-positions", pieces_positions, 2)
    tokens = _windows(model, held_out, positions)
    pieces = compare_pieces(model, held_out, pieces_positions)
    count, length = tokens.shape
    opened = np.zeros((count, length, config.vocab_size), np.float32)

    def keep(event: dict[str, Any]) -> None:
        if event["event"] == "logits":
            rows = np.frombuffer(base64.b64decode(event["rows"]), "<f4")
            opened[event["window"]] = rows.reshape(opened.shape[1:])

    outcome, agreed = run_study(
        PROGRAM,
        model,
        Windows(count, length),
        LogitsInputs(tokens.tolist()),
        tokenizer=model,
        on_event=keep,
    )
    result = compare(tokens, _float32(model, tokens), opened)
    failures = result.failures + [f"by pieces: {text}" for text in pieces.failures]
    return {
        "passed": not failures,
        "failures": failures,
        **asdict(result),
        "pieces": asdict(pieces),
        "seconds": outcome.result["seconds"],
        "learned": outcome.result["learned"],
        "machine": asdict(machine()),
        "config": {"model": model.name, "held_out": held_out.name, **agreed},
    }


def figures_of(
    compared: Mapping[str, Any], digits: int, bound: str = ""
) -> list[report.Column[Mapping[str, Any]]]:
    """Return the rows that tables of comparisons share, for the quantiles that `compared` has;
    `digits`: of the largest error, which the mean and margins have one more of.
    """
    mean = digits + 1

    def quantile(q: str) -> report.Column[Mapping[str, Any]]:
        name = f"largest of a position, quantile {q}"
        return report.Column(name, lambda r: f"{r['quantiles'][q]:.{digits}f}")

    def largest_margin(r: Mapping[str, Any]) -> str:
        margins = [flip["margin"] for flip in r["flips"]]
        return f"{max(margins):.{mean}f} of {len(margins)}" if margins else "none"

    return [
        report.Column("positions", lambda r: f"{r['positions']:,}"),
        report.Column(f"largest error{bound}", lambda r: f"{r['largest_error']:.{digits}f}"),
        *map(quantile, compared["quantiles"]),
        report.Column("mean absolute error", lambda r: f"{r['mean_error']:.{mean}f}"),
        report.Column(
            f"top-1 agreement (at least {MIN_AGREEMENT:.0%})", lambda r: f"{r['agreement']:.2%}"
        ),
        report.Column("largest margin of a flip", largest_margin),
        report.Column("perplexity, float32", lambda r: f"{r['perplexity_float32']:.3f}"),
    ]


def table(result: dict[str, Any]) -> str:
    """Return both comparisons as Markdown."""
    figures = [
        *figures_of(result, 4, f" (at most {MAX_ERROR})"),
        report.Column("perplexity, these logits", lambda r: f"{r['perplexity_secure']:.3f}"),
    ]
    both = {"on shares": result, "by pieces, in plaintext": result["pieces"]}
    lines = report.figures_table("logits against float32's", figures, both)
    verdict = "criterion: " + ("; ".join(result["failures"]) or "holds")
    return "\n".join([*lines, "", verdict])


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_number(parser, "--positions", 200, "held-out positions on shares")
    commands.add_number(
        parser, "--pieces-positions", PIECES_POSITIONS, "in plaintext by the same pieces"
    )
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    result = measure(
        commands.private_model(options),
        SHIPPED / "held_out.jsonl",
        options.positions,
        options.pieces_positions,
    )
    commands.conclude(options, result, table(result))
