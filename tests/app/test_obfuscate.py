"""`spu-llm obfuscate`: a prompt among fakes, printed or sent to an endpoint. The fakes repeat from
run to run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spu_llm.app import cli
from tests.kit.command_line import refused
from tests.kit.endpoints import Body, Reply, Serving, choices, serving
from tests.kit.endpoints import refused as refusing
from tests.kit.pair import Pair
from tests.kit.seeded import seed_urandom

PROMPT = "Written by <redacted>Guido</redacted> in 1999."
OWN = "Written by Guido in 1999."


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_urandom(monkeypatch)


@pytest.fixture
def endpoint() -> Iterator[Serving]:
    """Yield an endpoint that says each prompt's length again."""
    with serving(lambda body, number: choices(f" {len(body['prompt'])}")) as server:
        yield server


def ran(file: Path, *options: str) -> Any:
    """Run the command; return what it writes as JSON."""
    with pytest.raises(SystemExit) as end:
        cli.main(["obfuscate", "--prompt", PROMPT, "--json", str(file), *options])
    assert not end.value.code
    return json.loads(file.read_text())


def test_prompts_are_printed_in_the_order_to_send(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = ran(tmp_path / "a.json")
    out, err = capsys.readouterr()
    prompts = [json.loads(line)["prompt"] for line in out.splitlines()]
    count = len(set(prompts))
    assert prompts == made["prompts"] and 5 <= count == len(prompts) <= 9  # as many as are drawn
    assert prompts[made["own"]] == OWN and f"prompt {made['own'] + 1} of {count} is yours" in err
    assert all(one.startswith("Written by ") and one.endswith(" in 1999.") for one in prompts)
    assert "a guess reaches at most" in err and made["bound"] < 0.3


@pytest.mark.slow
def test_an_endpoint_is_asked_for_all_alike(
    endpoint: Serving, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The requests differ in the prompt alone, and all are made, whichever one is the user's."""
    options = ["--endpoint", endpoint.url, "--endpoint-model", "m", "--max-new-tokens", "3"]
    made = ran(tmp_path / "a.json", *options, "--secrets", str(tmp_path / "book"))
    assert [body.pop("prompt") for body in endpoint.asked] == made["prompts"]
    same = {"model": "m", "n": 1, "max_tokens": 3, "temperature": 0.7}
    assert endpoint.asked == [same] * len(made["prompts"])
    assert capsys.readouterr().out.strip() == str(len(OWN))
    assert made["answers"] == [f" {len(prompt)}" for prompt in made["prompts"]]
    # With an account of secrets the same prompt goes out among the same fakes, in the same order.
    assert ran(tmp_path / "b.json", *options, "--secrets", str(tmp_path / "book")) == made


def test_an_endpoint_that_fails_ends_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No answer is shown, whichever prompt it fails at."""

    def fails(body: Body, number: int) -> Reply:
        return choices(" x") if number < 3 else refusing(404, {"error": {"message": "no model"}})

    with serving(fails) as server, pytest.raises(SystemExit) as end:
        cli.main(["obfuscate", "--prompt", PROMPT, "--endpoint", server.url])
    out, err = capsys.readouterr()
    assert end.value.code == 1 and not out and "no model" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompt", "nothing here"), "nothing in the prompt is <redacted>"),
        (("--prompt", "<redacted>x"), "is not closed"),
        (("--min-fakes", "0"), "1 fake prompt at least"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be 1"),
        (("--temperature", "nan"), "--temperature must be 0 to 2"),
    ],
)
def test_what_cannot_be_hidden_is_refused(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert words in refused(capsys, "obfuscate", *options)


@pytest.mark.slow
def test_fakes_as_published_are_named_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = ran(tmp_path / "a.json", "--as-published", "--epsilon", "0.9", "--min-fakes", "1")
    assert made["prompts"][made["own"]] == OWN and "which is wrong" in made["says"]


def test_a_prompt_that_the_public_model_cannot_read_is_refused(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """As published it reads the text about twice, and some words."""
    asked = ["--as-published", "--draft-model", str(pair.public)]
    assert "it reads 64 at most" in refused(capsys, "obfuscate", *asked)
