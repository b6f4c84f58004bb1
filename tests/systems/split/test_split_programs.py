"""Generation and tuning by both parties' halves: the whole model's text; killed, it goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models.family import logits
from models.hf import load_model
from models.split import back_texts, front_texts, middle_texts
from models.tokenizer import Tokenizer
from spu_llm.core.channel import Channel, MemoryChannel
from spu_llm.core.errors import InputError, PeerError, WireError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.service import programs
from spu_llm.service.agreeing import job_of, of_client, of_provider, task_of
from spu_llm.systems.decoding.records import COMPLETION
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.program import Job, ProviderInputs, Served
from spu_llm.systems.split.beginning import begin
from spu_llm.systems.split.boundary import HEADER_BYTES, Boundary, Kind
from spu_llm.systems.split.ends import client_ends, with_table, without_table
from spu_llm.systems.split.generating import middle_of, sampled
from spu_llm.systems.split.records import (
    GENERATE,
    TUNE,
    GenerateInputs,
    GenerateRequest,
    SplitServed,
    TuneInputs,
    TuneRequest,
    check_served,
)
from spu_llm.systems.split.state import ClientSecrets, Settings, Tunings, held
from spu_llm.systems.split.texts import digest_of, tokens_of
from spu_llm.systems.split.tuning import Batches, HostHalf
from tests.kit.models import VOCAB
from tests.systems.split.sessions import (
    CONFIG,
    SPLIT,
    Ended,
    Fragile,
    digest,
    finished,
    make_model,
    run_both,
    served,
)

TEXT = "def read(path):\n    return alpha beta gamma\n"
NEW = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("split") / "model")


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    """Continue by the whole model, without a cache."""
    config, params = load_model(model)
    text = np.zeros(len(prompt) + count, np.int32)
    text[: len(prompt)] = prompt
    whole = jax.jit(lambda text: logits(params, config, text))
    for at in range(len(prompt), len(text)):  # no row sees those after it
        text[at] = np.argmax(whole(text)[at - 1])
    collected: list[int] = text[len(prompt) :].tolist()
    return collected


def asked(model: Path, prompts: list[list[int]], **change: Any) -> GenerateRequest:
    request = GenerateRequest(
        "plain",
        *SPLIT,
        digest(model),
        "float32",
        "",
        0,
        0,
        prompt_tokens=tuple(map(len, prompts)),
        max_new_tokens=NEW,
    )
    return replace(request, **change)


# ---- generation


def test_texts_of_the_whole_model(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    prompts = [tokenizer.encode(TEXT)[:n] for n in (1, 5)]
    inputs = GenerateInputs(prompts, str(model), temperature=0.0)
    client, provider = finished(
        *run_both(GENERATE, asked(model, prompts), inputs, served(model, "plain"))
    )
    for text, prompt in zip(client["texts"], prompts, strict=True):
        assert text["token_ids"] == greedy(model, prompt, NEW)
        assert text["text"] == tokenizer.decode(text["token_ids"])
        assert (text["finish_reason"], text["steps"]) == ("length", NEW - 1)
    # A message each way for a token, and one that says that the text is over.
    traffic = client["traffic"]
    assert traffic["prefill"]["sent_messages"] == 2
    assert traffic["decode"]["sent_messages"] == 2 * NEW
    assert traffic["decode"]["received_messages"] == 2 * (NEW - 1)
    assert traffic["decode"]["received_bytes"] == 2 * (NEW - 1) * (24 + 4 * CONFIG.width)
    assert client["learned"] == provider["learned"]
    rows, *lengths = client["learned"]["provider"]
    assert "insecure" in rows and "the most tokens that a text may get" in lengths
    assert not any("tuning" in line for line in lengths)


def test_a_text_ends_before_a_stop_and_within_the_context(model: Path) -> None:
    prompt = Tokenizer.load(model).encode(TEXT)[:4]
    whole = Tokenizer.load(model).decode(greedy(model, prompt, NEW))
    inputs = GenerateInputs([prompt], str(model), temperature=0.0, stop=[whole[4:6]])
    request = asked(model, [prompt])
    client, _ = finished(*run_both(GENERATE, request, inputs, served(model, "plain")))
    (text,) = client["texts"]
    assert (text["text"], text["finish_reason"]) == (whole[: whole.index(whole[4:6])], "stop")
    long = replace(request, max_new_tokens=1000)
    assert long.limit(CONFIG, 4) == 60 and long.capacity(CONFIG, 4) == 63
    inputs = replace(inputs, stop=[])
    client, _ = finished(*run_both(GENERATE, long, inputs, served(model, "plain")))
    assert len(client["texts"][0]["token_ids"]) == 60


def test_tokens_are_drawn_by_temperature_and_mass() -> None:
    actual = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    inputs, prg, count = GenerateInputs([], "", temperature=1.0, top_p=0.75), Prg(bytes(32)), 4000
    drawn = np.bincount([sampled(actual, inputs.sampling, prg) for _ in range(count)], minlength=4)
    assert drawn[2:].sum() == 0
    # A false alarm of 6e-5 of all keys, and this one is fixed.
    assert abs(drawn[0] / count - 0.625) < 4 * np.sqrt(0.625 * 0.375 / count)
    assert sampled(actual, replace(inputs, temperature=0.0).sampling, prg) == 0


# ---- who serves what


def test_a_provider_serves_one_mode_of_one_split(model: Path) -> None:
    request, own = asked(model, [[1]]), served(model, "plain")
    request.admit(own, CONFIG)

    def brought(one: SplitServed) -> ProviderInputs:
        return replace(own, served=Served.of(one))

    for held_, said in (
        (ProviderInputs(str(model)), r"started with spu-llm split serve --mode plain --split 1,1"),
        (served(model, "noir"), "serves --mode noir --split 1,1, not --mode plain --split 1,1"),
        (brought(SplitServed("plain", 0, 1, "")), "serves --mode plain --split 0,1, not"),
        (brought(SplitServed("plain", 1, 1, "x")), "models with different ends"),
    ):
        with pytest.raises(InputError, match=said):
            request.admit(held_, CONFIG)
    with pytest.raises(InputError, match="must be started with --tunings DIR"):
        replace(request, lora=2, tuning="0" * 32).admit(own, CONFIG)
    check_served("mpc", SPLIT, served(model, "mpc"))
    tokenizer = Tokenizer.load(model)
    stated = of_provider(CONFIG, tokenizer, "local", 1)
    for program, request_, held_, said in (
        (GENERATE, request, ProviderInputs(str(model)), "no split one"),
        (COMPLETION, Request(1, 5, 0, 0.5), own, "the middle of a split model alone"),
    ):
        agreed = {**stated, **of_client(program, request_, tokenizer, "local", 1)}
        with pytest.raises(InputError, match=said):
            job_of(program, task_of("provider", agreed, held_, None))
    agreed = {**stated, **of_client(GENERATE, request, tokenizer, "local", 1)}
    assert job_of(GENERATE, task_of("provider", agreed, own, None)).request == request
    inputs = GenerateInputs([[1]], str(model))
    assert job_of(GENERATE, task_of("client", agreed, inputs, None)).client == inputs
    assert programs.find("split-tune") is TUNE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mode": "mpc"}, "no mode 'mpc' without shares"),
        ({"mode": "noir", "front": 0}, "the secret codebook's own"),
        ({"front": 2}, "leaves no middle"),
        ({"precision": "int8"}, "--precision must be one of"),
        ({"lora": 65}, "--lora must be 0"),
        ({"lora": 1}, "names no round of a tuning"),
        ({"prompt_tokens": ()}, "1 to 1000 texts"),
        ({"prompt_tokens": (64,)}, "has 64 tokens"),
        ({"prompt_tokens": (0,)}, "has 0 tokens"),
        ({"max_new_tokens": 0}, "--max-new-tokens"),
    ],
)
def test_a_request_for_nonsense(model: Path, change: dict[str, Any], said: str) -> None:
    request = asked(model, [[1, 2]])
    request.check(CONFIG)
    with pytest.raises(InputError, match=said):
        replace(request, **change).check(CONFIG)


# ---- tuning


@dataclass(frozen=True)
class Tuning:
    """A client's directory and a provider's, and what they run."""

    model: Path
    secrets: Path
    tunings: Path
    texts: Path
    settings: Settings
    held: ProviderInputs

    def run(self, rounds: int, save_every: int = 2, **around: Any) -> Any:
        """Tune from where it is, to `rounds`: return results and errors."""
        request = self.request(rounds, save_every)
        inputs = TuneInputs(str(self.model), str(self.secrets), [str(self.texts)])
        return run_both(TUNE, request, inputs, self.held, **around)

    def request(self, rounds: int, save_every: int = 2) -> TuneRequest:
        secrets, s = ClientSecrets.load(self.secrets, CONFIG), self.settings
        request = TuneRequest(
            s.mode,
            s.front,
            s.back,
            s.ends,
            s.precision,
            s.id if s.lora else "",
            s.lora,
            secrets.round,
            batch=s.batch,
            length=s.length,
            rounds=rounds,
            save_every=save_every,
            learning_rate=s.learning_rate,
        )
        request.check(CONFIG)
        return request

    def files(self) -> dict[str, bytes]:
        """Return all that is kept, but for what the provider may still have of rounds before the
        last.
        """
        content = {path.name: path.read_bytes() for path in self.secrets.iterdir()}
        provider = sorted(self.tunings.rglob("*.safetensors"))[-1:]
        return content | {path.name: path.read_bytes() for path in provider}


@pytest.fixture
def tuning(model: Path, tmp_path: Path) -> Iterator[Tuning]:
    yield make_tuning(model, tmp_path)


def make_tuning(model: Path, tmp_path: Path, **change: Any) -> Tuning:
    texts = tmp_path / "private.jsonl"
    texts.write_text(3 * '{"text": "def read(path):\\n    return alpha beta"}\n')
    tokens = tokens_of([texts], Tokenizer.load(model))
    settings = Settings(
        id="b" * 32,
        ends=digest(model),
        mode="noir",
        front=1,
        back=1,
        mechanism="grr",
        epsilon=4.0,
        precision="float32",
        batch=2,
        length=6,
        learning_rate=1e-2,
        lora=2,
        texts=digest_of(tokens),
    )
    settings = replace(settings, **change)
    secrets, tunings = tmp_path / "secrets", tmp_path / "tunings"
    tunings.mkdir(mode=0o700)
    config, params = load_model(model)
    with held(secrets):
        begin(settings, config, params).save(secrets)
    return Tuning(model, secrets, tunings, texts, settings, served(model, settings.mode, tunings))


def sends(who: int, change: Callable[[bytes], bytes]) -> Callable[[int, Channel], Channel]:
    """Around a party's channel: what it sends, changed, before it is sealed."""

    class Changed:
        def __init__(self, inner: Channel) -> None:
            self._inner = inner

        def send(self, data: bytes) -> None:
            self._inner.send(change(data))

        def recv(self) -> bytes:
            return self._inner.recv()

    return lambda rank, channel: Changed(channel) if rank == who else channel


def copied(tuning: Tuning, to: Path) -> Tuning:
    """Return the same, of which each party has copies of its files."""
    shutil.copytree(tuning.secrets, to / "secrets")
    shutil.copytree(tuning.tunings, to / "tunings")
    held_ = served(tuning.model, tuning.settings.mode, to / "tunings")
    return replace(tuning, secrets=to / "secrets", tunings=to / "tunings", held=held_)


def test_a_tuned_text(tuning: Tuning) -> None:
    """Under a codebook and a permutation, by tuned ends and the middle with LoRA: a text that the
    client alone can tell.
    """
    client, provider = finished(*tuning.run(4))
    before = tuning.files()
    assert finished(*tuning.run(4))[CLIENT]["loss"] is None and tuning.files() == before
    assert client["learned"] == provider["learned"]
    told = " ".join(client["learned"]["provider"])
    assert "under a secret codebook" in told and "insecure" not in told
    secrets = ClientSecrets.load(tuning.secrets, CONFIG)
    assert secrets.round == 4
    prompt, s = [5, 6, 7], tuning.settings
    request = asked(
        tuning.model, [prompt], mode="noir", tuning=s.id, lora=s.lora, round=4, max_new_tokens=5
    )
    inputs = GenerateInputs([prompt], str(tuning.model), str(tuning.secrets), temperature=0.0)
    client, _ = finished(*run_both(GENERATE, request, inputs, tuning.held))
    assert any("it is linked with all others" in line for line in client["learned"]["provider"])
    (text,) = client["texts"]
    # By whole texts without caches, from what is on disk.
    config, params = load_model(tuning.model)
    front, _ = client_ends(params, config, SPLIT, secrets.codebook)
    tuned, last = jax.device_put((secrets.front, secrets.back))
    front = with_table(tuned, without_table(front, config)[1], config)
    blocks = middle_of(Job(request, config, None, tuning.held))
    half = HostHalf.of(config, blocks, Boundary(16, "float32"), s.lora, 1.0)
    Tunings(tuning.tunings, s.id).give(half, s.lora, 4)
    blocks = jax.device_put(half.blocks())
    tokens = np.array([[*prompt, *text["token_ids"]]])

    @jax.jit
    def whole(tokens: Any) -> Any:
        x = front_texts(front, config, tokens)
        return back_texts(last, config, middle_texts(blocks, config, x))

    labels = np.argmax(whole(tokens)[0], axis=-1)[len(prompt) - 1 : -1]
    assert secrets.permutation[text["token_ids"]].tolist() == labels.tolist()
    # The provider's supervisor knows, whose errors the client hears, and so does its worker.
    request.admit(tuning.held, CONFIG)
    for change, said in (
        ({"round": 3}, "goes on after round 3"),
        ({"lora": 3}, "of another rank"),
        ({"tuning": "c" * 32}, "after rounds none"),
        ({"tuning": "../x"}, "no id"),
    ):
        with pytest.raises(InputError, match=said):
            replace(request, **change).admit(tuning.held, CONFIG)
    _, errors = run_both(GENERATE, replace(request, round=3), inputs, tuning.held)
    with pytest.raises(InputError, match="goes on after round 3"):
        raise errors[PROVIDER] or AssertionError
    with held(tuning.tunings / s.id):
        request.admit(tuning.held, CONFIG)
        with pytest.raises(InputError, match="another session uses the provider's half"):
            tuning.request(8).admit(tuning.held, CONFIG)
    tuning.request(8).admit(tuning.held, CONFIG)
    with pytest.raises(InputError, match="goes on after round 0"):
        replace(tuning.request(8), round=0).admit(tuning.held, CONFIG)
    replace(tuning.request(8), round=0, tuning="c" * 32).admit(tuning.held, CONFIG)


def test_a_provider_keeps_no_more_tunings_than_have_room(tuning: Tuning) -> None:
    request, where, mb = tuning.request(8), str(tuning.tunings), 10**6

    def admit(limit: int, request: TuneRequest = request) -> None:
        request.admit(replace(tuning.held, disk_bytes={where: limit}), CONFIG)

    admit(mb)
    (tuning.tunings / "of another").write_bytes(bytes(mb // 2))
    admit(mb)
    for limit, asked_ in ((mb // 2, request), (mb, replace(request, lora=64))):
        with pytest.raises(InputError, match="no room on disk for this tuning"):
            admit(limit, asked_)
    # It is enough for what is kept, and what is already there of this tuning is not counted twice.
    finished(*tuning.run(4))
    kept = sum(path.stat().st_size for path in (tuning.tunings / request.tuning).iterdir())
    assert kept < 300_000
    admit(mb, tuning.request(8))


def test_a_round_takes_no_more_memory_than_a_session_gets(tuning: Tuning) -> None:
    request, large = tuning.request(8), replace(CONFIG, n_positions=100_000, n_layer=40)
    with pytest.raises(InputError, match="--batch must be 1 to "):
        replace(request, batch=10**6).check(CONFIG)
    with pytest.raises(InputError, match="--batch must be 1 to 3, found 4"):
        replace(request, length=2000, batch=4).check(large)
    with pytest.raises(InputError, match="--length 50000 takes more memory"):
        replace(request, length=50_000, batch=1).check(large)


@pytest.mark.parametrize("who", [CLIENT, PROVIDER])
@pytest.mark.parametrize("receiving", [False, True])
def test_killed_at_any_message_it_goes_on_bit_for_bit(
    tuning: Tuning, tmp_path: Path, who: int, receiving: bool
) -> None:
    """By either party, before it sends a message or after it got one. Rounds 1 to 4 have four
    messages each; two come before them, for the session.
    """
    finished(*tuning.run(1))
    whole = copied(tuning, tmp_path / "whole")
    finished(*whole.run(5))
    for last in (3, 4, 6):
        part = copied(tuning, tmp_path / f"at-{last}")

        def wrap(rank: int, channel: MemoryChannel, last: int = last) -> Any:
            return Fragile(channel, last if rank == who else 10**6, receiving=receiving)

        _, errors = part.run(5, wrap=wrap)
        assert isinstance(errors[who], Ended) and isinstance(errors[1 - who], PeerError)
        finished(*part.run(5))
        assert part.files() == whole.files()


def test_a_client_that_lost_its_last_round_goes_on(tuning: Tuning, tmp_path: Path) -> None:
    """The provider keeps its half first, so it is a round of keeping ahead at most."""
    finished(*tuning.run(2))
    before = copied(tuning, tmp_path / "before")
    finished(*tuning.run(4))
    shutil.rmtree(before.tunings)
    shutil.copytree(tuning.tunings, before.tunings)
    finished(*before.run(4))
    assert before.files() == tuning.files()
    finished(*tuning.run(8))
    behind = copied(before, tmp_path / "behind")
    shutil.rmtree(behind.tunings)
    shutil.copytree(tuning.tunings, behind.tunings)
    _, errors = behind.run(8)
    with pytest.raises(InputError, match="goes on after round 4 .* after rounds 6, 8"):
        raise errors[PROVIDER] or AssertionError


@pytest.mark.parametrize(
    ("kind", "value"), [(Kind.GRADIENT_DOWN, 3e38), (Kind.GRADIENT_DOWN, 1e25), (Kind.DOWN, 3e38)]
)
def test_finite_numbers_of_a_host_destroy_no_secrets(
    tuning: Tuning, kind: Kind, value: float
) -> None:
    """One message of huge ones. Gradients end the session, 1e25 by Adam's squares alone, and files
    stay; of rows the first norm makes zeros, or, as the secret weights are, its gradient is none,
    which ends it, too. The tuning goes on.
    """

    def huge(data: bytes) -> bytes:
        if len(data) <= HEADER_BYTES or data[1] != kind:
            return data
        sign = (-1.0) ** np.arange((len(data) - HEADER_BYTES) // 4)
        return data[:HEADER_BYTES] + (value * sign).astype("<f4").tobytes()

    finished(*tuning.run(1))
    before = {path.name: path.read_bytes() for path in tuning.secrets.iterdir()}
    result, errors = tuning.run(2, inside=sends(PROVIDER, huge))
    if kind == Kind.GRADIENT_DOWN or errors[CLIENT] is not None:
        what = "gradients" if kind == Kind.GRADIENT_DOWN else "rows"
        with pytest.raises(WireError, match=f"in round 1 of the tuning the provider's {what}"):
            raise errors[CLIENT] or AssertionError
        assert before == {path.name: path.read_bytes() for path in tuning.secrets.iterdir()}
    else:
        assert np.isfinite(finished(result, errors)[CLIENT]["loss"])
    assert np.isfinite(finished(*tuning.run(3))[CLIENT]["loss"])
    kept = ClientSecrets.load(tuning.secrets, CONFIG)
    leaves = jax.tree.leaves([kept.front, kept.back, kept.optimiser])
    assert all(np.isfinite(leaf).all() for leaf in leaves)


def test_secret_bytes_are_in_no_message(tuning: Tuning) -> None:
    """Neither the codebook or the folded table, row by row, nor the permutation, nor what is tuned,
    nor the stream's key, in any message before it is sealed.
    """
    sent: list[bytes] = []

    def tap(data: bytes) -> bytes:
        sent.append(data)
        return data

    begun = ClientSecrets.load(tuning.secrets, CONFIG)
    finished(*tuning.run(2, inside=sends(CLIENT, tap)))
    secrets, whole = ClientSecrets.load(tuning.secrets, CONFIG), b"".join(sent)
    assert len(sent) == 2 * 2 + 1
    front, _ = client_ends(load_model(tuning.model)[1], CONFIG, SPLIT, secrets.codebook)
    tuned = jax.tree.leaves([[s.front, s.back] for s in (begun, secrets)])
    # Zeros are no secret.
    leaves = [leaf.ravel() for leaf in tuned if np.count_nonzero(leaf.ravel()[:8]) == 8]
    assert len(leaves) > len(tuned) // 2
    rows = [row.astype(np.float32) for row in (*secrets.codebook, *front["wte"])]
    labels = [secrets.permutation[:4].astype(kind) for kind in (np.int64, np.int32, np.uint16)]
    pieces = [secrets.key, *(array[:8].tobytes() for array in (*rows, *leaves, *labels))]
    assert len(set(pieces)) > 2 * VOCAB - 10
    assert not any(piece in whole for piece in pieces)
    # It is of what is sent: rows of the first round.
    windows = Batches(tokens_of([tuning.texts], Tokenizer.load(tuning.model)), 2, 6, secrets.key)
    x = np.asarray(front_texts(front, CONFIG, windows.windows(0)[:, :-1]), np.float32)
    sent_rows = np.frombuffer(sent[0], np.float32, offset=HEADER_BYTES).reshape(x.shape)
    np.testing.assert_allclose(sent_rows, x, atol=1e-5)


def test_without_lora_the_provider_keeps_nothing(model: Path, tmp_path: Path) -> None:
    tuning = make_tuning(model, tmp_path, lora=0, mode="plain", mechanism="none")
    client, _ = finished(*tuning.run(3))
    assert not list(tuning.tunings.iterdir()) and client["rounds"] == 3
    assert len(jax.tree.leaves(ClientSecrets.load(tuning.secrets, CONFIG).front)) == 9


def test_texts(model: Path, tmp_path: Path) -> None:
    tokenizer, plain, lines = Tokenizer.load(model), tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("alpha")
    lines.write_text('{"text": "beta"}\n{"text": ""}\n{"text": "gamma"}\n')
    (end,) = tokenizer.eos_ids
    words = [tokenizer.encode(word) for word in ("alpha", "beta", "gamma")]
    wanted = [token for word in words for token in (*word, end)]
    assert tokens_of([plain, lines], tokenizer).tolist() == wanted
    for text, said in (("x\n", "line 1: must be"), ('{"text": 1}\n', "line 1"), ("[]\n", "line 1")):
        lines.write_text(text)
        with pytest.raises(InputError, match=said):
            tokens_of([lines], tokenizer)
    with pytest.raises(InputError, match="cannot read .*nowhere, of --texts"):
        tokens_of([tmp_path / "nowhere"], tokenizer)
