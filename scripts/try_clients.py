"""Ask a running gateway by client libraries, and print a table of which features work.

    python scripts/try_clients.py http://127.0.0.1:8000 [CLIENT ...]

Install beside it what is to be tried: openai, anthropic, litellm, langchain-openai, httpx. Every
cell is a request to a real session, so this takes minutes. The exit code is 1 where a cell failed.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

MODEL = "private"
KEY = "none"
CHAT = [{"role": "user", "content": "How are lists sorted?"}]
WORDS = 4  # tokens of an answer
FEATURES = ("models", "answer", "stream", "usage", "stop", "next turn", "refusal")
CACHED = 10  # tokens at least that a next turn has not computed again
Cell = Callable[[], bool]


def then(answer: str) -> list[dict[str, str]]:
    """Return the chat after its first answer, and what the user says next."""
    return [*CHAT, {"role": "assistant", "content": answer}, {"role": "user", "content": "So?"}]


def of_openai(base: str) -> dict[str, Cell]:
    """Return what the package `openai` is tried with."""
    import openai

    client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0, timeout=600)

    def create(**more: Any) -> Any:
        return client.chat.completions.create(
            **{"model": MODEL, "messages": CHAT, "max_tokens": WORDS, **more}
        )

    def stream() -> bool:
        chunks = list(create(stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        return bool(text) and chunks[-1].usage.completion_tokens == WORDS

    def next_turn() -> bool:
        more = then(create().choices[0].message.content)
        return create(messages=more).usage.prompt_tokens_details.cached_tokens > CACHED

    def refusal() -> bool:
        try:
            create(logprobs=True)
        except openai.BadRequestError as error:
            return "logprobs" in str(error)
        return False

    return {
        "models": lambda: [m.id for m in client.models.list()] == [MODEL],
        "answer": lambda: bool(create().choices[0].message.content),
        "stream": stream,
        "usage": lambda: create().usage.completion_tokens == WORDS,
        "stop": lambda: "e" not in create(stop="e").choices[0].message.content,
        "next turn": next_turn,
        "refusal": refusal,
    }


def of_responses(base: str) -> dict[str, Cell]:
    """Return what the Responses API of the package `openai` is tried with."""
    import openai

    client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0, timeout=600)

    def create(**more: Any) -> Any:
        return client.responses.create(
            **{"model": MODEL, "input": "How are lists sorted?", "max_output_tokens": 16, **more}
        )

    def stream() -> bool:
        kinds = [event.type for event in create(stream=True)]
        return kinds[0] == "response.created" and kinds[-1] in (
            "response.completed",
            "response.incomplete",
        )

    def refusal() -> bool:
        try:
            create(tools=[{"type": "web_search"}])
        except openai.BadRequestError as error:
            return "tools" in str(error)
        return False

    def next_turn() -> bool:
        more = then(create().output_text)
        return create(input=more).usage.input_tokens_details.cached_tokens > CACHED

    return {
        "answer": lambda: bool(create().output_text),
        "stream": stream,
        "usage": lambda: create().usage.output_tokens > 0,
        "next turn": next_turn,
        "refusal": refusal,
    }


def of_anthropic(base: str) -> dict[str, Cell]:
    """Return what the package `anthropic` is tried with."""
    import anthropic

    client = anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0, timeout=600)

    def create(**more: Any) -> Any:
        return client.messages.create(
            **{"model": MODEL, "messages": CHAT, "max_tokens": WORDS, **more}
        )

    def stream() -> bool:
        with client.messages.stream(model=MODEL, messages=CHAT, max_tokens=WORDS) as events:
            return bool("".join(events.text_stream))

    def refusal() -> bool:
        try:
            create(extra_body={"top_k": 5})
        except anthropic.BadRequestError as error:
            return "top_k" in str(error)
        return False

    def next_turn() -> bool:
        more = then(create().content[0].text)
        return create(messages=more).usage.cache_read_input_tokens > CACHED

    return {
        "models": lambda: [m.id for m in client.models.list()] == [MODEL],
        "answer": lambda: bool(create().content[0].text),
        "stream": stream,
        "usage": lambda: create().usage.output_tokens == WORDS,
        "stop": lambda: "e" not in "".join(c.text for c in create(stop_sequences=["e"]).content),
        "next turn": next_turn,
        "refusal": refusal,
    }


def of_litellm(base: str) -> dict[str, Cell]:
    """Return what the package `litellm` is tried with."""
    import litellm

    def create(**more: Any) -> Any:
        asked = {"messages": CHAT, "max_tokens": WORDS, "timeout": 600, **more}
        return litellm.completion(f"openai/{MODEL}", api_base=f"{base}/v1", api_key=KEY, **asked)

    def stream() -> bool:
        return bool("".join(c.choices[0].delta.content or "" for c in create(stream=True)))

    def refusal() -> bool:
        try:
            create(logprobs=True)
        except litellm.BadRequestError as error:
            return "logprobs" in str(error)
        return False

    def next_turn() -> bool:
        more = then(create().choices[0].message.content)
        return create(messages=more).usage.prompt_tokens_details.cached_tokens > CACHED

    return {
        "answer": lambda: bool(create().choices[0].message.content),
        "stream": stream,
        "usage": lambda: create().usage.completion_tokens == WORDS,
        "stop": lambda: "e" not in (create(stop=["e"]).choices[0].message.content or ""),
        "next turn": next_turn,
        "refusal": refusal,
    }


def of_langchain(base: str) -> dict[str, Cell]:
    """Return what the package `langchain-openai` is tried with."""
    from langchain_openai import ChatOpenAI

    def model(**more: Any) -> Any:
        return ChatOpenAI(
            model=MODEL, base_url=f"{base}/v1", api_key=KEY, max_tokens=WORDS, max_retries=0, **more
        )

    def refusal() -> bool:
        try:
            model(logprobs=True).invoke("hello")
        except Exception as error:
            return "logprobs" in str(error)
        return False

    def next_turn() -> bool:
        more = then(model().invoke(CHAT).content)
        return model().invoke(more).usage_metadata["input_token_details"]["cache_read"] > CACHED

    return {
        "answer": lambda: bool(model().invoke("How are lists sorted?").content),
        "stream": lambda: bool("".join(p.content for p in model().stream("How are lists sorted?"))),
        "usage": lambda: model().invoke("hello").usage_metadata["output_tokens"] == WORDS,
        "stop": lambda: "e" not in model(stop=["e"]).invoke("hello").content,
        "next turn": next_turn,
        "refusal": refusal,
    }


def of_httpx(base: str) -> dict[str, Cell]:
    """Return what plain HTTP by the package `httpx` is tried with."""
    import httpx

    client = httpx.Client(base_url=base, timeout=600)
    body: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": WORDS}

    def post(**more: Any) -> Any:
        return client.post("/v1/chat/completions", json={**body, **more})

    def text(**more: Any) -> str:
        return post(**more).json()["choices"][0]["message"]["content"]

    def next_turn() -> bool:
        usage = post(messages=then(text())).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"] > CACHED

    return {
        "models": lambda: client.get("/v1/models").json()["data"][0]["id"] == MODEL,
        "answer": lambda: bool(text()),
        "stream": lambda: post(stream=True).text.endswith("data: [DONE]\n\n"),
        "usage": lambda: "x-spu-llm-seconds-online" in post().headers,
        "stop": lambda: "e" not in text(stop="e"),
        "next turn": next_turn,
        "refusal": lambda: post(logprobs=True).status_code == 400,
    }


def of_curl(base: str) -> dict[str, Cell]:
    """Return what the program `curl` is tried with."""

    def get(path: str, *options: str) -> str:
        command = ["curl", "--silent", "--no-buffer", *options, f"{base}{path}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def post(**more: Any) -> str:
        body = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": WORDS, **more})
        return get("/v1/chat/completions", "-H", "content-type: application/json", "-d", body)

    def text(**more: Any) -> str:
        return json.loads(post(**more))["choices"][0]["message"]["content"]

    def next_turn() -> bool:
        usage = json.loads(post(messages=then(text())))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"] > CACHED

    return {
        "models": lambda: json.loads(get("/v1/models"))["data"][0]["id"] == MODEL,
        "answer": lambda: bool(text()),
        "stream": lambda: post(stream=True).endswith("data: [DONE]\n\n"),
        "usage": lambda: "spu_llm" in json.loads(post())["usage"],
        "stop": lambda: "e" not in text(stop="e"),
        "next turn": next_turn,
        "refusal": lambda: (
            "tools" in json.loads(post(tools=[{"type": "function"}]))["error"]["message"]
        ),
    }


CLIENTS: dict[str, tuple[str, Callable[[str], dict[str, Cell]]]] = {
    "openai, chat": ("openai", of_openai),
    "openai, responses": ("openai", of_responses),
    "anthropic": ("anthropic", of_anthropic),
    "litellm": ("litellm", of_litellm),
    "langchain-openai": ("langchain-openai", of_langchain),
    "httpx": ("httpx", of_httpx),
    "curl": ("", of_curl),
}


def version_of(package: str) -> str | None:
    """Return the version of a package, or of curl; None where it is not there."""
    if not package:
        if shutil.which("curl") is None:
            return None
        return subprocess.run(["curl", "-V"], capture_output=True, text=True).stdout.split()[1]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _does(cell: Cell) -> bool:
    """Return whether a cell works; an error is told, and is none of the others'."""
    try:
        return cell()
    except Exception as error:  # a client may raise anything
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return False


def main() -> int:
    """Print the table; return the exit code."""
    base, failed = sys.argv[1].rstrip("/"), 0
    chosen = sys.argv[2:] or list(CLIENTS)
    print(f"| client | version | {' | '.join(FEATURES)} |")
    print("|---" * (2 + len(FEATURES)) + "|")
    for name in chosen:
        package, cells_of = CLIENTS[name]
        if (version := version_of(package)) is None:
            continue
        cells, row = cells_of(base), []
        for feature in FEATURES:
            works = "" if feature not in cells else "yes" if _does(cells[feature]) else "no"
            failed += works == "no"
            row.append(works)
        print(f"| {name} | {version} | {' | '.join(row)} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
