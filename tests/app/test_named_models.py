"""`serve --model [NAME=]DIR` and `--served-model NAME`: what they name, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm import Provider
from spu_llm.app import named_models
from spu_llm.app.named_models import NamedModel, named_model
from spu_llm.app.options import provider_of
from spu_llm.core.errors import InputError
from spu_llm.service.model_names import MAX_MODELS, is_name
from tests.kit.command_line import parsed, refused

SERVE = ["serve", "--listen", "127.0.0.1:0", "--insecure"]
TWO = [*SERVE, "--model", "a=m", "--model", "b=n"]
# Every command that asks a provider for one of its models.
ASKING: dict[str, list[str]] = {
    "generate": [],
    "chat": [],
    "gateway": [],
    "prepare": ["--pool", "pool"],
    "dp": [
        "generate",
        "--model",
        "m",
        "--references",
        "r",
        "--out",
        "o",
        "--query",
        "q",
        "--texts",
        "1",
    ],
}


@pytest.mark.parametrize(
    ("text", "name", "directory"),
    [
        ("m", "", "m"),
        ("a=m", "a", "m"),
        ("a-1._B=/srv/m=n", "a-1._B", "/srv/m=n"),
        ("x/a=m", "", "x/a=m"),
        ("a b=m", "", "a b=m"),
        ("=m", "", "=m"),
        (f"{'x' * 64}=m", "x" * 64, "m"),
        (f"{'x' * 65}=m", "", f"{'x' * 65}=m"),
        ("is=there", "", "is=there"),
        ("a=is=there", "a", "is=there"),
    ],
)
def test_what_stands_before_a_directory_is_its_name(
    text: str, name: str, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless all of it is a directory, or it can be no name."""
    (tmp_path / "is=there").mkdir()
    monkeypatch.chdir(tmp_path)
    assert named_model(text) == NamedModel(name, Path(directory))
    assert named_model(text, tmp_path) == NamedModel(name, tmp_path / directory)


@given(text=st.text(max_size=80), folder=st.sampled_from(["", "/none", "none/at all"]))
def test_a_named_model_comes_back_from_its_text(text: str, folder: str) -> None:
    """A file of options gives it so to the command line."""
    try:
        model = named_model(text, Path(folder))
    except (InputError, ValueError):
        assert text.endswith("=") or "\0" in text
        return
    if model.name or not is_name(str(model).partition("=")[0]):
        assert named_model(str(model)) == model


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "m", "--model", "n"], "--model m: of several models each has a name; give NA"),
        (["--model", "a=m", "--model", "n"], "--model n: of several models each has a name"),
        (["--model", "a=m", "--model", "a=n"], "two models are named a; give each a name of"),
        (["--model", "a="], "--model a= names no directory; give NAME=DIR"),
        ([f"--model=a{i}=m" for i in range(MAX_MODELS + 1)], f"at most {MAX_MODELS} models, fou"),
        ([], "required: --model"),
        (["--model", "a=nowhere", "--model", "b=none"], "nowhere is not a directory"),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *SERVE, *options)


@pytest.mark.parametrize(
    "options",
    [
        ["--ranges", "f"],
        ["--system-prompt", "f"],
        ["--mark", "f"],
        ["--references", "f", "--epsilon", "1", "--once"],
        ["--studies"],
    ],
)
def test_what_belongs_to_one_model_is_refused_with_two(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"{options[0]} is of one model; give one --model, or leave {options[0]} out"
    assert said in refused(capsys, *TWO, *options)


def test_the_first_model_is_what_a_client_gets() -> None:
    models = named_models.by_name(parsed(*TWO).model)
    assert list(models.items()) == [("a", Path("m")), ("b", Path("n"))]
    for one in ("m", "a=m"):
        (name,) = named_models.by_name(parsed(*SERVE, "--model", one).model)
        assert name == one.rpartition("=")[0]


@pytest.mark.parametrize("command", ASKING)
def test_every_command_that_asks_a_provider_names_a_model(command: str) -> None:
    beside = [*ASKING[command], "--server", "h:1", "--insecure"]

    def asked(*options: str) -> Any:
        server = provider_of(parsed(command, *beside, *options)).server
        assert server is not None
        return server.served_model

    assert asked() == "" and asked("--served-model", "b") == "b"
    with pytest.raises(InputError, match="--served-model must be up to 64 letters.* found 'b c'"):
        asked("--served-model", "b c")
    with pytest.raises(InputError, match="--served-model must be"):
        asked("--served-model", "")


@pytest.mark.parametrize(
    "command",
    [
        ["prepare", "--pool", "p", "--model", "m"],
        ["prepare", "--pool", "p"],
        ["chat", "--model", "m"],
        ["gateway", "--model", "m"],
        ["dp", *ASKING["dp"]],
    ],
)
def test_no_name_is_of_a_model_on_this_machine(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = "--served-model is of a provider elsewhere; give --server, or leave it out"
    assert said in refused(capsys, *command, "--served-model", "b")


def test_a_provider_from_python_has_one_model_asked_for() -> None:
    at = Provider.at("127.0.0.1:1", insecure=True, model="b")
    assert at.server is not None and at.server.served_model == "b"
    with pytest.raises(InputError, match=re.escape("model must be up to 64 letters")):
        Provider.at("127.0.0.1:1", insecure=True, model="b/c")
