"""One provider with several models: which one a client gets, and that sessions keep them apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.family import family_of, logits
from models.gpt2 import GPT2Config
from models.hf import load_model, save_model
from models.resident import mapped
from models.text_format import TextFormat
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError, ManifestMismatch, WireError
from spu_llm.net.manifest import agree, with_nonce
from spu_llm.service import agreeing, served_models, workers
from spu_llm.service.journal import REFUSED, Record, Session
from spu_llm.service.provider import ServeOptions, _Sessions
from spu_llm.service.served_models import ServedModel, ServedModels
from spu_llm.systems.decoding.records import COMPLETION
from spu_llm.systems.decoding.request import Request
from tests.kit.models import PRIVATE, VOCAB, endless, save_tokenizer, tiny_params
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Command, Start

LARGE = GPT2Config(VOCAB, n_positions=48, n_embd=24, n_layer=2, n_head=2)
REQUEST = Request(5, 5, 1, 0.7)
PROMPT = "def read("
NEW = 2


class Two(NamedTuple):
    """Directories of two models that differ in shape, weights and tokenizer."""

    small: Path
    large: Path

    @property
    def served(self) -> list[str]:
        return [f"--model=small={self.small}", f"--model=large={self.large}"]


@pytest.fixture(scope="module")
def two(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Two:
    large = tmp_path_factory.mktemp("large")
    save_model(large, LARGE, endless(tiny_params(LARGE, 5)))
    save_tokenizer(large, "class Reader:\n    path: Path\n")
    return Two(pair.private, large)


def serve(two: Two, *options: str) -> list[str]:
    return ["serve", *two.served, "--listen", "127.0.0.1:0", "--insecure", *options]


def generate(port: int, name: str | None, file: Path, *options: str) -> list[str]:
    command = ["generate", "--server", f"127.0.0.1:{port}", "--insecure", "--standard"]
    command += ["--max-new-tokens", str(NEW), "--temperature", "0", "--prompt", PROMPT]
    command += [] if name is None else ["--served-model", name]
    return [*command, "--json", str(file), *options]


def greedy(model: Path) -> list[int]:
    """Return the model's own continuation, in plaintext."""
    config, params = load_model(model)
    tokens = Tokenizer.load(model).encode(PROMPT)
    for _ in range(NEW):
        tokens.append(int(np.argmax(logits(params, config, jnp.asarray(tokens))[-1])))
    return tokens[-NEW:]


def tokens_of(client: Command, file: Path) -> list[int]:
    assert client.wait(RUN_S) == 0, client.stderr
    tokens: list[int] = json.loads(file.read_text())["token_ids"]
    return tokens


# ---- which one a client gets


@pytest.fixture
def models(two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedModels]:
    """Yield both models, loaded as a provider does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with served_models.loaded(options_of(two)) as made:
        yield made


def options_of(two: Two) -> ServeOptions:
    several = {"small": two.small, "large": two.large}
    return replace(ServeOptions.rehearsal(two.small, once=False, sessions=9), models=several)


def asked(name: Any, **fields: Any) -> dict[str, Any]:
    """Return the manifest of a client without text that asks for a completion by a model."""
    stated = agreeing.of_client(COMPLETION, REQUEST, None, "local", 1)
    return with_nonce(stated | ({} if name is None else {"served_model": name}) | fields)


def test_each_model_is_held_with_what_is_its_own(two: Two, models: ServedModels) -> None:
    assert models.names == ["small", "large"]
    small, large = map(models.find, models.names)
    assert models.find("") is small is models.first
    assert small.hints != large.hints and small.weights != large.weights
    for model, directory, config in ((small, two.small, PRIVATE), (large, two.large, LARGE)):
        assert model.directory == directory
        assert agreeing.stated_model(model.stated)[0] == load_model(directory)[0]
        assert model.stated["model.text_format"] == TextFormat.of_model(directory).digest
        assert _embedding_of(model).shape == (VOCAB, config.n_embd)


def _embedding_of(model: ServedModel) -> Any:
    """Return what lies behind a model's descriptor."""
    config, params = load_model(model.directory)
    weights: Any = mapped(model.weights, family_of(config).fold(params, config))
    return weights["wte"]


def test_of_one_directory_under_two_names_hints_are_one(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both = replace(options_of(two), models={"a": two.small, "b": two.small})
    with served_models.loaded(both) as models:
        assert models.find("a").hints == models.find("b").hints


def test_a_model_that_cannot_be_served_leaves_nothing_open(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(served_models.os, "close", closed.append)
    wrong = replace(options_of(two), models={"a": two.small, "b": tmp_path / "nowhere"})
    with pytest.raises(InputError, match="nowhere"), served_models.loaded(wrong):
        raise AssertionError("it is served")
    monkeypatch.undo()
    assert len(closed) == 1
    served_models.os.close(closed[0])


class Started(Exception):
    """A worker would start now."""


@pytest.mark.parametrize(
    ("name", "config"), [(None, PRIVATE), ("", PRIVATE), ("small", PRIVATE), ("large", LARGE)]
)
def test_a_session_has_the_model_that_is_asked_for(
    two: Two,
    models: ServedModels,
    name: str | None,
    config: GPT2Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shape, weights and hints in the task of its worker, which inherits no other weights and
    writes to no other hints, and the name among what both state.
    """
    given: dict[str, Any] = {}

    def start(place: str, inherits: list[int], **more: Any) -> None:
        given.update(more, inherits=inherits)
        raise Started

    monkeypatch.setattr(workers, "Worker", start)
    request = asked(name, tokenizer=models.find(name or "").stated["tokenizer"])
    with _Sessions(options_of(two), models, print, print) as sessions:
        stated, ticket = sessions._admit(request, None)
        agreed = agree(request, stated)
        admitted = sessions._places.enter(ticket, None)
        with pytest.raises(Started):
            session = Session.of(None, admitted.task.program, admitted.task.agreed)
            sessions._work(None, admitted, session)  # type: ignore[arg-type]
    task = admitted.task
    assert task.agreed == agreed and agreed.get("served_model") == name
    assert agreeing.stated_model(agreed)[0].asdict().items() >= {"n_embd": config.n_embd}.items()
    model = models.find(name or "")
    assert task.own["weights"] == model.weights and task.hints_dir == str(model.hints)
    assert task.own["model_dir"] == str(model.directory)
    assert given["inherits"] == [model.weights] and given["writes"] == [model.hints]


def test_a_model_that_is_not_there_is_refused_by_name(two: Two, models: ServedModels) -> None:
    records: list[Record] = []
    with _Sessions(options_of(two), models, records.append, print) as sessions:
        with pytest.raises(InputError, match="no model 'Large'; it serves small, large$"):
            sessions._admit(asked("Large"), None)
        with pytest.raises(InputError, match="no model 'medium'; it serves small, large$"):
            sessions._tell(None, "medium")
        with pytest.raises(WireError, match="by what is no name"):
            sessions._admit(asked(1), None)
        assert (
            sessions._tell(None, "large").digest == models.find("large").stated["model.text_format"]
        )
        assert sessions._names(None) == ["small", "large"]
        assert not sessions._places.taken
    assert [record.event for record in records] == [REFUSED] * 2


def test_a_provider_without_names_has_one_model() -> None:
    models = ServedModels([ServedModel("", Path("m"), 0, Path("hints"), {})])
    assert models.names == [] and models.find("") is models.first
    with pytest.raises(InputError, match="one model, which has no name"):
        models.find("small")


def test_a_provider_that_knows_no_names_serves_none() -> None:
    """An older one states no name: the client sees the difference, whatever model that is."""
    client = agreeing.of_client(COMPLETION, REQUEST, None, "local", 1, model="large")
    older = agreeing.of_provider(PRIVATE, None, "local", 1)
    with pytest.raises(ManifestMismatch, match='served_model: client has "large", provider has no'):
        agree(with_nonce(client), with_nonce(older))


@given(
    name=st.none() | st.text(max_size=80) | st.integers() | st.booleans() | st.sampled_from("ab")
)
def test_any_name_is_one_of_the_models_or_refused(name: Any) -> None:
    """And both parties compute the same settings, with the name in the session's id."""
    models = ServedModels([ServedModel(n, Path(n), 0, Path(n), {"jobs": 1}) for n in "ab"])
    client = with_nonce({"jobs": 1, "served_model": name})
    try:
        asked_for, echoed = agreeing.asked_model(client)
        model = models.find(asked_for)
        agreed = agree(client, with_nonce(model.stated | echoed))
    except (InputError, WireError):
        assert name not in ("", "a", "b")
        return
    assert agreed["served_model"] == name and model.name == (name or "a")


# ---- between two processes


@pytest.mark.slow
def test_both_complete_at_once_each_its_own_text(start: Start, two: Two, tmp_path: Path) -> None:
    """As each does alone; a client that asks for no name gets the first, and an unknown name is
    refused with the names that there are.
    """
    server = start(*serve(two, "--jobs", "1"))
    port = server.until_listening()
    assert f"serving small={two.small}, large={two.large} on" in server.stdout
    files = [tmp_path / name for name in ("first", "large")]
    clients = [
        start(*generate(port, name, file))
        for name, file in zip((None, "large"), files, strict=True)
    ]
    refused = start(*generate(port, "medium", tmp_path / "none"))
    refused.assert_failed(2, "no model 'medium'; it serves small, large", within_s=RUN_S)
    doctor = start("doctor", "--server", f"127.0.0.1:{port}")
    assert doctor.wait(RUN_S) == 0 and "models: small, large" in doctor.stdout
    first, large = (tokens_of(*one) for one in zip(clients, files, strict=True))
    assert first == greedy(two.small) and large == greedy(two.large) and first != large
    config = json.loads(files[1].read_text())["config"]
    assert config["served_model"] == "large" and config["model.n_embd"] == LARGE.n_embd


@pytest.mark.slow
def test_one_model_may_have_a_name_or_none(start: Start, two: Two, tmp_path: Path) -> None:
    stub = "client:decoding:holds"
    for option, names in ((str(two.small), []), (f"only={two.small}", ["only"])):
        server = start(
            "serve", "--model", option, "--listen", "127.0.0.1:0", "--insecure", stub=stub
        )
        port = server.until_listening()
        assert f"serving {option} on" in server.stdout
        for name in (None, *names):
            client = start(*generate(port, name, tmp_path / "none"), stub=stub)
            client.until_phase("decoding")
        other = start(*generate(port, "other", tmp_path / "none"), stub=stub)
        said = "it serves only" if names else "one model, which has no name"
        other.assert_failed(2, said, "--served-model" if not names else "", within_s=END_S)


@pytest.mark.slow
def test_a_pool_serves_all_models_of_a_provider(start: Start, two: Two, tmp_path: Path) -> None:
    """What is kept is bound to no weights: made in a session with one model, it is taken in one
    with the other, and every text stays its model's own.
    """
    server = start(*serve(two, "--jobs", "1", "--pool", str(tmp_path / "provider")))
    port = server.until_listening()
    pool = ["--pool", str(tmp_path / "client")]
    for i, (name, model) in enumerate(
        [("small", two.small), ("large", two.large), ("small", two.small)]
    ):
        file = tmp_path / f"{i}.json"
        prepare = [
            "prepare" if part == "generate" else part for part in generate(port, name, file, *pool)
        ]
        made = start(*prepare, "--steps", str(NEW - 1))
        assert made.wait(RUN_S) == 0, made.stderr
        assert tokens_of(start(*generate(port, name, file, *pool)), file) == greedy(model)
    assert len(list((tmp_path / "client").glob("*/lock"))) == 1
