"""Complete generations: which runs are made, what they cost by parts, how it is shown."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from experiments.common.measured import FIGURES, summed
from experiments.common.prompts import PROMPTS, Prompt, read_prompts
from experiments.completions import report as completions_report
from experiments.completions import study as completions
from experiments.completions.plan import MODES, SYSTEMS
from experiments.completions.report import amortised, choose, everything, online, ratios
from experiments.completions.study import NO_COST, CompletionStudyRequest
from models.tokenizer import Tokenizer
from models.training.corpus import read_manifest
from models.training.snippets import SHIPPED, read_snippets
from spu_llm.api.defaults import DRAFT_LENGTH
from spu_llm.app import cli
from spu_llm.core import merged_rounds
from spu_llm.core.channel import Traffic
from spu_llm.core.errors import WorkerError
from spu_llm.core.values import CLIENT
from spu_llm.offline.ot.transfers import EXTENSION
from spu_llm.offline.silent.hint import ROW_BYTES
from spu_llm.offline.silent.ring import N
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.records import ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.program import Job, ProviderInputs
from tests.experiments.made_up import record
from tests.kit.models import PRIVATE, VOCAB

TINY = Prompt(3, "tiny", "def read")


# ---- which runs


def test_prompts_are_held_out_and_of_different_kinds() -> None:
    prompts = read_prompts()
    assert len({p.kind for p in prompts}) == len(prompts) >= 8
    assert [p.number for p in prompts] == list(range(1, len(prompts) + 1))
    held_out = {f.path for f in read_manifest(SHIPPED / "corpus.json") if f.held_out}
    rows = json.loads(PROMPTS.read_text(encoding="utf-8"))
    snippets = read_snippets()
    for row in rows:
        assert row["file"] in held_out
        lines = [s.text + "\n" for s in snippets if s.file == row["file"]]
        assert any(row["text"] + "\n" in text for text in lines), row["kind"]


def runs_of(*systems: str, prompts: int = 3) -> list[tuple[CompletionStudyRequest, Prompt]]:
    chosen = read_prompts()[:prompts]
    return completions.matrix(chosen, ["local", "lan"], systems, 32)


def test_partial_results_are_balanced() -> None:
    runs = [asked for asked, _ in runs_of(*SYSTEMS)]
    assert len(set(runs)) == len(runs) == 3 * 2 * 5  # the stock path is not sampled
    for n in range(0, len(runs), 5):
        compared = runs[n : n + 5]
        assert len({(a.prompt, a.network) for a in compared}) == 1
        assert {(a.system, a.mode) for a in compared} == {
            ("stock", "greedy"),
            *((s, m) for s in SYSTEMS[1:] for m in MODES),
        }
    # Who is first takes turns.
    assert {runs[n].system for n in range(0, len(runs), 10)} == set(SYSTEMS)
    assert {a.seed for a in runs} == {1, 2, 3}


def test_a_study_goes_on_where_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[CompletionStudyRequest] = []
    died = WorkerError("the worker died")
    endings: list[BaseException | None] = [None, died, KeyboardInterrupt()]

    def measure(
        asked: CompletionStudyRequest, prompt: Prompt, model: Path, draft_model: Path
    ) -> dict[str, Any]:
        ending = endings.pop(0) if endings else None
        if ending is not None:
            raise ending
        made.append(asked)
        return record(asked.system, asked.prompt, mode=asked.mode, seed=asked.seed)

    monkeypatch.setattr(completions, "measure", measure)
    file = tmp_path / "runs.json"
    command = ["experiment", "completions", "--network", "lan", "--prompts", "1"]
    command += ["--json", str(file)]

    def run() -> int:
        with pytest.raises(SystemExit) as end:
            cli.main(command)
        return int(end.value.code or 0)

    assert run() == 130  # interrupted in the third run; the second one failed
    content = json.loads(file.read_text(encoding="utf-8"))
    assert len(content["runs"]) == 1 and content["failed"][0]["error"] == "the worker died"
    assert run() == 0
    assert len(made) == len(set(made)) == 5
    assert run() == 0 and len(made) == 5  # nothing is left: only the table
    assert "1 runs broke off" in capsys.readouterr().out
    file.write_text("{}", encoding="utf-8")
    assert run() == 2


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--prompts", "0"], "--prompts must be 1 to 10, found 0"),
        (["--only", "ours"], "there is no 'ours'; choose from stock, ours-standard, ours-drafted"),
        (["--tokens", "2"], "--tokens must be 3 or more"),
        (["--stock-tokens", "33"], "--stock-tokens 3 to --tokens, found 32 and 33"),
        (["--tokens", "250"], "the model's context of 256; lower --tokens"),
        (["--network", "moon"], "unknown network 'moon'"),
        (["--json", "/nowhere/a"], "--json: /nowhere is not"),
    ],
)
def test_bad_input(options: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["experiment", "completions", *options])
    assert end.value.code == 2
    assert wanted in capsys.readouterr().err


# ---- figures


def test_a_runs_figures_per_emitted_token() -> None:
    one = record("ours-drafted", seconds=32.0)
    assert online(one, "seconds") == 5 + 6
    assert everything(one, "seconds") == one["costs"]["whole"]["seconds"] / 32 == 21
    # Launch, set-up and half of the correlated randomness are paid once.
    assert amortised(one, "seconds", 32) == everything(one, "seconds")
    assert amortised(one, "seconds", 64) == 21 - 4.5 / 2
    assert amortised(one, "bytes", 512) == pytest.approx(1500 * (21 - 4.5 * (1 - 1 / 16)) / 32)
    assert completions_report.tokens_per_step(one) == 3.1


def test_a_stock_run_that_ended_early_is_scaled_and_marked() -> None:
    short = record("stock", seconds=1.0, emitted=11, stock_tokens=11)
    # Three times the steps; all that comes before them is as it was.
    assert online(short, "seconds") == (5 + 3.1 * 6) / 32
    assert everything(short, "seconds") == (1 + 2 + 3 + 4 + 5 + 3.1 * 6) / 32
    data = {"runs": [short, record("ours-drafted")], "failed": []}
    assert "| stock, greedy, +ended after 11 tokens | 1 |" in completions_report.table(data)
    whole = record("stock", seconds=1.0)
    actual = completions_report.groups({"runs": [whole, short]})
    assert actual == {("lan", 32): [whole]}


def test_ratios_are_of_the_same_prompt() -> None:
    records = [
        *(record("stock", p, seconds=s) for p, s in (("a", 10.0), ("b", 90.0), ("c", 20.0))),
        *(record("ours-drafted", p, seconds=s) for p, s in (("a", 1.0), ("b", 30.0))),
        record("ours-drafted", "c", seconds=4.0, mode="sampled"),
    ]

    def seconds(r: dict[str, Any]) -> float:
        return online(r, "seconds")

    assert ratios(records, choose(records, "ours-drafted", "greedy"), seconds) == [10, 3]
    # To greedy stock.
    assert ratios(records, choose(records, "ours-drafted", "sampled"), seconds) == [5]
    data = {"runs": records, "failed": []}
    lines = completions_report.table(data).splitlines()
    assert any(
        line.startswith("| ours-drafted, greedy | 2 | 6.5 (3.0 to 10.0) |") for line in lines
    )
    assert "criterion online, at least 8 times less: 5.0: does not hold" in lines
    assert "criterion with everything, at least 30 times less: 5.0: does not hold" in lines


def test_the_table_says_when_the_machine_was_not_quiet() -> None:
    quiet = {"runs": [record("stock"), record("ours-drafted")], "failed": []}
    assert "NOT QUIET" not in completions_report.table(quiet)
    quiet["runs"].append(record("ours-standard", others=0.9))
    assert "NOT QUIET: 1 runs" in completions_report.table(quiet)


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [record(s, n, network=n) for s in SYSTEMS for n in ("local", "lan")]
    file = tmp_path / "completions.png"
    completions_report.plot({"runs": runs, "failed": []}, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_repetition_counts_runs_of_four_that_stood_before() -> None:
    assert completions.repetition([1, 2, 3], [4, 5, 6, 7, 8]) == 0.0
    assert completions.repetition([], [1, 2, 3, 4, 1, 2, 3, 4]) == 0.5
    assert completions.repetition([1, 2, 3, 4], [9, 1, 2, 3, 4]) == 0.8  # of the prompt, too
    assert completions.repetition([], [7] * 8) == 7 / 8  # a run may overlap the earlier one
    assert completions.repetition([1, 2], []) == 0.0


# ---- against plaintext


def asked(system: str, mode: str = "greedy", tokens: int = 6) -> CompletionStudyRequest:
    return CompletionStudyRequest("local", TINY.kind, mode, system, tokens, TINY.number)


def test_a_token_that_plaintext_does_not_give_is_found(tiny_pair: tuple[Path, Path]) -> None:
    given = Tokenizer.load(tiny_pair[1]).encode(TINY.text)
    right = completions.plaintext_tokens(asked("ours-drafted"), given, *tiny_pair)
    assert right == completions.plaintext_tokens(asked("ours-standard"), given, *tiny_pair)

    def compare(system: str, tokens: list[int]) -> dict[str, Any]:
        return completions.against_plaintext(asked(system), given, *tiny_pair, tokens)

    assert compare("ours-drafted", right) == {"near_ties": 0, "largest_margin": 0.0, "failures": []}
    wrong = [*right[:-1], (right[-1] + 1) % PRIVATE.vocab_size]
    actual = compare("ours-drafted", wrong)
    assert actual["near_ties"] == 1 and actual["largest_margin"] > 0.14 and actual["failures"]
    assert compare("stock", wrong)["failures"] == []  # has no bound; the margin is shown
    drawn = completions.plaintext_tokens(asked("ours-drafted", "sampled"), given, *tiny_pair)
    cut = [*drawn[:4], (drawn[4] + 1) % PRIVATE.vocab_size, drawn[5]]
    actual = completions.against_plaintext(asked("ours-drafted", "sampled"), given, *tiny_pair, cut)
    assert actual == {"same_as_plaintext": 4, "failures": []}


# ---- what a session really makes and sends


def _watched(
    session: PartySession, job: Job[Request, ClientInputs]
) -> tuple[dict[str, Any], dict[str, int], Traffic]:
    """Return the study's result; the units that were made, by name; and all payload that went to
    the peer and came from it until the completion ended, counted where it is sent.
    """
    units: dict[str, int] = {}
    spu, own = session._spu, threading.get_ident()  # the peer is another thread
    sent = sum((e.traffic for e in session.meter.entries if e.kind == "segment"), Traffic())
    ended: list[Traffic] = []
    run, account = spu.run, completions.account
    pool: Any = session.preprocessing.pool
    pack, unpack = merged_rounds.pack, merged_rounds.unpack

    def counted_run(*args: Any, **options: Any) -> Any:
        nonlocal sent
        results, traffic = run(*args, **options)
        sent += traffic
        return results, traffic

    def counted(make: Any, correlation: Any, masks: Any) -> Any:
        units[correlation.name] = units.get(correlation.name, 0) + correlation.chunk
        return make(correlation, masks)

    def without_heads(actual: Any, message: bytes, parts: Any, name: str) -> Any:
        """Leave out of the counts what says in merged messages which part is whose: no payload."""
        nonlocal sent
        if threading.get_ident() == own:
            sent += Traffic(**{name: sum(len(data) for _, data in parts) - len(message)})
        return actual

    def counted_pack(parts: Any) -> bytes:
        message = pack(parts)
        return without_heads(message, message, parts, "sent_bytes")

    def counted_unpack(message: bytes, lanes: int) -> Any:
        parts = unpack(message, lanes)
        return without_heads(parts, message, parts, "received_bytes")

    def at_the_end(*args: Any) -> dict[str, Any]:
        if threading.get_ident() == own:
            ended.append(sent + session._channel.traffic + session._correlations.traffic)
        return account(*args)

    with pytest.MonkeyPatch.context() as patch:
        if session.rank == CLIENT:
            patch.setattr(spu, "run", counted_run)
            patch.setattr(pool, "_make", functools.partial(counted, pool._make))
            patch.setattr(merged_rounds, "pack", counted_pack)
            patch.setattr(merged_rounds, "unpack", counted_unpack)
            patch.setattr(completions, "account", at_the_end)
        result = completions.run(session, job, lambda event, **fields: None)
    return result, units, ended[0] if ended else Traffic()


@pytest.mark.slow
def test_the_offline_price_is_all_that_is_made(tiny_pair: tuple[Path, Path]) -> None:
    """Nothing is made, sent or timed outside the parts of a run: a tiny completion's units and
    bytes, counted inside SPU's runtime and at the channel, against its costs.
    """
    private, public = tiny_pair
    job = Job(
        Request(prompt_tokens=4, max_new_tokens=4, draft_length=2, temperature=0.0),
        PRIVATE,
        ClientInputs(
            [40, 41, 42, 43], str(public), draft_seed=1, sampling_seed=1, draft_dir=str(public)
        ),
        ProviderInputs(str(private), sampling_seed=1),
    )
    with Simulation() as simulation:
        (result, units, sent), _ = simulation.run(lambda session: _watched(session, job))
    cost = result["costs"]
    kinds = cost["kinds"]
    made = {name: kind["units"] for name, kind in kinds.items() if kind["units"]}
    silent = {name: made.pop(name) for name in list(made) if name.startswith("masked product")}
    assert made.pop(EXTENSION) == 2  # a batch of each kind takes more than one gives
    assert made == units
    assert set(silent.values()) == {N} and len(silent) == 4 * PRIVATE.n_layer + 3
    assert any("cached" in name for name in units)  # the cache's tiles
    parts = [cost[p] for p in ("hint", "set_up", "material", "planning", "prefill", "decode")]
    assert cost["hint"]["provider_to_client"] > ROW_BYTES * VOCAB  # the head's, and others
    assert summed(parts)["client_to_provider"] == sent.sent_bytes
    assert summed(parts)["provider_to_client"] == sent.received_bytes
    assert summed(parts)["messages"] == sent.messages
    for name in FIGURES[1:]:
        assert summed(kinds.values())[name] == cost["material"][name]
        assert cost["used_material"][name] <= cost["material"][name]
    for name, kind in kinds.items():
        assert 0 < kind["used_units"] <= kind["units"], name
    assert min(cost[p]["seconds"] for p in ("prefill", "decode", "planning")) > 0
    assert len(result["token_ids"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_between_two_processes(system: str, tiny_pair: tuple[Path, Path]) -> None:
    actual = completions.measure(asked(system), TINY, *tiny_pair)
    assert actual["failures"] == [] and actual["emitted"] == 6
    cost = actual["costs"]
    payload = cost["whole"]["client_to_provider"] + cost["whole"]["provider_to_client"]
    # What the relay carried is that, framed.
    assert payload < actual["wire_bytes"] < 1.2 * payload
    assert cost["whole"]["seconds"] > cost["launch"]["seconds"] > 0
    if system == "stock":
        assert cost["material"] == NO_COST and actual["steps"] == 5
    else:
        drafts = DRAFT_LENGTH if system == "ours-drafted" else 0
        assert cost["material"]["seconds"] > 0 and actual["drafted"] == drafts * actual["steps"]
    completions_report.table({"runs": [actual], "failed": []})
