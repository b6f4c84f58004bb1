"""`spu-llm vault`: engine, vaults and users as real processes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.hf import load_model
from models.tokenizer import Tokenizer
from spu_llm.api import vault as vault_api
from spu_llm.api.vault import VaultOptions
from spu_llm.core.errors import NoAnswerError
from spu_llm.net import identity
from spu_llm.net.identity import CERTIFICATE
from spu_llm.systems.confidential.learned import floats_per_layer
from spu_llm.systems.confidential.outgoing import ObfuscationOptions, marked_prompt
from spu_llm.vault.told import Model, Place
from tests.kit.command_line import refused
from tests.kit.models import (
    PRIVATE,
    PUBLIC,
    VOCAB,
    endless,
    make_pair,
    save_model,
    save_tokenizer,
    tiny_params,
)
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Command, Start
from tests.kit.vaults import is_greedy
from tests.vault.commands import Engine, engine, vault

TOKENS = 24
PROMPT = "def read(alpha, beta):"


def asking(pair: Pair, port: int, *options: str) -> list[str]:
    """Return a command that asks the vault which listens there."""
    place = ["--vault", f"127.0.0.1:{port}", "--tokenizer", str(pair.private)]
    text = ["--temperature", "0", "--prompt", PROMPT, "--max-new-tokens", str(TOKENS)]
    return ["vault", "generate", *place, *text, *options]


@pytest.fixture
def ask(start: Start, pair: Pair) -> Callable[..., Command]:
    return lambda port, *options: start(*asking(pair, port, *options))


@pytest.fixture(scope="module")
def shared(start_shared: Start, pair: Pair) -> tuple[Engine, Engine]:
    served = engine(start_shared, pair.private, "--insecure")
    return served, vault(start_shared, served.port, "--insecure")


def result(command: Command, path: Path) -> dict[str, Any]:
    assert command.wait(RUN_S) == 0, command.stderr
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def prompt_tokens(model: Path) -> list[int]:
    from models.tokenizer import Tokenizer

    return list(Tokenizer.load(model).encode(PROMPT))


def test_text_is_that_of_the_plain_model_and_bytes_are_exact(
    shared: tuple[Engine, Engine], ask: Callable[..., Command], pair: Pair, tmp_path: Path
) -> None:
    actual = result(ask(shared[1].port, "--insecure", "--json", "r.json"), tmp_path / "r.json")
    config, params = load_model(pair.private)
    is_greedy(config, params, prompt_tokens(pair.private), actual["token_ids"])
    steps = TOKENS - 1
    floats = floats_per_layer(config) * config.layers * steps
    # Logits go to the vault, which samples, and tokens back; the last one goes to nobody.
    sampling = 4 * (VOCAB * steps + TOKENS)
    assert sum(actual["bytes"]["decode"].values()) == 4 * floats + sampling
    assert "it determines the prompt's tokens" in str(actual["learned"]["engine"])


@pytest.mark.slow
def test_eight_users_at_once_have_the_text_of_one(
    start: Start, ask: Callable[..., Command], pair: Pair, tmp_path: Path
) -> None:
    served = engine(start, pair.private, "--insecure")
    vaults = [vault(start, served.port, "--insecure") for _ in range(8)]
    prompts = [PROMPT + " alpha" * i for i in range(8)]
    users = [
        ask(v.port, "--insecure", "--prompt", p, "--json", f"{i}.json")
        for i, (v, p) in enumerate(zip(vaults, prompts, strict=True))
    ]
    config, params = load_model(pair.private)
    from models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(pair.private)
    for i, user in enumerate(users):
        tokens = result(user, tmp_path / f"{i}.json")["token_ids"]
        assert len(tokens) == TOKENS
        is_greedy(config, params, list(tokenizer.encode(prompts[i])), tokens)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a public model with room for the prompt for infilling, which the pair's own lacks."""
    directory = tmp_path_factory.mktemp("longer") / "public"
    longer = replace(PUBLIC, n_positions=128)
    save_model(directory, longer, endless(tiny_params(longer, 2)))
    save_tokenizer(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        ["--eta", "3"],
        ["--as-published", "--epsilon", "0.9"],
        ["--secrets", "book"],
        ["--fakes-in-vault", "key"],
        ["--fakes-in-vault", "key", "--as-published", "--epsilon", "0.9"],
    ],
    ids=["repaired", "published", "book", "in the vault", "published, in the vault"],
)
def test_obfuscated_text_is_that_of_the_prompt_alone(
    start: Start,
    shared: tuple[Engine, Engine],
    ask: Callable[..., Command],
    pair: Pair,
    public: Path,
    tmp_path: Path,
    how: list[str],
) -> None:
    """Output invariance, among fakes: the user's own text is what comes out."""
    port, own = shared[1].port, ["--draft-model", str(public)]
    if "--fakes-in-vault" in how:  # by a model of the vault's
        port, own = vault(start, shared[0].port, "--insecure", *own).port, []
    actual = result(
        ask(
            port,
            "--insecure",
            *own,
            "--json",
            "r.json",
            "--prompt",
            PROMPT.replace("alpha", "<redacted>alpha</redacted>"),
            "--fakes",
            "6",
            "--min-fakes",
            "2",
            "--eta",
            "4",
            *how,
        ),
        tmp_path / "r.json",
    )
    config, params = load_model(pair.private)
    is_greedy(config, params, prompt_tokens(pair.private), actual["token_ids"])
    fakes = actual["obfuscation"]["fakes"]
    assert 2 <= fakes <= 6
    told = str(actual["learned"]["engine"])
    assert f"{fakes + 1} prompts, one of them the user's" in told
    assert ("which is wrong" in told) == ("--as-published" in how)


def test_with_certificates_and_only_those(
    start: Start, pair: Pair, ask: Callable[..., Command], tmp_path: Path
) -> None:
    for name in ("owner", "vault", "user", "stranger"):
        identity.make(tmp_path / name, f"{name}.example", 30)

    def trusting(own: str, other: str) -> list[str]:
        return ["--identity", str(tmp_path / own), "--trust", str(tmp_path / other / CERTIFICATE)]

    served = engine(start, pair.private, *trusting("owner", "vault"))
    user = ["--trust-user", str(tmp_path / "user" / CERTIFICATE)]
    kept = vault(start, served.port, *trusting("vault", "owner"), *user)
    asked = ask(kept.port, *trusting("user", "vault"))
    assert asked.wait(RUN_S) == 0, asked.stderr
    ask(kept.port, *trusting("stranger", "vault")).assert_failed(1, "the vault", within_s=END_S)
    ask(kept.port, "--insecure").assert_failed(1, "the vault", within_s=END_S)
    wrong = start(
        "vault",
        "open",
        "--server",
        f"127.0.0.1:{served.port}",
        "--listen",
        "127.0.0.1:0",
        *trusting("stranger", "owner"),
        *user,
    )
    wrong.assert_failed(1, "the engine", within_s=END_S)


def test_an_engine_that_dies_is_named_and_its_vault_stays(
    start: Start, pair: Pair, ask: Callable[..., Command], tmp_path: Path
) -> None:
    """The next request finds the engine where it was, when it has the same model."""
    served = engine(start, pair.private, "--insecure")
    kept = vault(start, served.port, "--insecure")
    user = ask(kept.port, "--insecure", "--max-new-tokens", "50")
    user.until_phase("decoding")
    served.command.send(signal.SIGKILL)
    user.assert_failed(1, "the vault says: the engine is lost", within_s=END_S)
    user = ask(kept.port, "--insecure")
    user.assert_failed(1, "cannot reach the engine", within_s=END_S)
    engine(start, pair.private, "--insecure", port=served.port)
    again = ask(kept.port, "--insecure")
    assert again.wait(RUN_S) == 0, again.stderr


@pytest.mark.slow
def test_engine_that_comes_back_with_other_weights_is_refused(
    start: Start, pair: Pair, ask: Callable[..., Command], tmp_path: Path
) -> None:
    served = engine(start, pair.private, "--insecure")
    kept = vault(start, served.port, "--insecure")
    served.command.send(signal.SIGKILL)
    served.command.wait(END_S)
    other, _ = make_pair(tmp_path / "other")
    save_model(other, PRIVATE, endless(tiny_params(PRIVATE, 7)))
    engine(start, other, "--insecure", port=served.port)
    refused = ask(kept.port, "--insecure")
    refused.assert_failed(1, "another one than when this vault was opened", within_s=END_S)


@pytest.mark.slow
def test_vault_that_dies_ends_its_user_and_no_other(
    start: Start, pair: Pair, ask: Callable[..., Command], tmp_path: Path
) -> None:
    served = engine(start, pair.private, "--insecure")
    kept = [vault(start, served.port, "--insecure") for _ in range(2)]
    longer = ["--insecure", "--max-new-tokens", "50"]
    users = [ask(v.port, *longer, "--json", f"{i}.json") for i, v in enumerate(kept)]
    users[0].until_phase("decoding")
    kept[0].command.send(signal.SIGKILL)
    users[0].assert_failed(1, "the vault is lost", within_s=END_S)
    actual = result(users[1], tmp_path / "1.json")
    config, params = load_model(pair.private)
    is_greedy(config, params, prompt_tokens(pair.private), actual["token_ids"])


@pytest.mark.slow
def test_vault_that_stops_does_not_hold_the_others(
    start: Start, pair: Pair, ask: Callable[..., Command], tmp_path: Path
) -> None:
    """A round has a deadline; who misses it leaves."""
    served = engine(start, pair.private, "--insecure")
    kept = [vault(start, served.port, "--insecure") for _ in range(2)]
    users = [ask(v.port, "--insecure", "--max-new-tokens", "50") for v in kept]
    users[0].until_phase("decoding")
    kept[0].command.send(signal.SIGSTOP)
    started = time.monotonic()
    assert users[1].wait(RUN_S) == 0, users[1].stderr
    assert time.monotonic() - started < END_S
    kept[0].command.send(signal.SIGCONT)
    assert users[0].wait(RUN_S) == 1


@pytest.mark.slow
def test_ctrl_c_ends_each_of_them_and_the_rest_goes_on(
    start: Start, pair: Pair, ask: Callable[..., Command]
) -> None:
    served = engine(start, pair.private, "--insecure")
    kept = vault(start, served.port, "--insecure")
    user = ask(kept.port, "--insecure", "--max-new-tokens", "50")
    user.until_phase("decoding")
    user.send(signal.SIGINT)
    assert user.wait(END_S) == 130
    again = ask(kept.port, "--insecure")
    assert again.wait(RUN_S) == 0, again.stderr
    for role in (kept, served):
        role.command.send(signal.SIGINT)
        assert role.command.wait(END_S) == 130
        role.command.assert_gone()
    assert "Traceback" not in kept.command.stderr + served.command.stderr


@pytest.mark.slow
def test_a_second_user_waits_for_the_first(
    start: Start, pair: Pair, ask: Callable[..., Command]
) -> None:
    served = engine(start, pair.private, "--insecure")
    kept = vault(start, served.port, "--insecure")
    users = [ask(kept.port, "--insecure") for _ in range(2)]
    assert [user.wait(RUN_S) for user in users] == [0, 0]
    assert users[0].stdout == users[1].stdout


@pytest.mark.slow
def test_engine_without_room_says_so(start: Start, pair: Pair, ask: Callable[..., Command]) -> None:
    served = engine(start, pair.private, "--insecure", "--lanes", "1")
    kept = [vault(start, served.port, "--insecure") for _ in range(2)]
    first = ask(kept[0].port, "--insecure", "--max-new-tokens", "50")
    first.until_phase("decoding")
    kept[0].command.send(signal.SIGSTOP)  # its lane stays for as long as a round may take
    ask(kept[1].port, "--insecure").assert_failed(1, "no room for 1 more", within_s=END_S)
    kept[0].command.send(signal.SIGCONT)


def test_one_token_alone_needs_no_step(
    shared: tuple[Engine, Engine], ask: Callable[..., Command]
) -> None:
    """The first one comes with the prefill: nothing fails at the engine for want of a second."""
    asked = ask(shared[1].port, "--insecure", "--max-new-tokens", "1")
    assert asked.wait(RUN_S) == 0, asked.stderr
    again = ask(shared[1].port, "--insecure")
    assert again.wait(RUN_S) == 0, again.stderr
    assert "Error" not in shared[0].command.stderr


BAD = {
    "empty prompt": (["--prompt", ""], "no tokens"),
    "too long": (["--max-new-tokens", "64"], "do not fit the model's context"),
    "nothing to do": (["--max-new-tokens", "0"], "must be 1 or more"),
    "temperature": (["--temperature", "-1"], "must be 0 to 100"),
    "address": (["--vault", "here"], "--vault"),
    "open tag": (["--prompt", "a <redacted>b"], "<redacted> is not closed"),
    "nested tags": (["--prompt", "<confidential><confidential>b"], "close that one first"),
    "nothing fits": (
        ["--prompt", "a<redacted>b</redacted>", "--fakes", "400", "--min-fakes", "400"],
        "nothing was sent",
    ),
    "fakes by both": (
        ["--prompt", "a <redacted>b</redacted>", "--fakes-in-vault", "key"],
        "the vault makes fakes with --secrets and --draft-model of its own",
    ),
    "no fakes": (["--prompt", "a <redacted>b</redacted>", "--fakes", "0"], "1 fake prompt"),
    "nothing found": (["--redact", "patterns"], "finds nothing in this prompt"),
    "half of an identity": (["--trust", "nobody"], "--insecure uses no certificates"),
}


@pytest.mark.parametrize("options,words", BAD.values(), ids=list(BAD))
def test_bad_input_is_one_line(
    shared: tuple[Engine, Engine],
    pair: Pair,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    draft = ["--draft-model", str(pair.public)]
    asked = asking(pair, shared[1].port, "--insecure", *draft, *options)
    assert words in refused(capsys, *asked)


def test_another_tokenizer_is_refused(
    shared: tuple[Engine, Engine], ask: Callable[..., Command]
) -> None:
    from spu_llm.api.defaults import shipped

    other = ask(shared[1].port, "--insecure", "--tokenizer", str(shipped("public")))
    other.assert_failed(2, "another tokenizer", within_s=END_S)


def test_strangers_bytes_end_nothing(
    shared: tuple[Engine, Engine], ask: Callable[..., Command]
) -> None:
    import socket

    source = np.random.default_rng(1)
    for role in shared:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", role.port)) as sock:
                sock.sendall(source.bytes(100))
    assert eventually(lambda: "failed" in shared[1].command.stderr)
    asked = ask(shared[1].port, "--insecure")
    assert asked.wait(RUN_S) == 0, asked.stderr


@pytest.mark.parametrize(("published", "told"), [(None, {0}), ("printed", set(range(9)))])
def test_a_vault_hears_which_prompt_is_real_only_where_it_must(
    public: Path, published: str | None, told: set[int]
) -> None:
    """Where fakes share keys and values (`--as-published`); exact prompts are alike to it."""
    how = ObfuscationOptions(
        fakes=4, min_fakes=2, eta=4.0, draft_model=public, as_published=published, epsilon=0.9
    )
    words = Tokenizer.load(public)
    marked = marked_prompt(PROMPT.replace("alpha", "<redacted>alpha</redacted>"), how, words)
    options = VaultOptions(obfuscation=how)
    heard, real = set(), set()
    for _ in range(12):
        wish, sent = vault_api._made_here("", marked, options, words, lambda event: None)
        heard.add(wish.own)
        real.add(sent.own)
    assert heard <= told and len(real) > 1
    assert published is None or heard == real


@pytest.mark.parametrize("kept", [False, True], ids=["other fakes", "the same fakes"])
def test_a_failure_says_what_asking_again_tells(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Unless the same fakes go out then."""
    how = ObfuscationOptions(
        fakes=4,
        min_fakes=2,
        eta=4.0,
        draft_model=public,
        secrets=tmp_path / "kept" if kept else None,
    )
    words = Tokenizer.load(public)

    def fails(place: Any, wish: Any, *others: Any) -> Any:
        wish(Model({}, [], "", words.digest))
        raise NoAnswerError("the vault closed the connection")

    monkeypatch.setattr(vault_api, "generate", fails)
    prompt = PROMPT.replace("alpha", "<redacted>alpha</redacted>")
    with pytest.raises(NoAnswerError, match="the vault closed the connection") as end:
        vault_api.complete_by_vault(
            Place("127.0.0.1", 1, None), prompt, VaultOptions(obfuscation=how), tokenizer=public
        )
    assert ("both sets together tell the prompt" in str(end.value)) is not kept
