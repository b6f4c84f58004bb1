"""Evaluation of the shipped models: `python -m models.training.evaluate`.

Measures on the shipped held-out snippets, in plaintext: perplexity, the acceptance rate alpha =
mean over positions of sum_x min(p(x), q(x)), and tokens per step of speculative decoding, once from
alpha under independence and once by drafting and verifying for real.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import Block, rows_after
from models.draft import Drafter
from models.family import ModelConfig, Params, family_of, logits
from models.hf import load_model
from models.tokenizer import Tokenizer
from models.training.snippets import SHIPPED, read_snippets
from protocols.verification.distribution import Sampling, draft, draw, residual
from spu_llm.core.machine import machine

DRAFT_LENGTHS = (3, 5, 7, 9)
TEMPERATURES = (1.0, 0.7, 0.0)  # 0 is greedy
PROMPTS = 24
PROMPT_TOKENS = 48
NEW_TOKENS = 64
SAMPLE_PROMPT = "def read_config(path):"
SAMPLE_TOKENS = 96


@dataclass(frozen=True)
class Model:
    """A model's configuration and parameters."""

    config: ModelConfig
    params: Params

    @staticmethod
    def load(directory: Path) -> Model:
        config, params = load_model(directory)
        return Model(config, jax.device_put(params))


@dataclass(frozen=True)
class Fit:
    """Quality of one model on held-out text."""

    perplexity: float  # per token
    bits_per_byte: float


@dataclass(frozen=True)
class Speed:
    """Tokens per step of simulated speculative decoding, the bonus token included."""

    temperature: float  # 0 is greedy
    draft_length: int
    tokens_per_step: float
    accepted: float  # share of the drafts that were accepted


@dataclass(frozen=True)
class Evaluation:
    """All figures that this program prints."""

    held_out_tokens: int
    private: Fit
    public: Fit
    acceptance: float  # alpha at temperature 1
    argmax_agreement: float
    expected_tokens_per_step: list[float]  # of DRAFT_LENGTHS, from alpha
    simulated: list[Speed]
    samples: dict[str, str]  # by temperature


def windows_of(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[np.ndarray]:
    """Encode the texts and cut each into pieces of `length` ids (the last may be shorter; pieces of
    one id are left out).
    """
    pieces = []
    for text in texts:
        ids = np.array(tokenizer.encode(text), np.int32)
        pieces += [ids[i : i + length] for i in range(0, len(ids), length)]
    return [piece for piece in pieces if len(piece) > 1]


def compare(
    tokenizer: Tokenizer, private: Model, public: Model, texts: Sequence[str]
) -> tuple[int, Fit, Fit, float, float]:
    """Compare both models on `texts`: return (predicted tokens, private fit, public fit, alpha,
    argmax agreement).
    """
    length = private.config.context

    @jax.jit
    def measure(p_params: Params, q_params: Params, tokens: jax.Array) -> jax.Array:
        """Return [4, position]: private and public loss (nats), sum of min(p, q), and 1 where both
        models have the same argmax.
        """
        log_p = jax.nn.log_softmax(logits(p_params, private.config, tokens))[:-1]
        log_q = jax.nn.log_softmax(logits(q_params, public.config, tokens))[:-1]
        target = tokens[1:, None]
        return jnp.stack(
            [
                -jnp.take_along_axis(log_p, target, axis=1)[:, 0],
                -jnp.take_along_axis(log_q, target, axis=1)[:, 0],
                jnp.sum(jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)), axis=1),
                (jnp.argmax(log_p, axis=1) == jnp.argmax(log_q, axis=1)).astype(jnp.float32),
            ]
        )

    sums, count, size = np.zeros(4), 0, 0
    for piece in windows_of(tokenizer, texts, length):
        padded = np.zeros(length, np.int32)
        padded[: len(piece)] = piece
        rows = np.asarray(measure(private.params, public.params, padded), np.float64)
        sums += rows[:, : len(piece) - 1].sum(axis=1)
        count += len(piece) - 1
        size += len(tokenizer.token_bytes(piece[1:].tolist()))

    def fit(nats: float) -> Fit:
        return Fit(math.exp(nats / count), nats / math.log(2) / size)

    return count, fit(sums[0]), fit(sums[1]), sums[2] / count, sums[3] / count


def expected_tokens(alpha: float, draft_length: int) -> float:
    """Return the expected tokens per step when every draft is accepted independently with
    probability `alpha`.
    """
    return (1 - alpha ** (draft_length + 1)) / (1 - alpha)


class Verifier:
    """The private model in plaintext, with a key/value cache."""

    def __init__(self, model: Model) -> None:
        c = model.config
        self._weights = family_of(c).fold(model.params, c)
        self._empty = c.empty_cache(c.context)
        self._step = jax.jit(partial(_forward, c))
        self.restart()

    def restart(self) -> None:
        self._shared, self.length = self._empty, 0

    def rows(self, tokens: Sequence[int]) -> np.ndarray:
        """Feed `tokens` from position `length` on; return logits [tokens, vocab] after each.

        The caller advances `length` by the number of tokens that it accepts.
        """
        logits, self._shared = self._step(
            self._weights, jnp.asarray(tokens, jnp.int32), self._shared, jnp.int32(self.length)
        )
        return np.asarray(logits)


def _forward(
    config: ModelConfig, weights: Params, tokens: jax.Array, cache: Block, length: jax.Array
) -> tuple[jax.Array, Block]:
    family, at = family_of(config), rows_after(length, tokens.shape[0], cache.positions)
    x = family.embed(weights, config, tokens, at.positions[0])
    rows, cache, _ = family.forward(weights, config, x, at, cache)
    return family.head(weights, rows), cache


def simulate(
    verifier: Verifier,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    draft_length: int,
    temperature: float,
    rng: np.random.Generator,
) -> Speed:
    """Measure speculative decoding: extend every prompt by NEW_TOKENS tokens or a few more."""
    sampling = Sampling(temperature)
    steps = emitted = accepted = 0

    def pick(logits: np.ndarray, position: int) -> tuple[int, np.ndarray]:
        return draft(sampling, logits, lambda: float(rng.random()))

    for prompt in prompts:
        verifier.restart()
        verifier.rows(prompt[:-1])
        verifier.length = len(prompt) - 1
        tokens = list(prompt)
        while len(tokens) < len(prompt) + NEW_TOKENS:
            drafts, q = drafter.propose(tokens, draft_length, pick)
            rows = verifier.rows([tokens[-1], *drafts])
            p = [sampling.distribution(row) for row in rows]
            k = 0
            while k < draft_length and rng.random() * q[k, drafts[k]] < p[k][drafts[k]]:
                k += 1
            rest = residual(p[k], q[k] if k < draft_length else None)
            tokens += [*drafts[:k], draw(rest, float(rng.random()))]
            verifier.length += k + 1
            steps, emitted, accepted = steps + 1, emitted + k + 1, accepted + k
    return Speed(temperature, draft_length, emitted / steps, accepted / (steps * draft_length))


def complete(
    verifier: Verifier, tokenizer: Tokenizer, prompt: str, temperature: float, seed: int
) -> str:
    """Complete `prompt` with the private model alone, one token at a time."""
    rng = np.random.default_rng(seed)
    verifier.restart()
    fresh, written = tokenizer.encode(prompt), []
    for _ in range(SAMPLE_TOKENS):
        row = verifier.rows(fresh)[-1]
        verifier.length += len(fresh)
        p = Sampling(temperature).distribution(row)
        token = draw(p, float(rng.random()))
        if token in tokenizer.eos_ids:
            break
        written.append(token)
        fresh = [token]
    return tokenizer.decode(written)


def evaluate(directory: Path) -> Evaluation:
    """Evaluate the models in `directory`, which has `private`, `public` and `held_out.jsonl`."""
    tokenizer = Tokenizer.load(directory / "private")
    private, public = Model.load(directory / "private"), Model.load(directory / "public")
    texts = [snippet.text for snippet in read_snippets(directory / "held_out.jsonl")]
    count, private_fit, public_fit, alpha, agreement = compare(tokenizer, private, public, texts)
    prompts = [tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]
    prompts = [ids for ids in prompts if len(ids) == PROMPT_TOKENS][:PROMPTS]
    verifier = Verifier(private)
    drafter = Drafter(public.config, public.params, public.config.context)
    rng = np.random.default_rng(0)
    return Evaluation(
        held_out_tokens=count,
        private=private_fit,
        public=public_fit,
        acceptance=alpha,
        argmax_agreement=agreement,
        expected_tokens_per_step=[expected_tokens(alpha, n) for n in DRAFT_LENGTHS],
        simulated=[
            simulate(verifier, drafter, prompts, n, t, rng)
            for t in TEMPERATURES
            for n in DRAFT_LENGTHS
        ],
        samples={
            str(t): complete(verifier, tokenizer, SAMPLE_PROMPT, t, seed=0) for t in TEMPERATURES
        },
    )


# ---- the report, of the figures as JSON has them


def agreement(figures: Mapping[str, Any]) -> str:
    """Describe in a line how often the two models agree."""
    return (
        f"{figures['held_out_tokens']:,} held-out tokens: acceptance rate, the sum of min(p, q), "
        f"{figures['acceptance']:.3f} at temperature 1; the same most likely token at "
        f"{figures['argmax_agreement']:.1%}"
    )


def quality_table(figures: Mapping[str, Any]) -> str:
    """Format how well each model predicts held-out text, as Markdown."""
    lines = ["| model | held-out perplexity per token | bits per byte |", "|---|---|---|"]
    for name in ("private", "public"):
        fit = figures[name]
        lines.append(f"| {name} | {fit['perplexity']:.2f} | {fit['bits_per_byte']:.3f} |")
    return "\n".join(lines)


def speed_table(figures: Mapping[str, Any]) -> str:
    """Format tokens per step by draft length, predicted (marked ᵖ) and simulated, as Markdown."""
    lines = [
        "| tokens per step | " + " | ".join(f"{n} drafts" for n in DRAFT_LENGTHS) + " |",
        "|---" * (len(DRAFT_LENGTHS) + 1) + "|",
        _row("from the acceptance rate, temperature 1 ᵖ", figures["expected_tokens_per_step"]),
    ]
    for t in TEMPERATURES:
        rates = [s["tokens_per_step"] for s in figures["simulated"] if s["temperature"] == t]
        lines.append(_row("simulated, " + (f"temperature {t}" if t else "greedy"), rates))
    return "\n".join(lines)


def _row(name: str, values: Sequence[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |"


def markdown(figures: Mapping[str, Any]) -> str:
    """Format the whole evaluation, with samples, as Markdown."""
    parts = [quality_table(figures), agreement(figures), speed_table(figures)]
    for heat, text in figures["samples"].items():
        parts += [f"Sample at temperature {heat}:", f"```python\n{SAMPLE_PROMPT}{text}\n```"]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=SHIPPED, help="directory of both models")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = asdict(evaluate(arguments.models))
    print(markdown(figures))
    if arguments.json:
        text = json.dumps({"machine": asdict(machine()), **figures}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
