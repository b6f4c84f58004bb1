"""`--watermark`: what is kept before text is shown, what is refused, and a whole run."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.tokenizer import Tokenizer
from spu_llm.api import completion
from spu_llm.api.completion import CompletionCall
from spu_llm.api.defaults import shipped
from spu_llm.api.events import Event, Text
from spu_llm.api.marking import Marking
from spu_llm.api.provider import Provider
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from spu_llm.service.client import Server
from spu_llm.systems.decoding.records import ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.watermark.history import History, HistoryFile, history_path
from spu_llm.systems.watermark.keys import Scheme, write_key
from spu_llm.systems.watermark.private_text import USED
from spu_llm.systems.watermark.race_marks import MarkedNoise
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S
from tests.kit.processes import ERROR, Start
from tests.systems.watermark.chains import key_of

RACE = Scheme(4, method="race")


def test_the_history_has_contexts_before_text_is_shown(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the events of a session, in the order in which they come; the file itself is read."""
    path, name, seen = tmp_path / "key.history", b"\0abcdefg", []

    def session(*args: Any, **more: Any) -> Any:
        on_event = args[4]
        on_event({"event": USED, "names": [name.hex()]}, None)
        on_event({"event": "text", "text": "x"}, None)
        raise InputError("enough")

    def shown(event: Event) -> None:
        seen.append((type(event), path.read_bytes().endswith(name)))

    monkeypatch.setattr(completion, "run_as_client", session)
    request, inputs = Request(4, 9, 0, 0.8, "race"), ClientInputs([40] * 4, str(pair.public))
    provider = Provider("local", Server("127.0.0.1", 1, "local"), pair.private, None, 1)
    with HistoryFile(path, key_of(2)) as history, pytest.raises(InputError, match="enough"):
        marking = Marking((key_of(2),), RACE, (history,))
        call = CompletionCall(
            request, inputs, provider, Tokenizer.load(pair.public), marking=marking
        )
        completion.complete(call, shown)
    assert seen == [(Text, True)]
    assert marking.told == {"method": "race", "ngram": 4, "keys": 1}


@pytest.mark.parametrize(
    ("key", "options", "words"),
    [
        ("race", [], ["add --verify race"]),
        ("race", ["--verify", "race", "--temperature", "0"], ["no greedy"]),
        ("none", ["--verify", "race"], ["keygen makes one"]),
        ("open", ["--verify", "race"], ["chmod 600"]),
        ("candidates", ["--verify", "race"], ["by candidates", "--candidates 4", "--race"]),
        ("candidates", ["--candidates", "17"], ["--candidates must be 2 to 16", "17"]),
        ("candidates", ["--candidates", "4", "--show-progress"], ["--show-progress", "leave"]),
        ("candidates", ["--candidates", "4", "--verify", "post"], ["--verify token or race"]),
        ("candidates", ["--candidates", "4", "--temperature", "0"], ["--temperature 0"]),
        ("race", ["--verify", "race", "--candidates", "4"], ["without --candidates"]),
        ("foreign", ["--verify", "race"], ["another tokenizer", "--tokenizer"]),
        ("busy", ["--verify", "race"], ["in use by another run"]),
        ("stray", ["--verify", "race"], ["no history of this key"]),
    ],
)
def test_what_is_refused(
    key: str,
    options: Sequence[str],
    words: Sequence[str],
    pair: Pair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = Tokenizer.load(pair.public).digest
    schemes = {
        "race": RACE,
        "open": RACE,
        "busy": RACE,
        "stray": RACE,
        "candidates": Scheme(),
        "foreign": Scheme(method="race", tokenizer="other"),
    }
    path = tmp_path / key
    if key in schemes:
        scheme = schemes[key]
        write_key(path, key_of(1), replace(scheme, tokenizer=scheme.tokenizer or own))
    held = open(history_path(path), "ab")  # noqa: SIM115
    history_path(path).chmod(0o600)
    if key == "open":
        path.chmod(0o644)
    elif key == "busy":
        fcntl.flock(held, fcntl.LOCK_EX)
    elif key == "stray":
        held.write(b"of another one")
        held.flush()
    with held, pytest.raises(SystemExit) as end:
        cli.main([*pair.demo, "--watermark", str(path), *options])
    heard = capsys.readouterr()
    (line,) = (line for line in heard.err.splitlines() if line.startswith(ERROR))
    assert end.value.code == 2 and heard.out == "" and all(word in line for word in words), line


@pytest.mark.parametrize(
    ("kinds", "candidates", "words"),
    [
        (("a", "b"), 3, ["2 keys", "among 4 or 9 or 16", "found 3"]),
        (("a", "b"), 25, ["among 4 or 9 or 16", "found 25"]),
        (("a", "b", "c", "d", "e"), 16, ["5 keys have no choice among 16"]),
        (("a", "a"), 4, ["several different ones"]),
        (("a", "other"), 4, ["the same options"]),
        (("race", "more"), 1, ["of a race", "give one"]),
    ],
)
def test_several_keys_that_are_refused(
    kinds: Sequence[str],
    candidates: int,
    words: Sequence[str],
    pair: Pair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = Tokenizer.load(pair.public).digest
    schemes = {kind: Scheme() for kind in "abcde"} | {
        "other": Scheme(3),
        "race": RACE,
        "more": RACE,
    }
    given = []
    for kind in kinds:
        given += ["--watermark", str(tmp_path / kind)]
        if not (tmp_path / kind).exists():
            write_key(tmp_path / kind, key_of(ord(kind[0])), replace(schemes[kind], tokenizer=own))
    with pytest.raises(SystemExit) as end:
        cli.main([*pair.demo, *given, "--candidates", str(candidates)])
    heard = capsys.readouterr()
    (line,) = (line for line in heard.err.splitlines() if line.startswith(ERROR))
    assert end.value.code == 2 and heard.out == "" and all(word in line for word in words), line


@pytest.mark.slow
def test_two_processes_mark_what_its_key_finds(start: Start, tmp_path: Path) -> None:
    """The shipped pair; the text alone is looked at. A second run leaves out what the first used,
    and neither shows the key.
    """
    public = Tokenizer.load(shipped("public"))
    key, file = tmp_path / "key", tmp_path / "result.json"
    write_key(key, key_of(0), replace(RACE, tokenizer=public.digest))
    sizes, tokens = [], []
    for new in (28, 2):
        demo = start(
            "demo",
            "--verify",
            "race",
            "--watermark",
            str(key),
            "--temperature",
            "1",
            "--max-new-tokens",
            str(new),
            "--json",
            str(file),
        )
        assert demo.wait(RUN_S) == 0, demo.stderr
        result = json.loads(file.read_text())
        assert result["config"]["watermark"] == {"method": "race", "ngram": 4, "keys": 1}
        said = file.read_text() + demo.stdout + demo.stderr
        assert key_of(0).secret.hex() not in said and str(key_of(0).secret) not in said
        sizes.append(history_path(key).stat().st_size)
        tokens.append(result["token_ids"])
        if len(tokens) == 1:
            (text := tmp_path / "text").write_text(result["text"])
    header = len(history_path(key).read_bytes().split(b"\n")[0]) + 1
    noise = MarkedNoise(key_of(0), 4, public.vocab_size, History())
    first = noise.names(tokens[0], 0, len(tokens[0]))
    assert 8 * len(first) <= sizes[0] - header <= 8 * (len(first) + 5)
    both = first | noise.names(tokens[1], 0, len(tokens[1]))
    assert 8 * len(both) <= sizes[1] - header
    told = tmp_path / "found.json"
    detect = start(
        "watermark",
        "detect",
        str(text),
        "--key",
        str(key),
        "--tokenizer",
        str(shipped("public")),
        "--json",
        str(told),
    )
    assert detect.wait(RUN_S) == 0 and detect.stdout.startswith("marked")
    assert json.loads(told.read_text())["log10_p"] < -6


@pytest.mark.slow
@pytest.mark.parametrize(("count", "candidates"), [(1, 4), (2, 9)])
def test_two_processes_choose_among_candidates(
    count: int, candidates: int, start: Start, tmp_path: Path
) -> None:
    """The same with candidates, of which a key chooses one, or two keys do: a weaker mark."""
    public = Tokenizer.load(shipped("public"))
    file, told = tmp_path / "result.json", tmp_path / "found.json"
    keys, marked, actual = [], [], []
    for number in range(count):
        keys.append(tmp_path / f"key{number}")
        write_key(keys[-1], key_of(number), Scheme(3, tokenizer=public.digest))
        marked += ["--watermark", str(keys[-1])]
        actual += ["--key", str(keys[-1])]
    demo = start(
        "demo",
        *marked,
        "--candidates",
        str(candidates),
        "--draft-length",
        "1",
        "--temperature",
        "1",
        "--max-new-tokens",
        "40",
        "--seed",
        "5",
        "--json",
        str(file),
    )
    assert demo.wait(RUN_S) == 0, demo.stderr
    result = json.loads(file.read_text())
    assert result["config"]["request.candidates"] == candidates
    assert result["config"]["watermark"] == {"method": "candidates", "ngram": 3, "keys": count}
    assert f"number of candidates: {candidates}" in result["learned"]["provider"]
    said = file.read_text() + demo.stdout + demo.stderr
    for number, key in enumerate(keys):
        assert key_of(number).secret.hex() not in said
        _, names = history_path(key).read_bytes().split(b"\n", 1)
        assert len(names) > 8 * len(result["token_ids"])  # losers' seeds, too
    (text := tmp_path / "text").write_text(result["text"])
    detect = start(
        "watermark",
        "detect",
        str(text),
        *actual,
        "--tokenizer",
        str(shipped("public")),
        "--json",
        str(told),
    )
    assert detect.wait(RUN_S) == 0
    assert json.loads(told.read_text())["log10_p"] < -2
