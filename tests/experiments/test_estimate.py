"""Estimates: exact where they say so, linear in blocks, refused in one line where impossible."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.benchmarks import scale
from experiments.benchmarks.scale import Shape
from experiments.common.replay import ROUNDS, Replay
from experiments.common.report import both_ways
from experiments.common.transfers import extensions
from experiments.cost_model import estimate, prices, workload
from experiments.cost_model.prices import Prices
from models.family import ModelConfig
from models.gpt2 import GPT2Config
from models.llama import LlamaConfig
from protocols.arithmetic.product import multiply
from protocols.bits.compare import less_than
from spu_llm.app import cli
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.net.shaping import NETWORKS, NetworkShape
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.program import Job, SystemPromptShape

Priced = tuple[list[workload.Workload], Prices]
TINY = Shape(1, 8, 2, vocab=24, context=16, prompt_tokens=4, new_tokens=2)


@pytest.fixture(scope="module")
def tiny() -> list[workload.Workload]:
    return workload.of_completion(TINY.config, TINY.request, [])


def test_a_measured_run_sends_what_is_estimated(
    simulation: Simulation, tiny: list[workload.Workload]
) -> None:
    job = Job(TINY, TINY.config, scale.ScaleInputs(TINY.prompt()))
    result = simulation.run(lambda s: scale.run(s, job, lambda event, **fields: None))[CLIENT]
    for work, cost in zip(tiny, [result["prefill"], result["tokens"][0]], strict=True):
        for name in ("messages", "client_to_provider", "provider_to_client"):
            assert work.counts[name] == cost[name]
        units: dict[str, int] = {}
        for name, made in cost["material"].items():
            common = workload.common_name(name)
            units[common] = units.get(common, 0) + made["units"]
        assert work.units == units
        kinds = {k: both_ways(c) for k, c in cost["kinds"].items() if both_ways(c)}
        assert {k: n for k, n in work.bytes_of.items() if n} == kinds
    mean = workload.of_completion(TINY.config, TINY.request, [], steps=2)[1]
    for name in ("messages", "client_to_provider", "provider_to_client"):
        assert 2 * mean.counts[name] == sum(cost[name] for cost in result["tokens"])
    assert scale.check(TINY, result["emitted"])["failures"] == []
    assert len(result["emitted"]) == 3
    lines = scale.table(
        {"network": "local", "shape": vars(TINY), "gaps": [0.0], **result}
    ).splitlines()
    assert sum(line.startswith(("| prefill ", "| token ")) for line in lines) == 3


def test_blocks_are_alike() -> None:
    """What more blocks take is found from one and two."""
    request = Request(3, 2, 1, temperature=0.0)
    networks = [NETWORKS["lan"]]

    def of(layers: int) -> list[workload.Workload]:
        return workload._whole(
            GPT2Config(20, 16, 8, layers, 2), request, networks, [0], SystemPromptShape()
        )

    for one, two, three in zip(of(1), of(2), of(3), strict=True):
        actual = workload.of_layers(one, two, 3)
        seconds = actual.counts.pop("seconds lan"), three.counts.pop("seconds lan")
        assert actual.counts == three.counts
        assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)
        assert actual.units == three.units and actual.bytes_of == three.bytes_of


FOUR_BLOCKS: dict[str, Any] = {
    "norm_low": (2.0**-9, *[2.0**-4] * 8),
    "norm_high": (2.0**3,) * 9,
    "largest_activation": (23.0, 240.0, 240.0, 23.0),
}


GPT2_BLOCKS = GPT2Config(100, 16, 8, 4, 2, **FOUR_BLOCKS)
LLAMA_BLOCKS = LlamaConfig(100, 16, 8, 12, 4, 2, 1, **FOUR_BLOCKS)


@pytest.mark.parametrize("config", [GPT2_BLOCKS, LLAMA_BLOCKS], ids=lambda config: config.family)
def test_kinds_of_blocks_add_up(config: ModelConfig) -> None:
    """Blocks that differ in their ranges: what a model of four takes, whichever comes first; masks
    of rotary positions, which serve all blocks, too.
    """
    request, networks = Request(3, 2, 1, temperature=0.0), [NETWORKS["lan"]]
    whole = workload._whole(config, request, networks, [0], SystemPromptShape())
    for actual, wanted in zip(
        workload.of_steps(config, request, networks, [0]), whole, strict=True
    ):
        seconds = actual.counts.pop("seconds lan"), wanted.counts.pop("seconds lan")
        assert actual.counts == wanted.counts
        assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)
        assert actual.units == wanted.units and actual.bytes_of == wanted.bytes_of
    if config.family == "llama":
        assert any(name.startswith("known factors") for name in wanted.units)


def test_checks_of_lengths_cost_no_round_and_few_bytes() -> None:
    """In a block of SmolLM2-135M's size, a step of one row and of several."""
    block = LlamaConfig(
        300,
        max_position_embeddings=128,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    for drafts in (0, 3):
        request = Request(12, 20, drafts, temperature=0.0)
        without, checked = (
            workload.of_completion(dataclasses.replace(block, longest_inner=(most,)), request, [])
            for most in (0.0, 512.0)
        )
        for before, after in zip(without, checked, strict=True):
            for name in ("messages", "rounds"):
                assert after.counts[name] == before.counts[name]
            sent = [both_ways(work.counts) for work in (before, after)]
            assert 1 < sent[1] / sent[0] < 1.02
            words = [work.counts["words"] for work in (before, after)]
            assert 1 < words[1] / words[0] < 1.02


def _pair(x: Any, y: Any) -> Any:
    return multiply(x, y), less_than(x, y, bits=32)


def test_a_replay_counts_rounds_and_bytes_of_merged_messages(simulation: Simulation) -> None:
    function = SecureFunction(_pair, (Owner.CLIENT, Owner.PROVIDER), "replayed")

    def program(session: PartySession) -> Any:
        args = [session.private(rank, lambda: np.ones(8), (8,), np.float32) for rank in (0, 1)]
        demand, _ = session.demand(function, *args)
        session.make(demand)
        mark = len(session.meter.entries)
        session.call(function, *args)
        entries = [e for e in session.meter.entries[mark:] if e.kind == "op"]
        return demand.calls, function.plan(*args)[0].steps, sum(e.traffic.messages for e in entries)

    (client, steps, messages), (provider, _, _) = simulation.run(program)
    apart = sum(call.cost.messages for call in client)
    replay = Replay(ROUNDS)
    replay.play(steps, client, provider)
    assert sum(replay.messages) == messages < apart
    assert replay.sent[CLIENT] == sum(call.cost.client_to_provider for call in client)
    assert replay.sent[PROVIDER] == sum(call.cost.provider_to_client for call in client)
    assert replay.seconds == max(call.cost.rounds for call in client)
    slow = Replay(NetworkShape("slow", 8e3, 0.0))  # a byte takes a millisecond
    slow.play(steps, client, provider)
    assert slow.seconds >= max(replay.sent) / 1e3


# ---- prices


EXTENSION = {"seconds": 2.0, "client_to_provider": 3e5, "provider_to_client": 2e5, "messages": 2.0}


@pytest.fixture(scope="module")
def priced(tiny: list[workload.Workload]) -> Priced:
    """Workloads of two shapes, and prices fitted to made-up costs of them."""
    larger = GPT2Config(40, 32, 16, 1, 2)
    works = [*tiny, *workload.of_completion(larger, Request(9, 2, 0, temperature=0.0), [])]
    made: prices.Made = []
    for work in works:
        for correlation in work.correlations.values():
            count = correlation.chunk * prices.priced(correlation)
            cost = {
                "seconds": 1e-6 * count,
                "client_to_provider": 4.0 * count,
                "provider_to_client": 3.0 * count,
                "messages": 6.0,
            }
            made.append((correlation, [cost]))
    steps = [(w, 1e-3 * w.counts["messages"] + 1e-8 * w.counts["words"]) for w in works]
    return works, prices.fit({"cores": 2, "processor": "some"}, [], made, [EXTENSION], steps)


def test_prices_give_back_what_they_were_fitted_to(priced: Priced) -> None:
    works, actual = priced
    for work in works:
        wanted = 1e-3 * work.counts["messages"] + 1e-8 * work.counts["words"]
        assert actual.computing(work) == pytest.approx(wanted, rel=0.02)
        for name, units in work.units.items():
            correlation = work.correlations[name]
            cost = actual.of_units(correlation, units)
            assert all(number >= 0 for number in cost.values())
            part = extensions(correlation, units)
            assert cost["messages"] == pytest.approx(6 * units / correlation.chunk + 2 * part)
            if prices.kind_of(correlation) in actual.flat:
                wanted = 4 * units * prices.priced(correlation) + 3e5 * part
                assert cost["client_to_provider"] == pytest.approx(wanted)
    again = Prices(**json.loads(json.dumps(dataclasses.asdict(actual))))
    assert again == actual


def test_networks_and_cores_enter_as_stated(priced: Priced) -> None:
    (work, *_), actual = priced
    counts = work.counts | {"seconds network": 0.0}
    still = dataclasses.replace(work, counts=counts)
    local = estimate.figures(still, estimate.Options(4, 3, 0, bandwidth=0.0, delay=0.0), actual)
    assert local["seconds"] == local["seconds_of"]["compute"]
    alone = estimate.figures(still, estimate.Options(4, 3, 0, cores=1), actual)
    assert alone["seconds"] == pytest.approx(2 * local["seconds"])
    counts = counts | {"seconds network": 1.5 + counts["rounds"] * 0.01}
    far = dataclasses.replace(work, counts=counts)
    slow = estimate.figures(far, estimate.Options(4, 3, 0, delay=10.0, bandwidth=8.0), actual)
    assert slow["seconds_of"]["transmission"] == pytest.approx(1.5)
    offline = slow["offline"]
    size = offline["client_to_provider"] + offline["provider_to_client"]
    assert 0 < slow["extensions"] < 1
    waiting = offline["messages"] / 2 * 0.01
    assert offline["seconds"] == pytest.approx(local["offline"]["seconds"] + size / 1e6 + waiting)


@pytest.mark.parametrize("path", ["missing.json", "other.json"])
def test_prices_that_cannot_be_read(path: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"machine": {}}', encoding="utf-8")
    with pytest.raises(InputError, match="prices|cannot be read"):
        Prices.load(tmp_path / path)


# ---- the command


def _config(directory: Path, **changes: Any) -> Path:
    raw = {
        "model_type": "gpt2",
        "vocab_size": 24,
        "n_positions": 64,
        "n_embd": 8,
        "n_layer": 3,
        "n_head": 2,
    } | changes
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return directory


def test_the_command_needs_a_shape_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = _config(tmp_path, n_layer=1), tmp_path / "out.json"
    with pytest.raises(SystemExit) as end:
        cli.main(
            [
                "estimate",
                "--model",
                str(model),
                "--prompt-tokens",
                "5",
                "--draft-length",
                "2",
                "--network",
                "wan",
                "--json",
                str(file),
            ]
        )
    assert end.value.code == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["model"]["n_layer"] == 1
    step = result["step"]
    assert step["seconds_of"]["delay"] == pytest.approx(0.04 * step["rounds"])
    printed = capsys.readouterr().out
    assert f"| step of 3 | {step['seconds']:.2f} |" in printed
    assert f"in offline figures: prefill {result['prefill']['extensions']:.2f}, step" in printed


@pytest.mark.slow
def test_growth_doubles_one_thing_at_a_time(tmp_path: Path) -> None:
    options = estimate.Options(5, 3, 2)
    result = estimate.estimate(_config(tmp_path, n_layer=1), options, growth=True)
    grown = {row["twice"]: row["step"] for row in result["growth"]}
    step = grown.pop("nothing")
    assert list(grown) == ["layers", "width", "prompt", "vocabulary"]
    assert all(row["seconds"] > step["seconds"] for row in grown.values())
    assert grown["layers"]["bytes_of"]["GELU"] == 2 * step["bytes_of"]["GELU"]
    assert grown["width"]["messages"] == step["messages"]
    lines = estimate.table(result).splitlines()
    assert sum(line.startswith(("| layers |", "| vocabulary |")) for line in lines) == 4


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--model", "/nowhere"], "/nowhere is not a directory"),
        (["--prompt-tokens", "64"], "the model's context is 64"),
        (["--draft-length", "33"], "--draft-length must be 0 to 32, found 33"),
        (["--bandwidth", "-1"], "--bandwidth must be 0 to 1e9 Mbps, found -1.0"),
        (["--bandwidth", "nan"], "--bandwidth must be"),
        (["--delay", "-1"], "--delay must be 0 to 1e6 ms"),
        (["--steps", "5"], "--steps must be 1 to 3 with so many new tokens, found 5"),
        (["--public-tokens", "-1"], "--public-tokens must be at least 0, found -1"),
        (["--public-tokens", "60"], "the model's context is 64, 60 of which the public prefix"),
        (["--cores", "0"], "--cores must be at least 1, found 0"),
        (["--network", "moon"], "invalid choice: 'moon'"),
        (["--json", "/nowhere/a"], "--json: /nowhere is not a directory"),
    ],
)
def test_bad_input(
    arguments: list[str], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(_config(tmp_path)), "--prompt-tokens", "5"]
    with pytest.raises(SystemExit) as end:
        cli.main(["estimate", *model, *arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert wanted in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["scale", "--layers", "0"], "no model has this shape"),
        (["scale", "--width", "10", "--heads", "3"], "n_embd must be a multiple of n_head"),
        (["scale", "--new-tokens", "-1"], "--new-tokens must be at least 0, found -1"),
        (["scale", "--context", "65"], "64 prompt tokens and 2 more exceed the context of 65"),
        (["prices", "--with", "/nowhere"], "--with: /nowhere is not the JSON of a study"),
    ],
)
def test_studies_that_cannot_be_run(
    arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["experiment", *arguments])
    assert end.value.code == 2
    assert wanted in capsys.readouterr().err
