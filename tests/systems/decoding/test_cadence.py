"""Hidden progress in time: drafts in one compiled shape, and a cadence for the provider to see."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from models import draft
from models.draft import WIDTH, Drafter
from models.family import logits
from models.gpt2 import GPT2Config
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding import cadence, client_side, generate
from spu_llm.systems.decoding.cadence import Cadence
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.generate import Completion
from spu_llm.systems.decoding.preparation import demand_of
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from tests.kit.models import PUBLIC, VOCAB, endless, save_tokenizer, tiny_params

TINY = GPT2Config(VOCAB, n_positions=64, n_embd=8, n_layer=1, n_head=1)
PARAMS = endless(tiny_params(TINY, 1))
DRAFTS, STEPS = 2, 28  # which give 13 gaps of either kind: apart, they have a p of 2e-7
PROMPT = [40, 41, 42, 43]
FALSE_ALARM = 1e-6  # of the comparison of two distributions that are one


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    """Drafters of one shape share what is compiled; here each is the first."""
    draft._compiled.cache_clear()


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(WIDTH, marks=pytest.mark.slow),
        3 * WIDTH + 1,
    ],
)
def test_drafts_go_through_one_compiled_shape(prompt: int) -> None:
    """Whatever was accepted before, the drafter runs one program, compiled when it was made; and it
    drafts from the logits of the whole text.
    """
    params = tiny_params(PUBLIC, 2)
    drafter = Drafter(PUBLIC, params, 60)
    assert drafter._step._cache_size() == 1  # type: ignore[attr-defined]
    calls: list[tuple[int, ...]] = []
    step = drafter._step
    drafter._step = lambda w, tokens, *rest: (calls.append(tokens.shape), step(w, tokens, *rest))[1]  # type: ignore[assignment]
    seen: list[np.ndarray] = []

    def pick(actual: np.ndarray, position: int) -> tuple[int, np.ndarray]:
        seen.append(actual)
        return int(np.argmax(actual)), actual

    text, fed = [10 + i for i in range(prompt)], []
    for stay in (3, 0, 2, 3, 1):
        calls.clear()
        drafts, _ = drafter.propose(text, 3, pick)
        fed.append(len(calls))
        wanted = logits(params, PUBLIC, jnp.asarray(text + drafts[:2]))[-3:]
        np.testing.assert_allclose(np.array(seen[-3:]), wanted, atol=1e-4)
        assert set(calls) == {(WIDTH,)}
        text = [*text, *drafts[:stay], 7 + stay]
    assert fed[0] == 2 + math.ceil(prompt / WIDTH) and set(fed[1:]) == {3}
    assert step._cache_size() == 1  # type: ignore[attr-defined]


def test_a_cadence_lets_whole_intervals_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(cadence.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(cadence.time, "sleep", lambda s: now.__setitem__(0, now[0] + s / 2 + 1e-6))
    kept = Cadence(0.25)
    for work, passed in ((0.0, 0.25), (0.1, 0.25), (0.24, 0.25), (0.3, 0.5), (0.8, 1.0)):
        kept.begin()
        began = now[0]
        now[0] += work
        kept.wait()
        assert now[0] - began == pytest.approx(passed, abs=1e-4)
    times = iter([9.0, 0.011, 0.013, 0.012, 0.011, 0.01])  # the first one compiles

    def rehearse() -> None:
        now[0] += next(times)

    assert Cadence.of(rehearse).interval_s == pytest.approx(0.03)


class Swaying(Drafter):
    """Proposes what the private model likes best and what it likes least, in turn; after drafts
    that all stayed it takes `slower` seconds more.
    """

    slower = 0.0
    turns = 0

    def propose(self, context: list[int], count: int, pick: Any) -> Any:
        if context[:2] == PROMPT[:2]:  # no rehearsal
            self.turns += 1
            time.sleep(self.slower * (self.turns % 2 == 0))
        sign = 1 if self.turns % 2 else -1
        return super().propose(context, count, lambda z, position: pick(sign * z, position))


class Clocked:
    """A session that notes when messages come, and in which function."""

    def __init__(self, session: PartySession) -> None:
        self._session = session
        self.arrivals: list[tuple[str, float]] = []
        self._running = ""
        receive = session.party.channel.recv

        def recv() -> bytes:
            data = receive()
            self.arrivals.append((self._running, time.perf_counter()))
            return data

        session.party.channel.recv = recv  # type: ignore[method-assign]

    def close(self) -> None:
        del self._session.party.channel.recv

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def call(self, function: SecureFunction, *args: Any) -> Any:
        self._running = function.name
        return self._session.call(function, *args)

    def gaps(self) -> np.ndarray:
        """Seconds [steps, 2] from a step's last message to the announcement, and from that to the
        first message of the next step.
        """
        names = [name for name, _ in self.arrivals]
        at = [i for i, name in enumerate(names) if name == "announce end"]
        times = np.array([t for _, t in self.arrivals])
        return np.array([np.diff(times[i - 1 : i + 2]) for i in at[1:-1]])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


def watch(simulation: Simulation, tokenizer: Tokenizer, slower: float) -> Any:
    """Return the provider's gaps [steps, 2] after every step but the last, and whether its drafts
    all stayed: bool [steps].
    """
    new = 1 + (DRAFTS + 2) * STEPS // 2
    request = Request(len(PROMPT), new, DRAFTS, 0.0)

    def program(session: PartySession) -> Any:
        completion = Completion.of(TINY, request)
        weights = share_weights(session, TINY, PARAMS if session.rank == PROVIDER else None)
        session.make(sum(demand_of(session.dry(), completion, weights, STEPS), Demand()))
        client = None
        if session.rank == CLIENT:
            drafter = Swaying(TINY, PARAMS, 64)
            drafter.slower = slower
            streams = Streams(Prg.from_os(), Prg.from_os())
            client = ClientSide(list(PROMPT), tokenizer, drafter, completion.verifier, streams)
        clocked: Any = Clocked(session)
        decoder = completion.decoder(clocked, weights)
        completion.prepare(session, decoder)
        try:
            report = generate.generate(clocked, completion, decoder, client, None)
        finally:
            clocked.close()
        if client is None:
            return clocked.gaps()
        # No gap holds a compilation.
        assert drafter._step._cache_size() == 1  # type: ignore[attr-defined]
        return report.emitted

    emitted, gaps = simulation.run(program)
    stayed = np.array(emitted[1:-1])
    assert set(stayed.tolist()) == {1, DRAFTS + 1} and len(gaps) == len(stayed) >= STEPS - 2
    return gaps, stayed == DRAFTS + 1


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "no cadence"])
def test_gaps_say_nothing_of_the_accepted_count(
    own_simulation: Simulation, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Times at the provider after steps whose drafts all stayed and after steps whose drafts all
    went, with a client that drafts longer after the former: ranks as of one distribution
    (Mann-Whitney) where the cadence is kept, apart where it is not.
    """
    interval = Cadence(0.2 if kept else 1e-9)
    monkeypatch.setattr(client_side.Cadence, "of", lambda rehearse: interval)
    # 60 ms are within the interval that is kept; 250 ms stand out on a busy machine, too.
    gaps, stayed = watch(own_simulation, tokenizer, slower=0.06 if kept else 0.25)
    p = [mannwhitneyu(g[stayed], g[~stayed], method="exact").pvalue for g in gaps.T]
    if kept:
        assert min(p) > FALSE_ALARM / 2, gaps
        assert np.median(gaps[:, 0]) > 0.15
    else:
        assert p[0] < 2e-3, gaps  # some gaps of a busy machine among them
