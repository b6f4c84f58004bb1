"""Programs: their records, typed jobs, and one that needs neither text nor SPU."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spu_llm.core.errors import InputError, PeerError, PoolError, WireError
from spu_llm.core.settings import SPU
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.net.identity import Certificate
from spu_llm.net.relay import Relay
from spu_llm.net.stream_channel import Channels
from spu_llm.runtime import party_session, spu_runtime
from spu_llm.runtime.party_session import SessionOptions
from spu_llm.service import programs, worker
from spu_llm.service.agreeing import (
    certificates,
    job_of,
    of_client,
    of_provider,
    peer_folder,
    pool_id,
    task_of,
    without_ids,
)
from spu_llm.service.client import run_as_client
from spu_llm.service.launching import local_provider
from spu_llm.service.plain_session import PlainSession
from spu_llm.service.task import Task
from spu_llm.systems.decoding.records import PREPARATION, ClientInputs, PrepareRequest
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.program import (
    Job,
    Nothing,
    Program,
    ProviderInputs,
    SystemPromptShape,
    read,
    stated,
)
from tests.kit.models import PRIVATE
from tests.kit.pair import Pair
from tests.kit.paths import ROOT
from tests.kit.processes import STUB

SUM = "sum_study:PROGRAM"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a study by one file and one line, here and in all processes that are started."""
    monkeypatch.syspath_prepend(str(STUB))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STUB), str(ROOT)]))
    monkeypatch.setenv("SPU_LLM_STUDY", f"sum={SUM}")
    monkeypatch.setitem(programs.STUDIES, "sum", SUM)
    return importlib.import_module("sum_study")


def test_a_program_without_spu_runs_between_two_processes(pair: Pair, study: Any) -> None:
    heard: list[dict[str, Any]] = []

    def on_event(event: dict[str, Any], relay: Relay) -> None:
        heard.append(event)

    asked = study.SumRequest(3, ("a", "b"))
    with local_provider(pair.private, "local", studies=True) as server:
        outcome, agreed = run_as_client(
            server, study.PROGRAM, asked, study.SumInputs([2, 40]), on_event
        )
    result = outcome.result
    assert result["sum"] == 42 + len(str(pair.private))
    assert result["messages"] == 6 and not result["with_spu"]
    assert result["learned"] == {"client": [], "provider": ["the client's sum"]}
    assert [e["number"] for e in heard if e["event"] == "exchanged"] == [0, 1, 2]
    assert agreed["request.words"] == "a,b" and "tokenizer" not in agreed
    assert outcome.wire_sent > 0 < outcome.wire_received


def test_what_a_provider_does_not_serve_is_told(pair: Pair, study: Any) -> None:
    with pytest.raises(InputError, match="sum is a study; the provider must be started with --st"):
        with local_provider(pair.private, "local") as server:
            run_as_client(server, study.PROGRAM, study.SumRequest(1, ()), study.SumInputs([]))
    with pytest.raises(InputError, match="at most 64 times, found 65"):
        with local_provider(pair.private, "local", studies=True) as server:
            run_as_client(server, study.PROGRAM, study.SumRequest(65, ()), study.SumInputs([]))


@pytest.mark.slow
def test_only_a_study_can_do_without_a_tokenizer(pair: Pair, study: Any, tmp_path: Path) -> None:
    model = Path(shutil.copytree(pair.private, tmp_path / "model"))
    (model / "tokenizer.json").unlink()
    with local_provider(model, "local", studies=True) as server:
        outcome, _ = run_as_client(
            server, study.PROGRAM, study.SumRequest(1, ()), study.SumInputs([1])
        )
    assert outcome.result["sum"] == 1 + len(str(model))
    with pytest.raises(InputError, match="tokenizer.json is missing"):
        with local_provider(model, "local"):
            pass


@pytest.mark.parametrize("theirs", ["ours", "another"])
def test_a_worker_s_peer_knows_the_session(theirs: str) -> None:
    """Whoever else on the machine connects first cannot take the peer's place."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def meet(rank: int, session: str) -> bytes | str:
        with Channels(rank, port, 20.0) as channels:
            try:
                met = PlainSession(rank, channels.open(), session)
            except WireError as exc:
                return str(exc)
            met.channel.send(b"of %d" % rank)
            heard = met.channel.recv()
            met.close()
            return heard

    with ThreadPoolExecutor() as pool:
        both = [pool.submit(meet, PROVIDER, "ours"), pool.submit(meet, CLIENT, theirs)]
        collected = [one.result(20) for one in both]
    if theirs == "ours":
        assert collected == [b"of 0", b"of 1"]
    else:
        assert all("a stranger is at the other end" in str(error) for error in collected)


def test_what_a_provider_cannot_start_with_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere is not a directory"):
        with local_provider(tmp_path / "nowhere", "local"):
            pass


# ---- records


@pytest.mark.parametrize("name", [*programs.SERVED, *programs.STUDIES])
def test_a_record_is_whole(name: str) -> None:
    program = programs.find(name)
    assert program.name == name and callable(program.load())
    for kind in (program.request, program.inputs):
        assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_unknown_programs_are_refused() -> None:
    with pytest.raises(InputError, match="unknown program 'guess'"):
        programs.find("guess")


# ---- jobs

ASKED = PrepareRequest(5, 7, 2, 0.5, steps=3)


def test_a_job_is_what_both_parties_put_in() -> None:
    """From the client's dataclasses, through manifest and JSON, to those of both workers."""
    program = programs.find("completion")
    request, inputs = Request(5, 7, 2, 0.5, verify="race"), ClientInputs([1, 2], "dir", ["x"], 3)
    agreed = {**of_client(program, request, TEXT, "local", 1), **_model()}
    task = dataclasses.replace(
        task_of("client", agreed, inputs, Path("/pool")), link=("a:1", "b:2"), messages=3
    )
    assert Task.of_line(task.line().decode()) == task and task.pool_dir == "/pool"
    assert job_of(program, task) == Job(request, PRIVATE, inputs, None)
    held = ProviderInputs("model", 9)
    of_provider_task = task_of("provider", agreed, held, None)
    assert job_of(program, of_provider_task) == Job(request, PRIVATE, None, held)


class Text:
    """In place of a tokenizer."""

    digest = "0"


TEXT: Any = Text()


def _model() -> dict[str, Any]:
    stated = of_provider(PRIVATE, TEXT, "local", 1)
    return {name: value for name, value in stated.items() if name.startswith("model.")}


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"agreed": {"request.steps": 7}}, InputError, "--steps must be 0 to 6"),
        ({"agreed": {"request.steps": True}}, InputError, "steps is True, not of type int"),
        ({"agreed": {"request.room_bytes": "1"}}, InputError, "room_bytes is '1', not of type int"),
        ({"agreed": {"request.prompt_tokens": 64}}, InputError, "context is 64"),
        ({"own": {"more": 1}}, InputError, "the client's inputs are malformed: 'more' is not"),
        ({"agreed": {"model.n_embd": 15}}, PeerError, "n_embd must be a multiple of n_head"),
        ({"agreed": {"model.n_embd": "16"}}, PeerError, "it has other fields than such a model's"),
        ({"agreed": {"model.before.rows": 64}}, PeerError, "cannot take 64 of 64 positions"),
        ({"agreed": {"model.before.rows": -1}}, PeerError, "cannot take -1 of 64 positions"),
        ({"agreed": {"model.before.padded": 3}}, PeerError, "cannot take 0 of 64 positions"),
        ({"agreed": {"model.before.rows": "9"}}, PeerError, "rows is '9', not of type int"),
        ({"agreed": {"model.before.more": 1}}, PeerError, "'more' is not known"),
        ({"agreed": {"model.before.rows": 62}}, InputError, "context is 2"),
        ({"agreed": {"request.public_prefix": "1,288"}}, InputError, "tokens that the model lacks"),
        ({"agreed": {"request.public_prefix": "1,x"}}, InputError, "public_prefix is '1,x'"),
    ],
)
def test_a_malformed_task_is_refused(
    change: dict[str, dict[str, Any]], error: type[Exception], said: str
) -> None:
    agreed = {**of_client(PREPARATION, ASKED, TEXT, "local", 1), **_model()}
    task = task_of("client", agreed, Nothing(), None)
    assert job_of(PREPARATION, task).request == ASKED
    for name, fields in change.items():
        task = dataclasses.replace(task, **{name: getattr(task, name) | fields})
    with pytest.raises(error, match=said):
        job_of(PREPARATION, task)


def test_a_program_that_the_backend_does_not_compute_is_refused() -> None:
    """A completion's worker is told; a preparation is refused at both parties."""
    completion, request = programs.find("completion"), Request(5, 7, 2, 0.5)
    agreed = {**of_client(completion, request, TEXT, "local", 1, backend=SPU), **_model()}
    for role, own in (("client", ClientInputs([1], "dir")), ("provider", ProviderInputs("model"))):
        assert job_of(completion, task_of(role, agreed, own, None)).backend == SPU
    assert agreed["spu.exp_mode"] == "EXP_PADE"
    agreed = {**of_client(PREPARATION, ASKED, TEXT, "local", 1, backend=SPU), **_model()}
    for role, held in (("client", Nothing()), ("provider", ProviderInputs("model"))):
        with pytest.raises(InputError, match="--backend spu is of completions and chats, not"):
            job_of(PREPARATION, task_of(role, agreed, held, Path("/pool")))


def test_both_workers_know_what_the_providers_text_takes() -> None:
    request, own = (
        Request(5, 7, 2, 0.5, public_prefix=(7, 8)),
        ProviderInputs("model", system_prompt=[1, 2]),
    )
    before = SystemPromptShape(16, 15)
    stated = of_provider(PRIVATE, TEXT, "local", 1, before)
    agreed = {**stated, **of_client(programs.find("completion"), request, TEXT, "local", 1)}
    for role, held in (("client", ClientInputs([1], "dir")), ("provider", own)):
        job = job_of(programs.find("completion"), task_of(role, agreed, held, None))
        assert (job.request, job.model, job.before) == (request, PRIVATE, before)
        assert held in (job.of_client, job.of_provider)


def test_what_a_program_needs_is_there() -> None:
    agreed = {**of_client(PREPARATION, ASKED, TEXT, "local", 1), **_model()}
    with pytest.raises(InputError, match="keeps no correlated randomness"):
        job_of(PREPARATION, task_of("provider", agreed, ProviderInputs("model"), None))
    del agreed["tokenizer"]
    for role, own in (("client", Nothing()), ("provider", ProviderInputs("model"))):
        with pytest.raises(InputError, match="states no tokenizer"):
            job_of(PREPARATION, task_of(role, agreed, own, Path("/pool")))


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"role": 1}'])
def test_what_is_no_task_is_refused(line: str) -> None:
    with pytest.raises(InputError, match="the worker's task is malformed"):
        Task.of_line(line)


def test_a_client_that_asks_for_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="asks for no program"):
        task_of("provider", {"request.program": 3}, ProviderInputs("model"), None)


@dataclass(frozen=True)
class Inner:
    n: int


@dataclass(frozen=True)
class Outer:
    pairs: list[list[int]]
    inner: Inner
    names: tuple[str, ...] = ()
    seed: int | None = None
    free: dict[str, Any] = dataclasses.field(default_factory=dict)


WHOLE = {"pairs": [[1], []], "inner": {"n": 1}, "names": ["a"], "seed": None, "free": {"x": [1]}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pairs": [[1.0]]}, "pairs is 1.0, not of type int"),
        ({"pairs": 1}, "pairs is 1, not of type list"),
        ({"inner": {"n": True}}, "n is True, not of type int"),
        ({"inner": {}}, "'n' is missing"),
        ({"inner": 1}, "it is no object"),
        ({"seed": "1"}, "seed is '1', not of type int"),
        ({"free": []}, "free is"),
        ({"other": 1}, "'other' is not known"),
    ],
)
def test_types_are_exact(change: dict[str, Any], said: str) -> None:
    assert read(Outer, WHOLE, "bad") == Outer([[1], []], Inner(1), ("a",), None, {"x": [1]})
    with pytest.raises(InputError, match=f"bad: {said}"):
        read(Outer, {**WHOLE, **change}, "bad")


@dataclass(frozen=True)
class Lists:
    numbers: tuple[int, ...]
    names: tuple[str, ...]


def test_tuples_are_comma_lists_in_a_manifest() -> None:
    program = Program("lists", "", Lists)
    for lists in (Lists((1, 2), ("a", "b")), Lists((), ())):
        assert program.asked(stated(lists)) == lists
    assert stated(Lists((1, 2), ("a",))) == {"numbers": "1,2", "names": "a"}
    with pytest.raises(InputError, match="numbers is '1,x'"):
        program.asked({"numbers": "1,x", "names": ""})


def test_only_a_party_asks_for_its_own_inputs() -> None:
    job: Job[Nothing, Nothing] = Job(Nothing(), PRIVATE, of_provider=ProviderInputs("model"))
    assert job.provider.model_dir == "model" and {CLIENT, PROVIDER} == {0, 1}
    with pytest.raises(AssertionError):
        job.client  # noqa: B018


# ---- sessions on SPU


def test_a_session_is_told_both_ids_and_the_peers_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which go by both certificates, the same at both parties; a worker never sees the secret."""
    told: list[SessionOptions] = []
    events: Any = SimpleNamespace(send=lambda event, **fields: None)
    channels: Any = SimpleNamespace(open=None)

    def session(link: Any, config: Any, options: SessionOptions, **given: Any) -> Any:
        told.append(options)
        return SimpleNamespace(pool_folder=None)

    monkeypatch.setattr(party_session, "PartySession", session)
    monkeypatch.setattr(spu_runtime, "create_link", lambda *given, **more: None)
    soon = datetime.now(timezone.utc)
    client, provider = (Certificate(digit * 64, "name", soon) for digit in "ab")
    for seen in ({}, certificates(client=client, provider=provider)):
        asked = {**of_client(PREPARATION, ASKED, TEXT, "local", 1), **_model(), **seen}
        agreed = {**asked, "session": "0"}
        for role in ("client", "provider"):
            agreed |= pool_id(role, seen, tmp_path / role)
        for role, own in (("client", Nothing()), ("provider", ProviderInputs("model"))):
            folder = peer_folder(role, agreed, tmp_path / role)
            task = task_of(role, agreed, own, folder)
            job: Job[Any, Any] = job_of(PREPARATION, task)
            worker._spu_session(PREPARATION, job, task, events, channels)
        assert not any(name.endswith(".pool") for name in without_ids(agreed))
    ids = [options.met for options in told]
    assert ids[0] == ids[1][::-1] and ids[2] == ids[3][::-1] and len({*ids[0], *ids[2]}) == 4  # type: ignore[index]
    folders = [options.pool_dir for options in told]
    assert [folder.parent.name for folder in folders] == ["client", "provider"] * 2
    assert len(set(folders)) == 4


def test_who_keeps_no_correlations_has_no_id(tmp_path: Path) -> None:
    agreed = {**pool_id("client", {}, tmp_path), **pool_id("provider", {}, None)}
    assert peer_folder("client", agreed, tmp_path) is None
    assert peer_folder("provider", agreed, None) is None
    with pytest.raises(WireError, match="no id"):
        peer_folder("client", {**agreed, "model.pool": "../" + "0" * 29}, tmp_path)
    with pytest.raises(PoolError, match="give each its own"):
        peer_folder("client", {**agreed, "model.pool": agreed["request.pool"]}, tmp_path)
