"""Rounds of tuning: the gradients of the whole model, what the host sees, and what is kept."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from models.family import Params, family_of, logits
from models.split import back_texts, front_texts, middle_texts
from spu_llm.core.errors import InputError, WireError
from spu_llm.core.prg import Prg
from spu_llm.systems.split.beginning import begin
from spu_llm.systems.split.boundary import PRECISIONS, Boundary, Kind
from spu_llm.systems.split.ends import adapted, client_ends, table_of, without_table
from spu_llm.systems.split.modes import BACK, CODEBOOK, ENDS, PERMUTATION
from spu_llm.systems.split.state import (
    LOSSES,
    SECRETS,
    ClientSecrets,
    Losses,
    Settings,
    Tunings,
    held,
)
from spu_llm.systems.split.tuning import Batches, HostHalf, Loopback, halves, stepped, tune
from tests.kit.models import VOCAB, tiny_params
from tests.systems.split.sessions import CONFIG, SPLIT

B, N, RATE = 3, 8, 1e-2
KEY = bytes(range(32))
TOKENS = np.random.default_rng(0).integers(1, VOCAB, 200)
SETTINGS = Settings(
    id="0" * 32,
    ends="e",
    mode="plain",
    front=1,
    back=1,
    mechanism="none",
    epsilon=0.0,
    precision="float32",
    batch=B,
    length=N,
    learning_rate=RATE,
    lora=0,
    texts="t",
)


@pytest.fixture(scope="module")
def params() -> Params:
    return tiny_params(CONFIG, 1)


def made(params: Params, precision: str = "float32", rank: int = 0, tuned: str = ENDS) -> Any:
    boundary = Boundary(CONFIG.width, precision)
    labels = Prg.from_seed(1, "tau").words((VOCAB,)).argsort()
    client, host = halves(
        params,
        CONFIG,
        SPLIT,
        codebook=None,
        labels=labels,
        boundary=boundary,
        learning_rate=RATE,
        rank=rank,
        tuned=tuned,
    )
    return client, host, boundary, Batches(TOKENS, B, N, KEY), labels


def test_a_round_is_a_step_of_the_whole_model(params: Params) -> None:
    """Of folded weights of both ends, by Adam, on the labels tau(t); the table and the middle
    stay.
    """
    client, host, boundary, batches, labels = made(params, rank=2)
    windows, blocks = batches.windows(0), jax.device_get(host._blocks)
    front, back = client_ends(params, CONFIG, SPLIT)
    lora = jax.device_get(host.lora)
    weights = {"front": front, "back": back, "lora": lora}

    def loss(weights: Any) -> Any:
        x = front_texts(weights["front"], CONFIG, windows[:, :-1])
        y = middle_texts(adapted(blocks, weights["lora"]), CONFIG, x)
        actual = back_texts(weights["back"], CONFIG, y)
        return optax.softmax_cross_entropy_with_integer_labels(
            actual, labels[windows[:, 1:]]
        ).mean()

    wanted_loss, gradient = jax.jit(jax.value_and_grad(loss))(weights)
    adam = optax.adam(RATE)
    change, _ = adam.update(gradient, adam.init(weights), weights)
    wanted = optax.apply_updates(weights, change)
    (found_loss,) = tune(client, host, boundary, batches, range(1))
    assert found_loss == pytest.approx(float(wanted_loss), rel=1e-5)
    actual = {"front": client.front_weights(), "back": client.weights["back"], "lora": host.lora}
    table = actual["front"].pop("wte")
    assert np.array_equal(table, front["wte"])
    for tree in (wanted, gradient):
        tree["front"].pop("wte")
    moved = 0
    for a, b, g in zip(*map(jax.tree.leaves, (actual, wanted, gradient)), strict=True):
        # Where a gradient is nearly 0, Adam's first step is by its sign.
        clear = np.abs(g) > 1e-6
        np.testing.assert_allclose(np.asarray(a)[clear], np.asarray(b)[clear], atol=RATE / 50)
        moved += int(clear.sum())
    assert moved > 5000


def test_a_step_has_the_scale_of_the_stream(params: Params) -> None:
    """Matrices are folded with 2^-stream_shift, and Adam's steps have one size."""
    config = replace(CONFIG, stream_shift=5)
    front, back = client_ends(params, config, SPLIT)
    lora = [{"out": {"a": np.ones((4, 2)), "b": np.zeros((2, 4))}}]
    weights = {"front": without_table(front, config)[0], "back": back, "lora": lora}
    gradient = jax.tree.map(np.ones_like, weights)
    state = optax.adam(RATE).init(weights)
    after, _ = stepped(config, RATE, gradient, 1, state, weights)
    steps = jax.tree.map(lambda new, old: float(np.mean(old - new)), after, weights)
    expected = {
        "front": {"wpe": RATE / 32, "blocks": [_block_steps()]},
        "back": {"blocks": [_block_steps()], "head": {"weight": RATE, "bias": RATE}},
        "lora": [{"out": {"a": RATE, "b": RATE / 32}}],
    }
    assert jax.tree.structure(steps) == jax.tree.structure(expected)
    np.testing.assert_allclose(jax.tree.leaves(steps), jax.tree.leaves(expected), rtol=1e-3)


def _block_steps() -> Any:
    steps = {"qkv": RATE, "fc": RATE, "out": RATE / 32, "proj": RATE / 32}
    return {name: {"weight": step, "bias": step} for name, step in steps.items()}


def test_the_loss_falls_and_is_that_of_the_whole_model(params: Params) -> None:
    client, host, boundary, batches, labels = made(params)
    windows = batches.windows(0)
    whole = jax.vmap(lambda text: logits(params, CONFIG, text))(windows[:, :-1])
    actual = optax.softmax_cross_entropy_with_integer_labels(whole, labels[windows[:, 1:]])
    losses = tune(client, host, boundary, batches, range(30))
    assert losses[0] == pytest.approx(float(actual.mean()), rel=1e-4)
    assert np.mean(losses[-5:]) < losses[0] - 0.3
    assert client.loss(host.middle, windows) < losses[0] - 0.3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_the_host_sees(params: Params, precision: str) -> None:
    client, host, boundary, batches, _ = made(params, precision)
    seen: list[tuple[Kind, int, np.ndarray]] = []
    tune(client, host, boundary, batches, range(2), lambda *what: seen.append(what))
    assert [(kind, number) for kind, number, _ in seen] == [
        (Kind.UP, 0),
        (Kind.GRADIENT_UP, 0),
        (Kind.UP, 1),
        (Kind.GRADIENT_UP, 1),
    ]
    front, _ = client_ends(params, CONFIG, SPLIT)
    x = np.asarray(front_texts(front, CONFIG, batches.windows(0)[:, :-1]))
    actual, unit = seen[0][2], 2.0 ** {"float32": -20, "float16": -10, "bfloat16": -7}[precision]
    assert np.array_equal(actual, actual.astype(boundary.dtype).astype(np.float32))
    np.testing.assert_allclose(actual, x, rtol=unit, atol=1e-6)
    assert seen[1][2].shape == (B, N, CONFIG.width) and np.abs(seen[1][2]).max() > 1e-3


def test_a_host_takes_nothing_but_what_comes_next(params: Params) -> None:
    _, host, boundary, _, _ = made(params)
    rows = np.ones((B, N, CONFIG.width), np.float32)
    up = boundary.encode(Kind.UP, 4, rows)
    round_ = host.round(4, B, N)
    with pytest.raises(WireError):
        round_.answer(boundary.encode(Kind.GRADIENT_UP, 4, rows))
    with pytest.raises(WireError):
        round_.answer(boundary.encode(Kind.UP, 5, rows))
    round_.answer(up)
    with pytest.raises(WireError):
        round_.answer(up)
    round_.answer(boundary.encode(Kind.GRADIENT_UP, 4, rows))
    with pytest.raises(WireError, match="round 4 of the tuning is over"):
        round_.answer(up)
    assert round_.over and Loopback(round_).recv() == b""


def test_a_client_that_sends_huge_gradients_changes_nothing(params: Params) -> None:
    _, host, boundary, _, _ = made(params, rank=2)
    rows = np.ones((B, N, CONFIG.width), np.float32)
    round_, before = host.round(0, B, N), (host.lora, host.state)
    round_.answer(boundary.encode(Kind.UP, 0, rows))
    with pytest.raises(WireError, match="the client's gradients leave no finite numbers"):
        round_.answer(boundary.encode(Kind.GRADIENT_UP, 0, 1e30 * rows))
    assert (host.lora, host.state) == before and not round_.over


def test_a_loss_that_is_no_number_ends_a_round(params: Params) -> None:
    client, host, boundary, batches, _ = made(params)
    client.weights["back"] = jax.tree.map(lambda leaf: 1e38 * leaf, client.weights["back"])
    with pytest.raises(WireError, match="in round 0 of the tuning the provider's rows"):
        tune(client, host, boundary, batches, range(1))


def test_the_back_alone_is_tuned(params: Params) -> None:
    """The front stays bit for bit, and the back takes the step that it takes beside a front."""
    alone, host, boundary, batches, _ = made(params, tuned=BACK)
    before = jax.device_get(alone.weights["front"])
    tune(alone, host, boundary, batches, range(1))
    beside = made(params)[0]
    tune(beside, made(params)[1], boundary, batches, range(1))
    ends = [jax.device_get(client.weights["back"]) for client in (alone, beside)]
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        assert np.array_equal(a, b)
    tune(alone, host, boundary, batches, range(1, 4))
    after = jax.device_get(alone.weights["front"])
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert np.array_equal(a, b)


def test_batches_are_windows_of_the_text() -> None:
    batches = Batches(TOKENS, 50, 7, KEY)
    first, again, other = (batches.windows(number) for number in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    places = {tuple(TOKENS[i : i + 8]): i for i in range(len(TOKENS) - 7)}
    collected = {places[tuple(row)] for number in range(80) for row in batches.windows(number)}
    assert collected == set(range(len(TOKENS) - 7))  # missed by chance: 193 e^-20
    assert not np.array_equal(first, Batches(TOKENS, 50, 7, bytes(32)).windows(0))


def test_a_codebook_replaces_the_table_but_not_the_head(params: Params) -> None:
    codebook = np.random.default_rng(1).normal(size=(VOCAB, CONFIG.width)).astype(np.float32)
    front, back = client_ends(params, CONFIG, SPLIT, codebook)
    plain_front, plain_back = client_ends(params, CONFIG, SPLIT)
    folded = family_of(CONFIG).fold({**params, "wte": codebook}, CONFIG)
    assert np.array_equal(front["wte"], folded["wte"])
    assert not np.array_equal(front["wte"], plain_front["wte"])
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(plain_back), strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(table_of(params, CONFIG), params["wte"])


def test_a_secret_beginning(params: Params) -> None:
    settings = replace(SETTINGS, mode="noir", mechanism="grr", epsilon=16.0)
    one, same, other = (
        begin(settings, CONFIG, params, Prg.from_seed(seed, "begin")) for seed in (1, 1, 2)
    )
    assert np.array_equal(one.codebook, same.codebook) and one.key == same.key
    assert not np.array_equal(one.codebook, other.codebook) and one.key != other.key
    assert np.array_equal(np.sort(one.permutation), np.arange(VOCAB))
    assert np.mean(one.permutation == np.arange(VOCAB)) < 0.1
    for i in range(CONFIG.width):  # each feature's values are the table's
        assert np.isin(one.codebook[:, i], params["wte"][:, i]).all()
    plain = begin(SETTINGS, CONFIG, params)
    assert np.array_equal(plain.codebook, params["wte"])
    assert np.array_equal(plain.permutation, np.arange(VOCAB))
    with pytest.raises(InputError):
        begin(replace(settings, epsilon=-1.0), CONFIG, params)


def test_a_beginning_without_one_of_the_secrets(params: Params) -> None:
    noir = replace(SETTINGS, mode="noir", mechanism="grr", epsilon=16.0)
    whole, no_codebook, no_permutation = (
        begin(settings, CONFIG, params, Prg.from_seed(1, "begin"))
        for settings in (
            noir,
            replace(noir, mechanism="none", epsilon=0.0, leave_out=CODEBOOK),
            replace(noir, leave_out=PERMUTATION),
        )
    )
    assert np.array_equal(no_codebook.codebook, params["wte"])
    assert np.array_equal(no_codebook.permutation, whole.permutation)
    assert np.array_equal(no_permutation.codebook, whole.codebook)
    assert np.array_equal(no_permutation.permutation, np.arange(VOCAB))


# ---- what is kept


@pytest.fixture
def secrets(params: Params) -> ClientSecrets:
    return begin(SETTINGS, CONFIG, params)


def same(one: ClientSecrets, other: ClientSecrets) -> bool:
    leaves = [
        [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(vars(s) | {"settings": 0})]
        for s in (one, other)
    ]
    return leaves[0] == leaves[1] and one.settings == other.settings


def test_secrets_on_disk(secrets: ClientSecrets, params: Params, tmp_path: Path) -> None:
    where = tmp_path / "secrets"
    client, host, boundary, batches, _ = made(params)
    tune(client, host, boundary, batches, range(3))
    with held(where):
        secrets.after(client, 3).save(where)
        first = (where / SECRETS).read_bytes()
        actual = ClientSecrets.load(where, CONFIG)
        assert actual.round == 3 and same(actual, secrets.after(client, 3))
        actual.save(where)
        assert (where / SECRETS).read_bytes() == first
        with pytest.raises(InputError, match="in use by another session"), held(where):
            pass
    modes = {stat.S_IMODE(path.stat().st_mode) for path in where.iterdir()}
    assert modes == {0o600} and stat.S_IMODE(where.stat().st_mode) == 0o700
    # Where it goes on from disk, it goes on as it would have.
    other = made(params)[0]
    actual.give(other)
    for half in (client, other):
        tune(half, made(params)[1], boundary, batches, range(3, 5))
    secrets.after(other, 5).save(where)
    one = (where / SECRETS).read_bytes()
    secrets.after(client, 5).save(where)
    assert one == (where / SECRETS).read_bytes() != first


def test_secrets_of_before_parts_could_be_left_out(
    secrets: ClientSecrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "secrets"
    whole = asdict(secrets.settings)
    fields = {name: value for name, value in whole.items() if name not in ("leave_out", "tuned")}
    with held(where), monkeypatch.context() as m:
        m.setattr("spu_llm.systems.split.state.asdict", lambda settings: fields)
        secrets.save(where)
    assert same(ClientSecrets.load(where, CONFIG), secrets)


def test_damaged_or_readable_secrets_are_refused(secrets: ClientSecrets, tmp_path: Path) -> None:
    where = tmp_path / "secrets"
    with held(where):
        secrets.save(where)
    path = where / SECRETS
    whole = path.read_bytes()
    for data in (b"", whole[:-1], whole.replace(b'"front.', b'"Front.')):
        path.write_bytes(data)
        with pytest.raises(InputError, match="is damaged"):
            ClientSecrets.load(where, CONFIG)
    path.write_bytes(whole)
    with pytest.raises(InputError, match="is damaged, or of another model"):
        ClientSecrets.load(where, replace(CONFIG, n_embd=8))
    path.chmod(0o644)
    with pytest.raises(InputError, match="others can read"):
        ClientSecrets.load(where, CONFIG)
    where.chmod(0o755)
    with pytest.raises(InputError, match="others can read"), held(where):
        pass
    path.unlink()
    with pytest.raises(InputError, match="No such file"):
        ClientSecrets.load(where, CONFIG)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 4}, "batch 3, not 4"),
        ({"ends": "x"}, "another model"),
        ({"texts": "x"}, "other texts"),
        ({"learning_rate": 0.5}, "learning-rate 0.01, not 0.5"),
        ({"mechanism": "grr"}, "mechanism none, not grr"),
        ({"lora": 2}, "lora 0, not 2"),
        (
            {"leave_out": "codebook", "mechanism": "grr", "epsilon": 4.0},
            "begun with the whole of noir, not without its codebook",
        ),
        ({"tuned": "back"}, "tuned ends, not back"),
    ],
)
def test_another_tuning_is_refused(change: dict[str, Any], said: str) -> None:
    SETTINGS.check_same(replace(SETTINGS, id="1" * 32))
    with pytest.raises(InputError, match=said):
        SETTINGS.check_same(replace(SETTINGS, **change))


def test_the_curve_of_the_loss(tmp_path: Path) -> None:
    losses = Losses(tmp_path, 0)
    for number in range(3):
        losses.add(number, 0.5 + number)
    Losses(tmp_path, 2).add(2, 9.0)
    assert (tmp_path / LOSSES).read_text().splitlines() == [
        '{"round": 0, "loss": 0.5}',
        '{"round": 1, "loss": 1.5}',
        '{"round": 2, "loss": 9.0}',
    ]


@pytest.fixture
def host(params: Params) -> Iterator[HostHalf]:
    yield made(params, rank=2)[1]


def test_the_providers_half_on_disk(host: HostHalf, params: Params, tmp_path: Path) -> None:
    tunings, name = Tunings(tmp_path, "a" * 32), "a" * 32
    for done in (0, 5, 10):
        host.lora = jax.tree.map(lambda w, done=done: w + done, host.lora)
        tunings.save(host, 2, done)
    assert tunings.rounds() == [5, 10]
    other = made(params, rank=2)[1]
    Tunings(tmp_path, name).give(other, 2, 10)
    for a, b in zip(*(jax.tree.leaves((h.lora, h.state)) for h in (host, other)), strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(InputError, match="goes on after round 0 .* after rounds 5, 10"):
        tunings.give(other, 2, 0)
    with pytest.raises(InputError, match="of another rank"):
        tunings.give(made(params, rank=3)[1], 3, 10)
    # The client goes on from round 5, and keeps more often: round 10 is another one's.
    tunings.save(host, 2, 7)
    assert tunings.rounds() == [5, 7]
    assert stat.S_IMODE(os.stat(tunings.folder).st_mode) == 0o700
    for bad in ("", "../" + "a" * 29, "A" * 32):
        with pytest.raises(InputError, match="no id"):
            Tunings(tmp_path, bad)


def test_a_client_fills_no_disk(tmp_path: Path) -> None:
    for number in range(64):
        (tmp_path / f"{number:032x}").mkdir()
    Tunings(tmp_path, f"{63:032x}")
    with pytest.raises(InputError, match="keeps 64 tunings"):
        Tunings(tmp_path, f"{64:032x}")


def test_lora_changes_nothing_at_first(params: Params) -> None:
    x = np.random.default_rng(2).normal(size=(1, 4, CONFIG.width)).astype(np.float32)
    plain, with_lora = made(params)[1], made(params, rank=2)[1]
    np.testing.assert_allclose(plain.middle(x), with_lora.middle(x), atol=1e-6)
