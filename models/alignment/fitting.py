"""Distillation: the student learns the private model's answers (POST, section 4 and Appendix A).

Its loss is, on average over the places that count, with p the private model's distribution and q
the student's, both over the K most likely tokens of p,

    cross entropy    - sum_x p(x) log q(x), as published
    rejection        1 - sum_x min(p(x), q(x)): how often speculative sampling rejects a draft

where the second is left out as published. What is measured on held-out texts is the *acceptance*,
sum_x min(p(x), q(x)), which is a lower bound of a draft's chance to stay since p's further tokens
are not counted, and how often the most likely token of both is the same.

A large vocabulary's table and head are most of a small model's work. So a step of learning sums q
over the tokens that its batch has, and estimates the sum over the others from some that are drawn
evenly. What is measured is exact.

Everything lies in a folder after each measurement, so that a run which ends goes on where it was:
the student, the optimiser's state, and the curve.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from models.alignment.answers import Answer, digest_of
from models.alignment.student import Student
from models.cache import rows_after
from models.digests import params_digest
from models.family import ModelConfig, Params, family_of
from models.files import replace_file
from models.training.optimise import Schedule, optimiser
from spu_llm.core.errors import InputError

BUCKET = 64  # windows are padded to a multiple of it,
_PLACES = 512  # and the places of a batch
_SOME = 4096  # a step of learning computes with a multiple of so many tokens,
_OTHERS = 2048  # of which at least so many are none of its batch's
_LEARNT_TO_MEASURED = 4  # batches, at least
_BEST = "best.safetensors"
_BETTER = 0.001  # in acceptance, to count as an improvement


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of an alignment."""

    epochs: int
    batch: int  # tokens a step, about
    learning_rate: float
    rejection: float  # weight of that loss; 0 as published
    measured_every: int  # steps, at least: more where there is much to measure
    patience: int  # measurements without an improvement, after which it ends
    seed: int
    temperature: float = 1.0  # of the answers, which say it


@dataclass(frozen=True)
class Point:
    """A measurement on the held-out texts."""

    step: int
    tokens: int  # places of the private model's answers that the student has learnt from so far
    loss: float | None  # mean since the last measurement
    acceptance: float
    same: float  # share of places with the same most likely token
    seconds: float


@dataclass
class Run:
    """Curve and seconds of an alignment so far."""

    curve: list[Point] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> Point:
        return max(self.curve, key=lambda point: point.acceptance)

    def is_over(self, patience: int) -> bool:
        """Tell whether acceptance has stopped growing."""
        so_far, best = 0.0, 0
        for i, point in enumerate(self.curve):
            if point.acceptance > so_far + _BETTER:
                so_far, best = point.acceptance, i
        return len(self.curve) - 1 - best >= patience


# ---- batches


@dataclass(frozen=True)
class Batch:
    """Windows of answers, and the places that count, flat; both are padded, so that there are few
    shapes to compile.
    """

    sources: np.ndarray  # int32 [window, m]: what an encoder reads; m is 0 without one
    tokens: np.ndarray  # int32 [window, n]: after that
    places: np.ndarray  # int32 [m]: of tokens, flat, after which the private model was asked
    ids: np.ndarray  # int32 [m, K]: of what it said
    log_p: np.ndarray  # float32 [m, K]
    counts: np.ndarray  # float32 [m]: 0 for what only fills up

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.sources, self.tokens, self.places, self.ids, self.log_p, self.counts


@dataclass(frozen=True)
class Part:
    """A part of the vocabulary that a step of learning computes with: all tokens that its batch
    has, and some of the others, each of which stands for as many of them.
    """

    tokens: np.ndarray  # int32 [c]
    log_weights: np.ndarray  # float32 [c]: logarithm of how many tokens each stands for

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.log_weights


def narrowed(batch: Batch, vocabulary: int, draw: np.random.Generator) -> tuple[Batch, Part]:
    """Return a batch whose tokens are numbers of places in a part of the vocabulary, and the part,
    of a multiple of `_SOME` tokens, or all.
    """
    named = batch.sources, batch.tokens, batch.ids
    known = np.unique(np.concatenate([part.reshape(-1) for part in named]))
    count = min(vocabulary, -(-(len(known) + _OTHERS) // _SOME) * _SOME)
    others = np.setdiff1d(np.arange(vocabulary), known, assume_unique=True)
    drawn = draw.choice(others, count - len(known), replace=False)
    log_weights = np.zeros(count, np.float32)
    if len(drawn):
        log_weights[len(known) :] = np.log(len(others) / len(drawn))
    sources, tokens, ids = (np.searchsorted(known, part).astype(np.int32) for part in named)
    part = Part(np.concatenate([known, drawn]).astype(np.int32), log_weights)
    return replace(batch, sources=sources, tokens=tokens, ids=ids), part


def padded(answers: Sequence[Answer], length: int, windows: int) -> Batch:
    """Return a batch of `windows` windows of `length` tokens, of as many answers at most, whose
    sources have one length.
    """
    k, source = answers[0].ids.shape[1], answers[0].source
    total = sum(len(one.ids) for one in answers)
    m = min(windows * length, -(-total // _PLACES) * _PLACES)
    batch = Batch(
        np.zeros((windows, source), np.int32),
        np.zeros((windows, length), np.int32),
        np.zeros(m, np.int32),
        np.zeros((m, k), np.int32),
        np.zeros((m, k), np.float32),
        np.zeros(m, np.float32),
    )
    start = 0
    for i, answer in enumerate(answers):
        some = slice(start, start := start + len(answer.ids))
        batch.sources[i] = answer.tokens[:source]
        batch.tokens[i, : len(answer.written) - 1] = answer.written[:-1]
        batch.places[some] = i * length + np.flatnonzero(answer.counts[source:]) - 1
        batch.ids[some], batch.log_p[some], batch.counts[some] = answer.ids, answer.log_p, 1.0
    return batch


def groups(
    answers: Sequence[Answer], size: int, order: np.random.Generator
) -> list[tuple[int, list[Answer]]]:
    """Return the answers of batches of about `size` tokens, each with its windows' length: all
    answers once, shuffled, those of similar lengths, and of sources of one length, together.
    """
    by_shape: dict[tuple[int, int], list[Answer]] = {}
    chosen = []
    for i in order.permutation(len(answers)):
        shape = _length(answers[i]), answers[i].source
        waiting = by_shape.setdefault(shape, [])
        waiting.append(answers[i])
        if len(waiting) == _windows(size, waiting[0]):
            chosen.append((shape[0], by_shape.pop(shape)))
    chosen += [(length, some) for (length, _), some in by_shape.items()]
    return [chosen[i] for i in order.permutation(len(chosen))]


def _length(answer: Answer) -> int:
    return -(-(len(answer.written) - 1) // BUCKET) * BUCKET


def _windows(size: int, answer: Answer) -> int:
    """Return how many answers of this one's shape make a batch of about `size` tokens."""
    return max(1, size // (_length(answer) + answer.source))


# ---- the loss


def _hidden(
    params: Params, config: ModelConfig, sources: jax.Array, tokens: jax.Array
) -> tuple[Params, jax.Array]:
    """Return folded weights, and rows [window, n, d] before the head, of the tokens [window, n]
    after sources [window, m].
    """
    family, n = family_of(config), tokens.shape[1]
    weights = family.fold(params, config)

    def of_window(source: jax.Array, window: jax.Array) -> jax.Array:
        both = jnp.concatenate([source, window])
        x = family.embed(weights, config, both, jnp.arange(both.shape[0]))
        rows, _, _ = family.forward(weights, config, x, rows_after(0, n, n), config.empty_cache(n))
        return rows

    return weights, jax.vmap(of_window)(sources, tokens)


def _logits(
    params: Params, config: ModelConfig, settings: Settings, batch: Sequence[Any]
) -> jax.Array:
    """Return the student's logits [m, vocab] at the places that count, for its distribution at the
    temperature of the answers.
    """
    sources, tokens, places, *_ = batch
    weights, rows = _hidden(params, config, sources, tokens)
    counted = rows.reshape(-1, rows.shape[-1])[places]
    return family_of(config).head(weights, counted) / settings.temperature


def _log_q(logits: jax.Array, ids: jax.Array, log_weights: jax.Array | float = 0.0) -> jax.Array:
    """Return the student's log-probabilities [m, K] of the private model's tokens."""
    mass = jax.nn.logsumexp(logits + log_weights, axis=-1, keepdims=True)
    return jnp.take_along_axis(logits, ids, axis=-1) - mass


def _of_part(params: Params, config: ModelConfig, tokens: jax.Array) -> tuple[Params, ModelConfig]:
    """Return the model of some tokens alone."""
    family, count = family_of(config), len(tokens)

    def shapes(size: int) -> Params:
        of_size = replace(config, vocab_size=size)
        return jax.eval_shape(lambda: family.init(of_size, jax.random.key(0)))

    def cut(whole: Any, part: Any, leaf: Any) -> Any:
        if whole.shape == part.shape:
            return leaf
        axis = [n != m for n, m in zip(whole.shape, part.shape, strict=True)].index(True)
        return jnp.take(leaf, tokens, axis=axis)

    size = config.vocab_size
    of_tokens = jax.tree.map(cut, shapes(size), shapes(size + 1), params)
    return of_tokens, replace(config, vocab_size=count)


def _accepted(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


def loss_of(config: ModelConfig, settings: Settings) -> Callable[..., jax.Array]:
    """Return loss(params, batch, part), a scalar, for a narrowed batch."""

    def loss(params: Params, batch: Sequence[Any], part: Sequence[Any]) -> jax.Array:
        tokens, log_weights = part
        *_, ids, log_p, counts = batch
        logits = _logits(*_of_part(params, config, tokens), settings, batch)
        log_q = _log_q(logits, ids, log_weights)
        of_place = -jnp.sum(jnp.exp(log_p) * log_q, axis=-1)
        if settings.rejection:
            of_place += settings.rejection * (1.0 - _accepted(log_p, log_q))
        return jnp.sum(of_place * counts) / jnp.maximum(jnp.sum(counts), 1.0)

    return loss


def measure_of(config: ModelConfig, settings: Settings) -> Callable[..., jax.Array]:
    """Return measure(params, batch): sums over places of the acceptance and of the same most likely
    token, and the number of places.
    """

    def measure(params: Params, batch: Sequence[Any]) -> jax.Array:
        *_, ids, log_p, counts = batch
        logits = _logits(params, config, settings, batch)
        accepted = jnp.sum(_accepted(log_p, _log_q(logits, ids)) * counts)
        same = jnp.sum((jnp.argmax(logits, axis=-1) == ids[..., 0]) * counts)
        return jnp.stack([accepted, same, jnp.sum(counts)])

    return measure


# ---- the loop


def fit(
    student: Student,
    learnt: Sequence[Answer],
    held_out: Sequence[Answer],
    settings: Settings,
    folder: Path,
    say: Callable[[str], None],
) -> tuple[Params, Run]:
    """Train a student, or go on where a run with the same settings in `folder` was; return the
    parameters with the best acceptance, and the curve. InputError when the folder has a run with
    other settings.
    """
    config = student.config
    # As many in any order.
    per_epoch = len(groups(learnt, settings.batch, np.random.default_rng(0)))
    steps = settings.epochs * per_epoch
    schedule = Schedule(
        steps=max(steps, 2),
        batch=settings.batch,
        learning_rate=settings.learning_rate,
        warmup=max(1, min(100, steps // 10)),
        weight_decay=0.01,
    )
    transform = optimiser(schedule)
    fixed = {name: value for name, value in student.params.items() if name in student.fixed}
    moving = {name: value for name, value in student.params.items() if name not in fixed}
    loss, measure = loss_of(config, settings), measure_of(config, settings)

    def update(
        moving: Any, state: Any, fixed: Any, batch: Any, part: Any
    ) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(lambda m: loss({**m, **fixed}, batch, part))(moving)
        change, state = transform.update(gradient, state, moving)
        return optax.apply_updates(moving, change), state, value

    step = jax.jit(update, donate_argnums=(0, 1))
    measured = jax.jit(lambda moving, fixed, batch: measure({**moving, **fixed}, batch))
    moving, fixed = jax.device_put(moving), jax.device_put(fixed)
    measured_batches = [
        padded(some, length, _windows(settings.batch, some[0]))
        for length, some in groups(held_out, settings.batch, np.random.default_rng(0))
    ]
    measured_every = max(settings.measured_every, _LEARNT_TO_MEASURED * len(measured_batches))
    saved = Saved(folder, settings, student, digest_of(learnt))
    (moving, state), run, done = saved.begun((moving, jax.device_put(transform.init(moving))))

    def measurement(loss: float | None, tokens: int, at: int) -> Point:
        sums = np.zeros(3)
        for batch in measured_batches:
            sums += np.asarray(measured(moving, fixed, batch.arrays()))
        accepted, same, places = sums
        return Point(at, tokens, loss, accepted / places, same / places, run.seconds)

    def measured_and_saved(loss: float | None, tokens: int, at: int) -> None:
        run.curve.append(measurement(loss, tokens, at))
        saved.save((moving, state), run, at, run.best is run.curve[-1])

    if not run.curve:
        say("measuring the student as it is")
        measured_and_saved(None, 0, 0)
    tokens, losses = run.curve[-1].tokens, []
    for number, batch in _from(learnt, settings, done):
        if run.is_over(settings.patience):
            break
        began = time.monotonic()
        draw = np.random.default_rng([settings.seed, number, 1])
        of_part, part = narrowed(batch, config.vocab_size, draw)
        moving, state, value = step(moving, state, fixed, of_part.arrays(), part.arrays())
        losses.append(float(value))
        tokens += int(batch.counts.sum())
        run.seconds += time.monotonic() - began
        left = (steps - number) * run.seconds / number
        say(
            f"step {number} of {steps}, loss {losses[-1]:.3f}, acceptance "
            f"{run.curve[-1].acceptance:.3f}, about {left / 60:.0f} min to go"
        )
        if number % measured_every == 0 or number == steps:
            measured_and_saved(float(np.mean(losses)), tokens, number)
            losses = []
    return {**saved.best(moving), **jax.device_get(fixed)}, run


def _from(learnt: Sequence[Answer], settings: Settings, done: int) -> Iterator[tuple[int, Batch]]:
    """Yield the batches of all epochs after the first `done` ones, with their numbers from 1."""
    number = 0
    for epoch in range(settings.epochs):
        order = np.random.default_rng([settings.seed, epoch])
        for length, some in groups(learnt, settings.batch, order):
            number += 1
            if number > done:
                yield number, padded(some, length, _windows(settings.batch, some[0]))


# ---- what is kept of a run


class Saved:
    """A run's state in a folder: written whole after each measurement."""

    def __init__(self, folder: Path, settings: Settings, student: Student, answers: str) -> None:
        """Take the student that the run began with, and the digest of what it learns."""
        self._folder = folder
        self._said = {
            **asdict(settings),
            "student": params_digest(student.params),
            "fixed": sorted(student.fixed),
            "answers": answers,
        }

    def begun(self, start: Any) -> tuple[Any, Run, int]:
        """Return parameters and optimiser state, the curve, and the steps done."""
        path = self._folder / "run.json"
        if not path.exists():
            return start, Run(), 0
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            said, state, done = kept["settings"], kept["state"], kept["done"]
            run = Run([Point(**point) for point in kept["curve"]], kept["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path} cannot be read; remove {self._folder}") from None
        if differ := [name for name, value in self._said.items() if said.get(name) != value]:
            raise InputError(
                f"{self._folder} holds a run with another {', '.join(differ)}; give the same "
                "options to go on with it, or another --out"
            )
        return _read(self._folder / state, start), run, done

    def best(self, like: Any) -> Any:
        """Return the parameters with the best acceptance so far."""
        return _read(self._folder / _BEST, like)

    def save(self, state: Any, run: Run, done: int, is_best: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if is_best:
            _write(self._folder / _BEST, state[0])
        name = f"state_{done}.safetensors"
        _write(self._folder / name, state)
        kept = {
            "settings": self._said,
            "curve": [asdict(point) for point in run.curve],
            "seconds": run.seconds,
            "done": done,
            "state": name,
        }
        replace_file(self._folder / "run.json", json.dumps(kept).encode())
        for old in self._folder.glob("state_*.safetensors"):
            if old.name != name:
                old.unlink()


def _write(path: Path, tree: Any) -> None:
    leaves = jax.tree.leaves(jax.device_get(tree))
    replace_file(path, save({str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}))


def _read(path: Path, like: Any) -> Any:
    """Return a tree of the shape of `like`. InputError when the file holds another one."""
    leaves, shape = jax.tree.flatten(like)
    try:
        kept: Mapping[str, np.ndarray] = load_file(path)
        read = [kept[str(i)] for i in range(len(leaves))]
        if any(one.shape != np.shape(leaf) for one, leaf in zip(read, leaves, strict=True)):
            raise ValueError
    except (OSError, KeyError, ValueError, SafetensorError):
        raise InputError(f"{path} cannot be read; remove {path.parent}") from None
    return jax.tree.unflatten(shape, read)
