"""`spu-llm gateway` as a process, before a real provider: what programs get, and how it ends."""

from __future__ import annotations

import json
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from models.draft import Drafter
from models.hf import load_model
from models.tokenizer import Tokenizer
from tests.kit.command_line import refused
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Command, Start

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def that_chats(model: Path, copy: Path) -> Path:
    """Return a copy of a model, as one that chats."""
    shutil.copytree(model, copy)
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return copy


@pytest.fixture
def model(pair: Pair, tmp_path: Path) -> Path:
    """Return the pair's private model, as one that chats."""
    return that_chats(pair.private, tmp_path / "model")


@pytest.fixture
def parties(start: Start, model: Path) -> Iterator[tuple[Command, Command, openai.OpenAI]]:
    """Yield a provider, a gateway before it, and a program's client."""
    server = start("serve", "--model", str(model), "--listen", "127.0.0.1:0", "--insecure")
    place = f"127.0.0.1:{server.until_listening()}"
    options = ["--insecure", "--listen", "127.0.0.1:0", "--standard"]
    gateway = start("gateway", "--server", place, *options)
    base = f"http://127.0.0.1:{gateway.until_listening()}/v1"
    yield server, gateway, openai.OpenAI(base_url=base, api_key="x", max_retries=0, timeout=RUN_S)


def greedy(model: Path, turns: list[str], tokens: int) -> list[str]:
    """Return the model's likeliest answers to the turns of a chat, in plaintext, each after its own
    tokens before.
    """
    tokenizer = Tokenizer.load(model)
    drafter = Drafter(*load_model(model), 64)
    text: list[int] = []
    answers = []
    for turn in turns:
        # By TEMPLATE: a line ends after the answer before.
        added = ("\n" if text else "") + f"<user>{turn}\n<assistant>"
        text += tokenizer.encode(added, goes_on=bool(text))
        start = len(text)
        for _ in range(tokens):
            text.append(int(np.argmax(drafter.logits(text))))
        answers.append(tokenizer.decode(text[start:]))
    return answers


def test_programs_get_the_models_text(
    parties: tuple[Command, Command, openai.OpenAI], model: Path
) -> None:
    """One program leaves in the middle of its answer; the next one is answered, by float32's text,
    and goes on in its session. The gateway ends in seconds, and nothing of it is left.
    """
    server, gateway, client = parties
    stream = client.chat.completions.create(
        model="private", messages=HELLO, max_tokens=40, stream=True
    )
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    assert eventually(lambda: any(p.is_worker for p in gateway.processes()), 60.0)
    stream.close()
    got = client.chat.completions.create(
        model="private", messages=HELLO, max_tokens=4, temperature=0
    )
    first = got.choices[0].message.content
    assert first == greedy(model, ["hi"], 4)[0] and got.choices[0].finish_reason == "length"
    assert got.usage is not None and got.usage.completion_tokens == 4
    assert got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens == 6  # the template's public words
    more = [*HELLO, {"role": "assistant", "content": first}, {"role": "user", "content": "so"}]
    got = client.chat.completions.create(
        model="private", messages=more, max_tokens=4, temperature=0
    )
    assert got.choices[0].message.content == greedy(model, ["hi", "so"], 4)[1]
    assert got.usage is not None and got.usage.prompt_tokens_details is not None
    # The first turn, its answer but for the last token.
    before = got.usage.prompt_tokens_details.cached_tokens
    assert before is not None and 3 < before < got.usage.prompt_tokens
    client.chat.completions.create(model="private", messages=HELLO, max_tokens=1)
    with urllib.request.urlopen(f"{str(client.base_url)[:-4]}/privacy") as answer:
        learned = json.load(answer)["learned"]  # by the chat before, which gave its place
    assert any("rows of the next turn" in fact for fact in learned["provider"])
    gateway.send(signal.SIGTERM)
    assert gateway.wait(20) == 128 + signal.SIGTERM
    gateway.assert_gone(5)
    assert "Traceback" not in gateway.stderr and not gateway.errors
    assert server.processes()


@pytest.mark.slow
def test_all_models_of_a_provider_can_be_asked(
    start: Start, model: Path, pair: Pair, tmp_path: Path
) -> None:
    """By the provider's names; what is of one model alone is refused in a line."""
    models = {"large": model, "small": that_chats(pair.public, tmp_path / "small")}
    named = [f"--model={name}={place}" for name, place in models.items()]
    server = start("serve", *named, "--listen", "127.0.0.1:0", "--insecure", "--sessions", "2")
    place = f"127.0.0.1:{server.until_listening()}"
    common = ["gateway", "--server", place, "--insecure", "--listen", "127.0.0.1:0"]
    for option, value in (("--name", "mine"), ("--draft-model", str(pair.public))):
        refused = start(*common, option, value)
        refused.assert_failed(2, f"{option} is of one model", "large, small", within_s=RUN_S)
    gateway = start(*common, "--standard", "--keep", "0")
    base = f"http://127.0.0.1:{gateway.until_listening()}/v1"
    client = openai.OpenAI(base_url=base, api_key="x", max_retries=0, timeout=RUN_S)
    assert [one.id for one in client.models.list()] == list(models)
    for name in ("small", "large"):
        answer = client.chat.completions.create(
            model=name, messages=HELLO, max_tokens=3, temperature=0
        )
        assert answer.model == name
        assert answer.choices[0].message.content == greedy(models[name], ["hi"], 3)[0]


@pytest.mark.slow
def test_a_session_is_ready_before_a_chat(parties: tuple[Command, Command, openai.OpenAI]) -> None:
    """With all that its first turn takes; the provider learns rounded lengths."""
    _, gateway, client = parties

    def health() -> Any:
        with urllib.request.urlopen(f"{str(client.base_url)[:-4]}/health") as answer:
            return json.load(answer)

    assert eventually(lambda: [one["batches_lacking"] for one in health()["ready"]] == [0], RUN_S)
    assert health()["ready"][0]["prompt_tokens"] == 32
    got = client.chat.completions.create(model="private", messages=HELLO, max_tokens=2)
    assert got.usage is not None and got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens == 6
    assert got.usage.completion_tokens == 2
    gateway.send(signal.SIGTERM)
    assert gateway.wait(30) == 128 + signal.SIGTERM
    gateway.assert_gone(5)


@pytest.mark.slow
def test_answers_to_a_request_are_draws(start: Start, model: Path) -> None:
    """Each in a session, by a seed of its own; at temperature 0 there is one, twice."""
    options = ["--listen", "127.0.0.1:0", "--standard", "--keep", "0"]
    gateway = start("gateway", "--model", str(model), *options)
    base = f"http://127.0.0.1:{gateway.until_listening()}/v1"
    client = openai.OpenAI(base_url=base, api_key="x", max_retries=0, timeout=RUN_S)
    create = client.chat.completions.create
    chunks = create(
        model="private", messages=HELLO, max_tokens=4, temperature=1, n=2, seed=5, stream=True
    )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts[0] != texts[1]
    one = create(model="private", messages=HELLO, max_tokens=4, temperature=1, seed=6)
    assert one.choices[0].message.content == texts[1]
    two = create(model="private", messages=HELLO, max_tokens=4, temperature=0, n=2)
    answer = greedy(model, ["hi"], 4)[0]
    assert [choice.message.content for choice in two.choices] == [answer] * 2
    assert two.usage is not None and two.usage.completion_tokens == 4
    gateway.send(signal.SIGTERM)
    assert gateway.wait(20) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_stopped_answer_is_gone_on_from(parties: tuple[Command, Command, openai.OpenAI]) -> None:
    """After the step that is computed; the next turn has the rows of what was written."""
    _, gateway, client = parties
    create = client.chat.completions.create
    stream = create(model="private", messages=HELLO, max_tokens=40, stream=True)
    name = stream.response.headers["x-spu-llm-request"]
    text = ""
    for chunk in stream:
        if not text and chunk.choices[0].delta.content:
            body = client.post(f"/requests/{name}/stop", body={}, cast_to=object)
            assert body == {"stopped": True}
        text += chunk.choices[0].delta.content or ""
    assert chunk.choices[0].finish_reason == "stop"
    more = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "so"}]
    got = create(model="private", messages=more, max_tokens=2)
    assert got.usage is not None and got.usage.prompt_tokens_details is not None
    assert (got.usage.prompt_tokens_details.cached_tokens or 0) > 6  # the template's public words
    gateway.send(signal.SIGTERM)
    assert gateway.wait(20) == 128 + signal.SIGTERM


def test_a_provider_that_has_gone_is_said(parties: tuple[Command, Command, openai.OpenAI]) -> None:
    server, gateway, client = parties
    server.send(signal.SIGKILL)
    server.wait(END_S)
    with pytest.raises(openai.APIStatusError) as refusal:
        client.chat.completions.create(model="private", messages=HELLO)
    assert refusal.value.status_code == 502
    gateway.send(signal.SIGINT)
    assert gateway.wait(20) == 130


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "0.0.0.0:0"), "give --token-file"),
        (("--listen", "127.0.0.1:0", "--token-file", "short"), "16 printable ASCII"),
        (("--listen", "127.0.0.1:0", "--token-file", "absent"), "cannot read"),
        (("--listen", "127.0.0.1:0", "--at-once", "0"), "--at-once must be 1 to"),
        (("--listen", "here"), "--listen"),
        (("--pool", "pool", "--keep", "2"), "give --keep 0 or 1"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pair: Pair,
    tmp_path: Path,
    options: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("abc\n")
    assert words in refused(capsys, "gateway", "--model", str(pair.private), *options)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_too(parties: tuple[Command, Command, openai.OpenAI]) -> None:
    """While a chat is open, and an answer is being written."""
    _, gateway, client = parties
    client.chat.completions.create(model="private", messages=HELLO, max_tokens=1)
    other: list[Any] = [{"role": "user", "content": "other"}]
    stream = client.chat.completions.create(
        model="private", messages=other, max_tokens=40, stream=True
    )
    next(iter(stream))
    gateway.send(signal.SIGINT)
    time.sleep(0.5)
    gateway.send(signal.SIGINT)
    assert gateway.wait(30) == 130
    gateway.assert_gone(5)
    stream.close()


def test_a_taken_address_is_refused(start: Start, pair: Pair) -> None:
    options = ["--model", str(pair.private), "--listen"]
    first = start("gateway", *options, "127.0.0.1:0")
    port = first.until_listening()
    second = start("gateway", *options, f"127.0.0.1:{port}")
    second.assert_failed(2, "give another address", within_s=RUN_S)
