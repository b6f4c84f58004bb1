"""`chat`: between two processes, and what it does around sessions."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.chat import Message, Template
from models.tokenizer import Tokenizer
from spu_llm.api import conversation, texts
from spu_llm.api.client import Client, CompletionOptions
from spu_llm.api.conversation import Conversation
from spu_llm.app import cli, conversing
from spu_llm.app.screen import Screen
from spu_llm.core.errors import InputError, PeerError, WorkerError
from spu_llm.net.relay import Counters
from spu_llm.systems.decoding.chat_request import ChatRequest
from spu_llm.systems.decoding.records import ClientInputs
from tests.kit.models import save_tokenizer
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S
from tests.kit.processes import ERROR, Command, Start

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the pair's private model, as one that chats."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(pair.private, directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def chat(port: int, *options: str) -> list[str]:
    return [
        "chat",
        "--server",
        f"127.0.0.1:{port}",
        "--insecure",
        "--temperature",
        "0",
        "--standard",
        *options,
    ]


def answers(command: Command) -> list[str]:
    """Return what was said of each answer in the end."""
    return [line for line in command.stderr.splitlines() if " of preprocessing, ended by " in line]


@pytest.mark.slow
def test_turns_between_two_processes(start: Start, pair: Pair, model: Path, tmp_path: Path) -> None:
    """In one session, whose cache stays; an answer that is interrupted ends, and the chat goes
    on.
    """
    server = start("serve", "--model", str(model), "--listen", "127.0.0.1:0", "--insecure")
    talking = start(*chat(server.until_listening(), "--max-new-tokens", "12"), talks=True)
    talking.say("hi\n")
    talking.until_phase("decoding")
    talking.send(signal.SIGINT)
    talking.until_count("stderr", "ended by interrupted]", 1)
    talking.say("a\n")
    talking.until_count("stderr", "of preprocessing, ended by", 2)
    talking.say(None)
    assert talking.wait(RUN_S) == 0, talking.stderr
    assert "[12 tokens in" in answers(talking)[1]
    assert talking.stderr.count("[prefilling") >= 1 and talking.stderr.count("connecting") == 1
    assert "the public prefix, 6 tokens" in talking.stderr
    assert "rows of the next turn: 2 x 64 bit in 2 openings" in talking.stderr
    assert not server.stderr.count(ERROR)


@pytest.mark.slow
def test_one_turn_is_a_completion_of_the_chat(
    start: Start, pair: Pair, model: Path, tmp_path: Path
) -> None:
    """With both parties here; --json as of generate."""
    out = tmp_path / "turn.json"
    one = start(
        "chat",
        "--model",
        str(model),
        "--prompt",
        "hi",
        "--system",
        "be brief",
        "--max-new-tokens",
        "3",
        "--temperature",
        "0",
        "--json",
        str(out),
        "--draft-model",
        str(pair.public),
        "--draft-length",
        "2",
    )
    assert one.wait(RUN_S) == 0, one.stderr
    result = json.loads(out.read_text())
    assert result["text"] + "\n" == one.stdout and len(result["token_ids"]) == 3
    assert "the public prefix, 8 tokens" in "".join(result["learned"]["provider"])  # <system>


# ---- sessions


class Sessions:
    """Stand for sessions: each answers its turns by what they are, and ends after so many."""

    def __init__(self, *lengths: int, error: type[Exception] | None = None) -> None:
        self.begun: list[list[int]] = []  # tokens of each session's first turn
        self.turns: list[Any] = []  # what was said to workers
        self._lengths, self._error = list(lengths), error

    def run_as_client(
        self,
        server: Any,
        program: Any,
        request: ChatRequest,
        inputs: ClientInputs,
        on_event: Callable[[dict[str, Any], Any], None],
        *,
        look: Callable[[], None],
        hears: Callable[[Callable[..., None]], None],
        **rest: Any,
    ) -> Any:
        assert request.prompt_tokens == len(inputs.prompt)
        self.begun.append([*request.public_prefix, *inputs.prompt])
        said: list[dict[str, Any]] = []
        hears(lambda **words: said.append(words))
        for number in range(self._lengths.pop(0)):
            answer = f"answer {number}"
            report = {"finish_reason": "length", "steps": 1, "drafted": 0, "accepted": 0}
            ways = [
                f"{way}_{what}" for way in ("sent", "received") for what in ("bytes", "messages")
            ]
            traffic = {phase: dict.fromkeys(ways, 1) for phase in ("offline", "prefill", "decode")}
            seconds = {"offline": 0.0, "prefill": 0.0, "decode": 0.0}
            on_event(
                {
                    "event": "answer",
                    "text": answer,
                    "token_ids": [1],
                    "report": report,
                    "seconds": seconds,
                    "traffic": traffic,
                },
                SimpleNamespace(snapshot=Counters),
            )
            look()
            self.turns += said
            if said and "end" in said[-1]:
                break
            said.clear()
        else:
            if self._error is not None:
                raise self._error("it went away")
        return SimpleNamespace(result={"learned": {}}), {}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    save_tokenizer(tmp_path)
    return Tokenizer.load(tmp_path)


def held(
    tokenizer: Tokenizer,
    sessions: Sessions,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    template: str = TEMPLATE,
) -> None:
    """Hold a chat in which the user says `lines`."""
    coming = [*lines, None]
    monkeypatch.setattr(conversation, "run_as_client", sessions.run_as_client)
    monkeypatch.setattr(conversing, "ask", lambda words: coming.pop(0))
    monkeypatch.setattr(texts, "render_apart", Template.render)
    text = SimpleNamespace(
        tokenizer=tokenizer, template=Template(template), digest="", after_prompt=()
    )
    provider: Any = SimpleNamespace(
        jobs=1,
        hint_cache=1,
        text_format=lambda: SimpleNamespace(text=text, path=Path("format")),
        server=None,
        reached=lambda seed: nullcontext((None, None)),
    )
    options = CompletionOptions(max_new_tokens=5, temperature=0.0, draft_length=0)
    with closing(Screen("")) as screen:
        conversing.hold(Conversation(provider, options), screen)


def whole(tokenizer: Tokenizer, *messages: Message) -> str:
    return Template(TEMPLATE).render(messages)


def test_a_turn_sends_what_it_adds_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = Sessions(5)
    held(tokenizer, sessions, ["hi", " ", "and?"], monkeypatch)
    assert [tokenizer.decode(tokens) for tokens in sessions.begun] == ["<user>hi\n<assistant>"]
    (turn, end) = sessions.turns
    assert tokenizer.decode(turn["turn"]) == "\n<user>and?\n<assistant>" and end == {"end": True}


@pytest.mark.parametrize("error", [None, PeerError])
def test_the_next_session_begins_with_all_that_was_said(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    sessions = Sessions(1, 5, error=error)
    held(tokenizer, sessions, ["hi", "and?"], monkeypatch)
    said = Message("user", "hi"), Message("assistant", "answer 0"), Message("user", "and?")
    assert [tokenizer.decode(tokens) for tokens in sessions.begun] == [
        whole(tokenizer, said[0]),
        whole(tokenizer, *said),
    ]


def test_a_template_that_rewrites_the_past_begins_a_session(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = "<user>{{ messages[-1]['content'] }}<assistant>"
    sessions = Sessions(5, 5)
    held(tokenizer, sessions, ["hi", "and?"], monkeypatch, last)
    assert [tokenizer.decode(tokens) for tokens in sessions.begun] == [
        "<user>hi<assistant>",
        "<user>and?<assistant>",
    ]


def test_a_provider_that_never_answers_ends_the_chat(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PeerError, match="it went away"):
        held(tokenizer, Sessions(0, error=PeerError), ["hi"], monkeypatch)


def test_ctrl_c_stops_an_answer_once_and_then_everything(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[dict[str, Any]] = []

    def run_as_client(*args: Any, look: Any, hears: Any, **rest: Any) -> Any:
        hears(lambda **words: stops.append(words))
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            look()
            look()
        raise AssertionError("it goes on")

    sessions = Sessions()
    monkeypatch.setattr(sessions, "run_as_client", run_as_client)
    with pytest.raises(KeyboardInterrupt):
        held(tokenizer, sessions, ["hi"], monkeypatch)
    assert stops == [{"stop": True}]


def test_a_worker_that_has_ended_hears_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since nobody said anything for long: what is said then begins a session."""
    sessions = Sessions(1, 5)
    real = sessions.run_as_client

    def run_as_client(*args: Any, hears: Any, **rest: Any) -> Any:
        first = not sessions.begun

        def hear(tell: Any) -> None:
            def said(**words: Any) -> None:
                if first:
                    raise WorkerError("the worker process ended early (exit code 0)")
                tell(**words)

            hears(said)

        return real(*args, hears=hear, **rest)

    monkeypatch.setattr(sessions, "run_as_client", run_as_client)
    held(tokenizer, sessions, ["hi", "and?"], monkeypatch)
    assert len(sessions.begun) == 2


# ---- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "one of the arguments --server --model is required"),
        (["--model", "{pair}", "--prompt", "hi"], "has no chat template"),
        (["--model", "{model}", "--json", "x.json"], "--json is of one turn"),
        (["--model", "{model}", "--prompt", ""], "the prompt is empty"),
        (["--model", "{model}", "--prompt", "a", "--system", ""], "--system is empty"),
        (["--model", "{model}", "--draft-length", "0"], "--draft-length must be 1 to 32"),
        (["--model", "{model}", "--prompt", "a" * 300, "--standard"], "context is 64"),
    ],
)
def test_bad_input(
    options: list[str],
    words: str,
    pair: Pair,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [option.format(pair=pair.private, model=model) for option in options]
    with pytest.raises(SystemExit) as end:
        cli.main(["chat", *given])
    errors = capsys.readouterr().err
    assert end.value.code == 2 and errors.count(ERROR) == 1 and words in errors, errors


def test_messages_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match="UTF-8"):
        texts.messages_of(None, "\udcff")


def test_generate_takes_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the template, with the options of a completion."""
    asked: list[Any] = []

    def chat(self: Any, messages: list[Message], options: Any, *rest: Any, **more: Any) -> Any:
        asked.append((messages, options.max_new_tokens))
        raise PeerError("enough")

    monkeypatch.setattr(Client, "chat", chat)
    given = ["generate", "--server", "127.0.0.1:1", "--insecure", "--prompt", "hi"]
    turn = [*given, "--chat", "--system", "be brief", "--max-new-tokens", "9"]
    with pytest.raises(SystemExit) as end:
        cli.main(turn)
    assert end.value.code == 1
    assert asked == [([Message("system", "be brief"), Message("user", "hi")], 9)]


def test_a_system_message_is_of_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", "--server", "127.0.0.1:1", "--insecure", "--prompt", "hi"]
    with pytest.raises(SystemExit) as end:
        cli.main([*given, "--system", "be brief"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "spu-llm: error: --system is of a chat; add --chat\n"
