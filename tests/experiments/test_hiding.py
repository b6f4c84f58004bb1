"""What hiding progress costs: the plans' figures are those of a run, blocks that are packed too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.common import saved
from experiments.completions import hiding
from experiments.cost_model.prices import Prices
from experiments.cost_model.workload import of_steps
from experiments.render import RESULTS
from models.draft import Drafter
from models.gpt2 import GPT2Config
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding import request
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from tests.kit.models import VOCAB, endless, save_tokenizer, tiny_params

TINY = GPT2Config(VOCAB, n_positions=64, n_embd=8, n_layer=1, n_head=1)
PARAMS = endless(tiny_params(TINY, 1))


def test_a_course_has_so_many_tokens_a_step() -> None:
    assert hiding.course(64, 3.0, 7) == [2] * 21
    for rate in (1.0, 2.5, 3.5):
        stays = hiding.course(64, rate, 7)
        assert 63 <= sum(stays) + len(stays) < 64 + rate
        assert len(stays) == pytest.approx(63 / rate, abs=1)


@pytest.mark.slow
def test_a_hidden_text_sends_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose block grows and is packed."""
    for name, rows in (("_SPARE_ROWS", 3), ("_LEAST_ROWS", 1), ("_ROWS_AT_ONCE", 4)):
        monkeypatch.setattr(request, name, rows)
    save_tokenizer(tmp_path)
    asked = Request(4, 5, 2, 0.0)
    assert asked.sizes(TINY) == (8, 12) and asked.may_pack(TINY)
    drafter_params = endless(tiny_params(TINY, 3))

    def program(session: PartySession) -> Any:
        completion = Completion.of(TINY, asked)
        weights = share_weights(session, TINY, PARAMS if session.rank == PROVIDER else None)
        decoder = completion.decoder(session, weights)
        completion.prepare(session, decoder)
        client = None
        if session.rank == CLIENT:
            client = ClientSide(
                [40, 41, 42, 43],
                Tokenizer.load(tmp_path),
                Drafter(TINY, drafter_params, 64),
                completion.verifier,
                Streams(Prg.from_os(), Prg.from_os()),
            )
        mark = len(session.meter.entries)
        report = generate(session, completion, decoder, client, None)
        online = [e for e in session.meter.entries[mark:] if e.phase in ("prefill", "decode")]
        sent = sum(e.traffic.sent_bytes for e in online)
        received = sum(e.traffic.received_bytes for e in online)
        return report.steps, sum(e.traffic.messages for e in online), sent, received

    with Simulation() as simulation:  # correlated randomness of its own, for weights of its own
        (steps, *outcomes), _ = simulation.run(program)
    assert steps >= 4  # the third packs
    works = of_steps(TINY, asked, [], [0] * steps)
    names = ("messages", "client_to_provider", "provider_to_client")
    assert outcomes == [sum(w.counts[n] for w in works) for n in names]


def test_the_table_puts_hidden_beside_shown() -> None:
    shown, hidden = (
        hiding.cost(TINY, Request(4, 6, 2, 0.7, show_progress=show), [1, 0], Prices.load())
        for show in (True, False)
    )
    assert (shown.rows, hidden.rows) == (13, 19)
    assert hidden.messages > shown.messages and hidden.online_bytes > shown.online_bytes
    # A few more rows: where they are more at once, comparisons take a little less each.
    assert hidden.offline_bytes > 0.99 * shown.offline_bytes > 0
    assert hidden.total_seconds("lan") > hidden.total_seconds("local") > 0
    text = hiding.both(TINY, 4, 6, 2, 3.0)
    content = json.loads(json.dumps(text))
    assert hiding.more(content) == hiding.more(text)
    lines = hiding.table({"texts": [content]}).splitlines()
    assert [line.count("|") for line in lines] == [13] * 5


def test_the_committed_figures_are_those_of_the_documents() -> None:
    """And hiding progress, the default, costs at most a quarter more on texts of 64 tokens: bytes
    in all, seconds on both networks.
    """
    result = saved.load("hiding")
    assert hiding.table(result) in (RESULTS / "protocols.md").read_text(encoding="utf-8")
    short = [text for text in result["texts"] if text["tokens"] == 64]
    assert len(short) == 3
    for text in short:
        assert max(hiding.more(text)[-3:]) <= 0.25


def test_measured_pairs_cost_at_most_a_quarter_more() -> None:
    """Whole runs of 64 tokens, hidden and shown in turn: bytes and seconds, correlated randomness
    included.
    """
    runs = saved.load("hidden_pair")["runs"]
    for hidden, shown in zip(runs[::2], runs[1::2], strict=True):
        assert (hidden["progress"], shown["progress"]) == ("hidden", "shown")
        assert hidden["steps"] == shown["steps"] and hidden["accepted"] == shown["accepted"]
        sizes = [sum(sum(way.values()) for way in run["bytes"].values()) for run in (hidden, shown)]
        assert 1 < sizes[0] / sizes[1] <= 1.25
        assert hidden["elapsed_seconds"] / shown["elapsed_seconds"] <= 1.25
