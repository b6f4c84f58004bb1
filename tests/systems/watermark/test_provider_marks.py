"""`serve --mark` and what `watermark detect` makes of its texts."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling
from protocols.verification.marked import Marked
from spu_llm.api.defaults import shipped
from spu_llm.app import cli
from spu_llm.systems.watermark import aligning
from spu_llm.systems.watermark.aligning import AlignmentPrior
from spu_llm.systems.watermark.keys import Key, Scheme, read_key, write_key
from spu_llm.systems.watermark.sessions import (
    NONCE_BYTES,
    Session,
    SessionsFile,
    Shape,
    recorded,
    sessions_path,
)
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S
from tests.kit.processes import ERROR, Start
from tests.systems.watermark.chains import key_of


def provider_key(path: Path, tokenizer: Tokenizer, key: Key) -> Path:
    write_key(path, key, Scheme(1, method="provider", tokenizer=tokenizer.digest))
    return path


def ran(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main([*map(str, arguments)])
    printed = capsys.readouterr()
    assert end.value.code == 0, printed.err
    return printed.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main([*map(str, arguments)])
    heard = capsys.readouterr()
    (line,) = (line for line in heard.err.splitlines() if line.startswith(ERROR))
    assert end.value.code == 2 and heard.out == ""
    return line


def test_from_a_key_to_a_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pair: Pair
) -> None:
    """A text of 40 tokens that a model without preferences draws by a recorded session's rows."""
    key, text, told = tmp_path / "key", tmp_path / "text", tmp_path / "found.json"
    said = ran(
        capsys, "watermark", "keygen", "--provider", "--tokenizer", pair.private, "--out", key
    )
    assert "all texts of a provider" in said
    held, tokenizer = read_key(key), Tokenizer.load(pair.private)
    assert (held.scheme.method, held.scheme.tokenizer) == ("provider", tokenizer.digest)
    nonces = [bytes([number]) * NONCE_BYTES for number in range(3)]
    shape = Shape(tokenizer.vocab_size, 0, 50)
    with SessionsFile(sessions_path(key), held.key) as file:
        for nonce in nonces:
            file.add(Session.now(nonce, shape))
    rows, stream = Marked(Sampling()), held.key.session(nonces[1])
    parts = {t: tokenizer.decode([t]) for t in range(shape.vocab)}
    letters = [t for t, p in parts.items() if len(p) == 1 and p.isascii() and p.isalnum()]
    tokens = []
    for _ in range(50):
        noise = rows.provider_input(0, shape.vocab, stream)[0]
        tokens.append(max(letters, key=lambda t: noise[t]))
    text.write_text(tokenizer.decode(tokens), encoding="utf-8")
    detect = ("watermark", "detect", text, "--key", key, "--tokenizer", pair.private)
    said = ran(capsys, *detect, "--json", told, "--references", "99")
    content = json.loads(told.read_text())
    assert said.startswith("marked: p <= ") and nonces[1].hex() in said and "p = 0.03" in said
    assert content["session"]["nonce"] == nonces[1].hex() and content["log10_p"] < -6
    assert (content["sessions"], content["references"], content["rank_p"]) == (3, 99, 0.03)
    other = ran(capsys, *detect, "--session", nonces[0].hex(), "--json", told)
    assert other.startswith("no mark found") and "session " not in other
    assert json.loads(told.read_text())["session"] is None
    page = tmp_path / "page.html"
    alone = ran(
        capsys, *detect, "--session", nonces[1].hex(), "--draft-model", pair.public, "--html", page
    )
    assert alone.startswith("marked") and "of 1 sessions" in alone
    (span,) = (line for line in alone.splitlines() if "characters" in line)
    start, end = (int(word) for word in span.split() if word.isdigit())
    assert start < 5 and end > 45
    (shown,) = re.findall(r"<pre>(.*)</pre>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert html.unescape(re.sub(r"<[^>]*>", "", shown)) == text.read_text(encoding="utf-8")
    assert shown.count("<u>") == 1 and shown.count("<span") > 40
    ran(capsys, *detect, "--session", nonces[0].hex(), "--html", page)
    assert "no mark found" in page.read_text() and "<span" not in page.read_text()
    for options, words in (
        (["--session", "00"], "has no '00'"),
        (["--score", "sum"], "not for a provider's key"),
        (["--html", tmp_path], "is a directory"),
        (["--alpha", "1"], "--alpha"),
        (["--references", "-1"], "--references must be"),
        (["--draft-model", shipped("public")], "another tokenizer"),
        (["--key", key], "alone"),
    ):
        assert words in refused(capsys, *detect, *options)
    sessions_path(key).unlink()
    assert "is missing" in refused(capsys, *detect)


def test_a_key_of_the_other_kind_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pair: Pair
) -> None:
    tokenizer = Tokenizer.load(pair.private)
    key = provider_key(tmp_path / "key", tokenizer, key_of(1))
    race = tmp_path / "race"
    write_key(race, key_of(2), Scheme(4, method="race", tokenizer=tokenizer.digest))
    strange = tmp_path / "strange"
    write_key(strange, key_of(3), Scheme(1, method="provider", tokenizer="x"))
    text = tmp_path / "text"
    text.write_text("def")
    marked = ["--verify", "marked"]
    cases: list[tuple[Sequence[str | Path], str]] = [
        (["watermark", "keygen", "--provider", "--out", tmp_path / "a"], "provider marks tokens"),
        (
            [
                "watermark",
                "keygen",
                "--provider",
                "--race",
                "--tokenizer",
                pair.private,
                "--out",
                tmp_path / "a",
            ],
            "not allowed with",
        ),
        (["watermark", "embed", "--key", key, "--model", pair.private], "embed takes another one"),
        (
            [
                "watermark",
                "detect",
                text,
                "--key",
                race,
                "--tokenizer",
                pair.private,
                "--session",
                "00",
            ],
            "for a provider's key",
        ),
        ([*pair.demo, "--watermark", key, "--verify", "race"], "is a provider's"),
        ([*pair.demo, "--mark", key], "add --verify marked"),
        ([*pair.demo, *marked, "--temperature", "0"], "no greedy decoding"),
        ([*pair.demo, *marked, "--top-k", "3"], "use --verify post"),
        (pair.serve("--mark", str(race)), "no provider's key"),
        (pair.serve("--mark", str(strange)), "another tokenizer"),
        (pair.serve("--mark", str(tmp_path / "none")), "keygen makes one"),
        (pair.serve("--mark", str(key), "--studies"), "leave --studies out"),
    ]
    for arguments, words in cases:
        assert words in refused(capsys, *arguments), arguments
    with SessionsFile(sessions_path(key), key_of(1)):
        assert "in use" in refused(capsys, *pair.serve("--mark", str(key)))


@pytest.mark.slow
def test_a_provider_finds_what_its_clients_wrote(start: Start, pair: Pair, tmp_path: Path) -> None:
    """Real processes: a provider that marks, a client that asks otherwise, one that asks for it;
    then the text alone. The key is in none of what is said.
    """
    tokenizer, file = Tokenizer.load(pair.private), tmp_path / "result.json"
    key = provider_key(tmp_path / "key", tokenizer, key_of(0))
    server = start(*pair.serve("--mark", str(key)))
    port = server.until_listening()
    other = start(*pair.generate(port, "--temperature", "1"))
    assert other.wait(RUN_S) == 2 and "--verify marked" in other.errors[0]
    client = start(
        *pair.generate(
            port,
            "--verify",
            "marked",
            "--temperature",
            "1",
            "--max-new-tokens",
            "30",
            "--json",
            str(file),
        )
    )
    assert client.wait(RUN_S) == 0, client.stderr
    result = json.loads(file.read_text())
    assert any("noise of the provider's" in line for line in result["learned"]["client"])
    (one,) = recorded(sessions_path(key), key_of(0))
    assert one.shape == Shape(288, result["config"]["request.draft_length"], 30)
    said = file.read_text() + client.stdout + client.stderr + server.stdout + server.stderr
    for secret in (key_of(0).secret, key_of(0).of_session(one.nonce)):
        assert secret.hex() not in said and str(secret) not in said
    # By its tokens: what they decode to is tokenized otherwise where it is no UTF-8.
    tokens = result["token_ids"]
    evidence = aligning.detect(key_of(0), [one], tokens, AlignmentPrior.unknown(len(tokens)))
    assert len(tokens) == 30 and evidence.log_p < math.log(1e-6)
    (text := tmp_path / "text").write_text(result["text"], encoding="utf-8")
    told = tmp_path / "found.json"
    detect = start(
        "watermark",
        "detect",
        str(text),
        "--key",
        str(key),
        "--tokenizer",
        str(pair.private),
        "--draft-model",
        str(pair.public),
        "--json",
        str(told),
    )
    assert detect.wait(RUN_S) == 0 and "of 1 sessions" in detect.stdout, detect.stderr
    assert json.loads(told.read_text())["tokens"] >= 25
    # A demo has a key of its own.
    demo = start(*pair.demo, "--verify", "marked", "--max-new-tokens", "2")
    assert demo.wait(RUN_S) == 0, demo.stderr
