"""How faithful a chat model on shares is to float32: logits, most likely tokens, perplexity, and
whether texts stay in the ranges that were chosen on others.

All texts begin with the same public tokens, the head of the model's template, which the provider
runs in the clear; positions are those that come after.

by pieces   Whole chats in plaintext, with every function in its form on shares
            (`experiments.claims.logits`).
on shares   The beginnings of some of them between two processes, by the programs of a completion: a
            prefill of one token and a step of the others, whose logits are opened to the client,
            as in no completion.
questions   Answers of float32, chosen greedily, by pieces: where at every place of an answer the
            most likely token is the same, so is the answer that pieces give. Where one differs, the
            first such place is listed with the margin that float32 had.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from experiments.claims.chat_texts import ChatText, Forward, chat_texts
from experiments.claims.logits import Comparison, Rows
from experiments.common import commands, report
from experiments.common.two_parties import run_study
from models.draft import Drafter
from models.family import ModelConfig
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from spu_llm.app.progress import Progress
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, Owner
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.completion import held_weights
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.secure_model import Layout, share_text
from spu_llm.systems.program import Job, Program, Send

WINDOW_TOKENS = 25
MIN_AGREEMENT = 0.99
MAX_PERPLEXITY = 0.001  # relative
_NOTHING = JudgeInputs(None, None)


# ---- the program of both workers


@dataclass(frozen=True)
class OpenLogits:
    """Stands for a judge: the client learns all logits [lane, n, vocab]."""

    name: str = "logits"
    hide_progress: bool = False

    def client_shapes(self, drafts: int, vocab: int) -> None:
        return None

    def provider_shapes(self, drafts: int, vocab: int) -> None:
        return None

    def verify(self, logits: Array, client: None, provider: None) -> tuple[Array, None]:
        return reveal(logits, to=Owner.CLIENT, label="logits (study)"), None


@dataclass(frozen=True)
class Windows:
    """Texts of so many tokens each, after the public ones."""

    windows: int
    window_tokens: int
    public_prefix: tuple[int, ...]

    def check(self, config: ModelConfig) -> None:
        """InputError when they do not fit the model."""
        config.check_public(len(self.public_prefix), "give chats whose beginning is public")
        room = config.context - len(self.public_prefix)
        if self.windows < 1 or not 2 <= self.window_tokens <= room:
            raise InputError(
                f"{self.windows} windows of {self.window_tokens} tokens do not fit this model"
            )

    def layout(self, config: ModelConfig) -> Layout:
        public = len(self.public_prefix)
        return Layout(
            config, (1,), (self.window_tokens,), live_rows=self.window_tokens, prefix=public,
            public=public,
        )  # fmt: skip


@dataclass(frozen=True)
class ClientInputs:
    window_ids: list[list[int]]


PROGRAM = Program("fidelity", __name__, Windows, ClientInputs, check=Windows.check)


def run(session: PartySession, job: Job[Windows, ClientInputs], send: Send) -> dict[str, Any]:
    """Open the logits of every window to the client, who sends them on as events.

    An event "logits" carries `window`, and `rows`: float32 [n, vocab] in base64, in order.
    """
    asked = job.request
    judge: Any = OpenLogits()
    layout, rest = asked.layout(job.model), asked.window_tokens - 1

    def put_in(i: int, start: int, count: int) -> Any:
        return session.private(
            CLIENT, lambda: [job.client.window_ids[i][start : start + count]], (1, count), np.int32
        )

    def opened(i: int, logits: Any) -> None:
        if (rows := session.get(logits)) is not None:
            content = np.asarray(rows[0], "<f4").tobytes()
            send("logits", window=i, rows=base64.b64encode(content).decode("ascii"))

    with session.meter.in_phase("offline"):
        weights = held_weights(session, job.model, job)
        text = share_text(session, layout, asked.public_prefix)
        send("stage", name="compiling")
        Decoder(session, layout, judge, weights, text).prepare([rest])
    for i in range(asked.windows):
        send("stage", name=f"window {i + 1} of {asked.windows}, {asked.window_tokens} tokens")
        with session.meter.in_phase("online"):
            decoder = Decoder(session, layout, judge, weights, text)
            opened(i, decoder.prefill(put_in(i, 0, 1), _NOTHING).outcome)
            opened(i, decoder.step(put_in(i, 1, rest), _NOTHING, None).outcome)
    return {"seconds": session.meter.seconds, "learned": session.ledger.learned()}


# ---- in plaintext


@dataclass(frozen=True)
class Text:
    """What became of a chat by pieces."""

    kind: str
    tokens: int
    outside: bool  # whether it left its ranges


@dataclass(frozen=True)
class Question:
    """A question with the greedy answer of float32, whose first different token by pieces, if any,
    is number `flip`, where float32 preferred its own by `margin`.
    """

    kind: str
    question: str
    answer: str
    tokens: int
    flip: int | None
    margin: float | None
    closest: float  # least margin of float32's token before the next likely one, of all places


def by_pieces(
    texts: Sequence[ChatText], exact: Forward, pieces: Forward, say: Callable[[str], None]
) -> tuple[Comparison, list[Text]]:
    """Compare whole chats; those that leave their ranges are listed, and not compared: no
    completion gives anything for them.
    """
    rows, found = [], []
    for i, text in enumerate(texts):
        say(f"by pieces: chat {i + 1} of {len(texts)}")
        logits, outside = pieces(text.rest)
        found.append(Text(text.kind, len(text.rest), outside))
        if not outside:
            rows.append(Rows.of(np.array(text.rest), exact(text.rest)[0], logits))
    if not rows:
        raise InputError("every chat leaves the ranges of the model; calibrate it again")
    return Comparison.of(rows), found


def answered(
    texts: Sequence[ChatText], exact: Forward, pieces: Forward, tokenizer: Tokenizer,
    greedy: Callable[[list[int]], list[int]], say: Callable[[str], None],
) -> list[Question]:  # fmt: skip
    """Compare answers token by token."""
    found = []
    for i, text in enumerate(texts):
        say(f"question {i + 1} of {len(texts)}")
        answer = greedy([*text.head, *text.rest])
        ids, places = [*text.rest, *answer[:-1]], slice(len(text.rest) - 1, None)
        reference, (logits, outside) = exact(ids)[0][places], pieces(ids)
        if outside:
            raise InputError(f"a question leaves the ranges of the model: {text.words!r}")
        best, others = np.sort(reference, axis=-1)[:, -1], np.sort(reference, axis=-1)[:, -2]
        chosen = logits[places].argmax(axis=-1)
        differ = np.flatnonzero(chosen != np.array(answer))
        flip = int(differ[0]) if len(differ) else None
        margin = None if flip is None else float(best[flip] - reference[flip, chosen[flip]])
        words = tokenizer.decode([t for t in answer if t not in tokenizer.eos_ids])
        found.append(Question(
            text.kind, text.words, words, len(answer), flip, margin, float((best - others).min())
        ))  # fmt: skip
    return found


def greedy_of(model: Path, longest: int, tokens: int) -> Callable[[list[int]], list[int]]:
    """Return what answers prompts of so many tokens at most by float32, greedily, up to the end of
    the answer or `tokens`.
    """
    drafter = Drafter(*load_model(model), longest + tokens)
    ends = Tokenizer.load(model).eos_ids

    def answer(prompt: list[int]) -> list[int]:
        made: list[int] = []
        while len(made) < tokens and not ends & set(made):
            made.append(int(np.argmax(drafter.logits(prompt + made))))
        return made

    return answer


# ---- the study


def measure(
    model: Path, chats: Sequence[Path], questions: Path, windows: int, tokens: int,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """All comparisons, as JSON fields; what takes minutes between two parties comes last."""
    texts, asked = chat_texts(model, chats), chat_texts(model, [questions])
    head = texts[0].head
    config, params = load_model(model)
    exact, pieces = (Forward(config, params, head, pieces=p) for p in (False, True))
    longest = max(len(text.head) + len(text.rest) for text in asked)
    answers = answered(
        asked, exact, pieces, Tokenizer.load(model), greedy_of(model, longest, tokens), say
    )
    plain, found = by_pieces(texts, exact, pieces, say)
    result: dict[str, Any] = {
        "pieces": asdict(plain),
        "texts": [asdict(text) for text in found],
        "questions": [asdict(answer) for answer in answers],
    }
    failures = [f"by pieces: {text}" for text in _failures(plain)]
    agreed: dict[str, Any] = {"model": model.name, "public": len(head)}
    if windows:
        shared, outcome, manifest = on_shares(model, texts, windows, exact)
        result |= {"shares": asdict(shared), **outcome}
        failures += [f"on shares: {text}" for text in _failures(shared)]
        agreed |= manifest
    return {
        "passed": not failures, "failures": failures, **result,
        "machine": asdict(machine()), "config": agreed,
    }  # fmt: skip


def _failures(found: Comparison) -> list[str]:
    failures = []
    if not found.agreement >= MIN_AGREEMENT:
        failures.append(f"top-1 agreement {found.agreement:.2%} is below {MIN_AGREEMENT:.0%}")
    if not abs(_change(asdict(found))) <= MAX_PERPLEXITY:
        failures.append(
            f"perplexity changes by {_change(asdict(found)):+.2%}, more than {MAX_PERPLEXITY:.1%}"
        )
    return failures


def _change(found: dict[str, Any]) -> float:
    """Of perplexity, relative."""
    return float(found["perplexity_secure"] / found["perplexity_float32"] - 1)


def on_shares(
    model: Path, texts: Sequence[ChatText], windows: int, exact: Forward
) -> tuple[Comparison, dict[str, Any], dict[str, Any]]:
    """Compare the beginnings of chats, spread evenly over those that are long enough; also what the
    session took and what was agreed.
    """
    enough = [text for text in texts if len(text.rest) >= WINDOW_TOKENS]
    if len(enough) < windows:
        raise InputError(f"--windows must be at most {len(enough)}: so many chats are long enough")
    chosen = [text.rest[:WINDOW_TOKENS] for text in enough[:: len(enough) // windows][:windows]]
    opened: list[list[np.ndarray]] = [[] for _ in chosen]
    vocab = load_config(model).vocab_size

    def keep(event: dict[str, Any]) -> None:
        if event["event"] == "logits":
            rows = np.frombuffer(base64.b64decode(event["rows"]), "<f4")
            opened[event["window"]].append(rows.reshape(-1, vocab))

    outcome, agreed = run_study(
        PROGRAM, model, Windows(windows, WINDOW_TOKENS, tuple(texts[0].head)),
        ClientInputs(chosen), tokenizer=model, on_event=keep,
    )  # fmt: skip
    rows = [
        Rows.of(np.array(ids), exact(ids)[0], np.concatenate(parts))
        for ids, parts in zip(chosen, opened, strict=True)
    ]
    kept = {name: outcome.result[name] for name in ("seconds", "learned")}
    return Comparison.of(rows), kept, dict(agreed)


# ---- as text


def table(result: dict[str, Any]) -> str:
    """The comparisons, the kinds of text, and the answers, as Markdown."""
    verdict = "criterion: " + ("; ".join(result["failures"]) or "holds")
    return "\n\n".join([*tables(result), verdict])


def tables(result: dict[str, Any]) -> list[str]:
    parts = {"by pieces, in plaintext": result["pieces"]}
    if "shares" in result:
        parts = {"on shares": result["shares"]} | parts

    def row(name: str, text: Callable[[dict[str, Any]], str]) -> list[str]:
        return [name, *map(text, parts.values())]

    first = next(iter(parts.values()))
    compared = report.table(("logits against float32's", *parts), [
        row("positions", lambda r: f"{r['positions']:,}"),
        row("largest error", lambda r: f"{r['largest_error']:.3f}"),
        *([f"largest of a position, quantile {q}",
           *(f"{r['quantiles'][q]:.3f}" for r in parts.values())] for q in first["quantiles"]),
        row("mean absolute error", lambda r: f"{r['mean_error']:.4f}"),
        row(f"top-1 agreement (at least {MIN_AGREEMENT:.0%})", lambda r: f"{r['agreement']:.2%}"),
        row("largest margin of a flip", _largest_margin),
        row("perplexity, float32", lambda r: f"{r['perplexity_float32']:.3f}"),
        row(f"perplexity, these logits (within {MAX_PERPLEXITY:.1%})",
            lambda r: f"{r['perplexity_secure']:.3f} ({_change(r):+.3%})"),
    ])  # fmt: skip
    kinds = sorted({text["kind"] for text in result["texts"]})
    ranges = report.table(("kind of chat", "chats", "tokens on shares", "left their ranges"), [
        (kind, str(len(of_kind)), f"{sum(t['tokens'] for t in of_kind):,}",
         str(sum(t["outside"] for t in of_kind)))
        for kind in kinds
        for of_kind in [[t for t in result["texts"] if t["kind"] == kind]]
    ])  # fmt: skip
    heads = "kind", "question", "tokens", "closest decision", "by pieces"
    answers = report.table(heads, [
        (q["kind"], _one_line(q["question"]), str(q["tokens"]), f"{q['closest']:.3f}",
         "the same" if q["flip"] is None else
         f"token {q['flip'] + 1} differs, margin {q['margin']:.3f}")
        for q in result["questions"]
    ])  # fmt: skip
    return ["\n".join(lines) for lines in (compared, ranges, answers)]


def in_results(result: dict[str, Any], origin: str) -> list[str]:
    """What RESULTS.md shows."""
    return [*tables(result), origin]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _largest_margin(found: dict[str, Any]) -> str:
    margins = [flip["margin"] for flip in found["flips"]]
    return f"{max(margins):.4f} of {len(margins)}" if margins else "none"


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chats", type=Path, nargs="+", required=True, metavar="FILE",
                        help="JSON Lines, as for calibrate: chats that the ranges were not chosen "
                        "on")  # fmt: skip
    parser.add_argument("--questions", type=Path, required=True, metavar="FILE",
                        help="likewise: chats that are answered greedily")  # fmt: skip
    commands.add_number(
        parser, "--windows", 8, f"chats of which {WINDOW_TOKENS} tokens go on shares; 0: none"
    )
    commands.add_number(parser, "--answer-tokens", 48, "of an answer, at most")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--windows", options.windows, 0)
    commands.check_range("--answer-tokens", options.answer_tokens, 1)
    progress = Progress()
    try:
        result = measure(
            commands.private_model(options), options.chats, options.questions, options.windows,
            options.answer_tokens, progress.stage,
        )  # fmt: skip
    finally:
        progress.close()
    commands.conclude(options, result, table(result))
