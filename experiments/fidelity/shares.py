"""How faithful a chat model on shares is to float32: the beginnings of some chats between two
processes.

By the programs of a completion: after the public tokens a prefill of one token and a step of the
others, whose logits are opened to the client, as in no completion.

Most of a session's time goes into correlated randomness. With `--dealt` a dealer deals it to both
parties, as threads of this process: ops compute on the same kind of shares, and their results are
as far from float32, so that many more positions are compared in the same time.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from experiments.common import commands
from experiments.common.two_parties import run_study
from experiments.fidelity.chat_texts import ChatText, Forward, chat_texts
from experiments.fidelity.logits import Comparison, LogitRows
from experiments.fidelity.pieces import comparisons, failures_of
from models.family import ModelConfig
from models.hf import load_config, load_model
from spu_llm.app.progress import Progress
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, Owner
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.completion import held_weights
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.secure_model import share_text
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.program import Job, Program, ProviderInputs, Send
from spu_llm.testing.run import Dealer

WINDOW_TOKENS = 25
_NOTHING = JudgeInputs(None, None)


# ---- the program of both workers


@dataclass(frozen=True)
class OpenLogits:
    """Stands for a verifier: the client learns all logits [lane, n, vocab]."""

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
        """Raise InputError when the windows do not fit the model."""
        config.check_public(len(self.public_prefix), "give chats whose beginning is public")
        room = config.context - len(self.public_prefix)
        if self.windows < 1 or not 2 <= self.window_tokens <= room:
            raise InputError(
                f"{self.windows} windows of {self.window_tokens} tokens do not fit this model"
            )

    def layout(self, config: ModelConfig) -> SessionShape:
        public = len(self.public_prefix)
        return SessionShape(
            config,
            (1,),
            (self.window_tokens,),
            live_rows=self.window_tokens,
            prefix=public,
            public=public,
        )


@dataclass(frozen=True)
class WindowInputs:
    window_ids: list[list[int]]


PROGRAM = Program("fidelity-shares", __name__, Windows, WindowInputs, check=Windows.check)


def run(session: PartySession, job: Job[Windows, WindowInputs], send: Send) -> dict[str, Any]:
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


# ---- the study


def measure(
    model: Path, chats: Sequence[Path], windows: int, *, is_dealt: bool = False
) -> dict[str, Any]:
    """Compare the beginnings of `windows` chats on shares, and by pieces in plaintext, as JSON
    fields. `is_dealt`: by `dealt`, else between two processes.
    """
    texts = chat_texts(model, chats)
    chosen = beginnings(texts, windows)
    config, params = load_model(model)
    exact, pieces = (Forward(config, params, texts[0].head, pieces=p) for p in (False, True))
    by_pieces = Comparison.of(
        [LogitRows.of(np.array(ids), exact(ids)[0], pieces(ids)[0]) for ids in chosen]
    )
    run_windows = dealt if is_dealt else on_shares
    compared, took, agreed = run_windows(model, texts[0].head, chosen, exact)
    failures = failures_of(compared)
    return {
        "passed": not failures,
        "failures": failures,
        "shares": asdict(compared),
        "pieces": asdict(by_pieces),
        **took,
        "machine": asdict(machine()),
        "config": {"model": model.name, "dealt": is_dealt, **agreed},
    }


def beginnings(texts: Sequence[ChatText], windows: int) -> list[list[int]]:
    """Return the first tokens on shares of so many chats, spread evenly over those that are long
    enough. InputError when these are too few.
    """
    enough = [text.rest[:WINDOW_TOKENS] for text in texts if len(text.rest) >= WINDOW_TOKENS]
    if len(enough) < windows:
        raise InputError(f"--windows must be at most {len(enough)}: so many chats are long enough")
    return enough[:: len(enough) // windows][:windows]


def on_shares(
    model: Path, public: Sequence[int], chosen: Sequence[list[int]], exact: Forward
) -> tuple[Comparison, dict[str, Any], dict[str, Any]]:
    """Compare texts of one length after the public tokens; return also what the session took, and
    what was agreed.
    """
    opened = Opened(len(chosen), load_config(model).vocab_size)
    outcome, agreed = run_study(
        PROGRAM,
        model,
        Windows(len(chosen), len(chosen[0]), tuple(public)),
        WindowInputs(list(chosen)),
        tokenizer=model,
        on_event=opened.keep,
    )
    took = {name: outcome.result[name] for name in ("seconds", "learned")}
    return opened.compared(chosen, exact), took, dict(agreed)


def dealt(
    model: Path, public: Sequence[int], chosen: Sequence[list[int]], exact: Forward
) -> tuple[Comparison, dict[str, Any], dict[str, Any]]:
    """Compare texts as `on_shares` does, with both parties' correlated randomness from a dealer in
    this process.
    """
    config = load_config(model)
    asked = Windows(len(chosen), len(chosen[0]), tuple(public))
    asked.check(config)
    opened, dealer, progress = Opened(len(chosen), config.vocab_size), Dealer(), Progress()

    def party(session: PartySession) -> dict[str, Any]:
        client = session.rank == CLIENT
        job: Job[Windows, WindowInputs] = Job(
            asked,
            config,
            WindowInputs(list(chosen)) if client else None,
            None if client else ProviderInputs(str(model)),
        )

        def send(event: str, **fields: Any) -> None:
            if client and event == "stage":
                progress.stage(fields["name"])
            opened.keep({"event": event, **fields})

        with session.supplied_by(dealer.source(session.rank)):
            return run(session, job, send)

    try:
        with Simulation() as both:
            client, _ = both.run(party)
    finally:
        progress.close()
    took = {name: client[name] for name in ("seconds", "learned")}
    return opened.compared(chosen, exact), took, {}


class Opened:
    """The logits of every window, as events bring them."""

    def __init__(self, windows: int, vocab: int) -> None:
        self._parts: list[list[np.ndarray]] = [[] for _ in range(windows)]
        self._vocab = vocab

    def keep(self, event: dict[str, Any]) -> None:
        if event["event"] == "logits":
            rows = np.frombuffer(base64.b64decode(event["rows"]), "<f4")
            self._parts[event["window"]].append(rows.reshape(-1, self._vocab))

    def compared(self, chosen: Sequence[list[int]], exact: Forward) -> Comparison:
        """Compare the opened logits with the exact ones."""
        return Comparison.of(
            [
                LogitRows.of(np.array(ids), exact(ids)[0], np.concatenate(parts))
                for ids, parts in zip(chosen, self._parts, strict=True)
            ]
        )


# ---- the command


def table(result: dict[str, Any]) -> str:
    """Return the comparison as Markdown."""
    verdict = "criterion: " + ("; ".join(result["failures"]) or "holds")
    compared = {"on shares": result["shares"], "by pieces, at the same positions": result["pieces"]}
    return "\n\n".join([comparisons(compared), verdict])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chats",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON Lines, as for calibrate",
    )
    commands.add_number(
        parser, "--windows", 8, f"chats of which the first {WINDOW_TOKENS} tokens go on shares"
    )
    parser.add_argument(
        "--dealt",
        action="store_true",
        help="take correlated randomness from a dealer in this process: no "
        "preprocessing, the same arithmetic on shares",
    )
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--windows", options.windows, 1)
    model = commands.private_model(options)
    result = measure(model, options.chats, options.windows, is_dealt=options.dealt)
    commands.conclude(options, result, table(result))
