"""What activations can be: bounds that hold, ranges that fit, and models that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.fidelity.logits import build
from models.cache import rows_after
from models.calibration import activations, calibrated
from models.family import Params, bounds_of, check_ranges, config_from, family_of, logits
from models.files import RANGES_FILE
from models.gpt2 import GPT2Config, fold, init_params
from models.hf import load_config, load_model, load_uncalibrated, save_model, save_ranges
from models.ranges import Linear, Ranges, largest_score
from models.split import Split
from protocols.functions.norms import norm_high
from spu_llm.core.errors import InputError, RangeError
from spu_llm.core.values import CLIENT
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from tests.kit.models import tiny_params

CONFIG = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)


def weights(scale: float, name: str) -> Any:
    """Return folded weights of a random model, those of one kind of layer `scale` times as
    large.
    """
    return fold(params_with(scale, name), CONFIG)


def params_with(scale: float, name: str) -> Params:
    params = init_params(CONFIG, jax.random.key(0))
    noise = jax.random.normal(jax.random.key(1), (8, 64))
    for i, block in enumerate(params["blocks"]):
        m = block[name]["weight"].shape[1]  # type: ignore[literal-required]
        block[name] = {"weight": scale * noise[:, :m] * (i + 1), "bias": scale * noise[0, :m]}  # type: ignore[literal-required]
    return params


def rows(count: int) -> np.ndarray:
    """Random rows with mean square 1."""
    x = np.random.default_rng(0).normal(size=(count, CONFIG.n_embd))
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True))


def test_no_row_passes_the_bounds_and_some_come_near() -> None:
    block = jax.tree.map(np.asarray, weights(1.0, "fc"))["blocks"][1]["fc"]
    actual = rows(20_000) @ block["weight"] + block["bias"]
    bound = Linear.of(block).largest(CONFIG.n_embd)
    assert 0.7 * bound < np.max(np.abs(actual)) <= bound
    bound = Linear.of(block).longest(CONFIG.n_embd)
    assert 0.7 * bound < np.max(np.linalg.norm(actual, axis=1)) <= bound

    qkv = jax.tree.map(np.asarray, weights(1.0, "qkv"))["blocks"][1]["qkv"]
    weight, bias = Linear.of(qkv)
    bound = max(
        largest_score(
            Linear(weight[:, h : h + 4], bias[h : h + 4]),
            Linear(weight[:, 8 + h : 12 + h], bias[8 + h : 12 + h]),
            CONFIG.n_embd,
        )
        for h in (0, 4)
    )
    query, key, _ = np.split(rows(3000) @ qkv["weight"] + qkv["bias"], 3, axis=1)
    scores = [query[:, h : h + 4] @ key[:, h : h + 4].T for h in (0, 4)]
    assert 0.3 * bound < np.max(np.abs(scores)) <= bound


def test_a_model_within_its_ranges_is_served() -> None:
    check_ranges(weights(1.0, "fc"), CONFIG)


@pytest.mark.parametrize(
    ("scale", "name", "what"),
    [(10.0, "fc", "feed-forward inputs"), (30.0, "qkv", "attention scores")],
)
def test_a_model_beyond_its_ranges_is_refused(scale: float, name: str, what: str) -> None:
    params = params_with(scale, name)
    with pytest.raises(InputError, match=f"{what} can reach .* spu-llm calibrate") as caught:
        check_ranges(fold(params, CONFIG), CONFIG)
    assert "\n" not in str(caught.value)
    chosen = calibrated(CONFIG, params, [np.arange(16)])
    check_ranges(fold(params, chosen), chosen)


@pytest.mark.parametrize(
    ("scale", "name", "what"),
    [
        (100.0, "fc", "feed-forward inputs can reach"),
        (100.0, "qkv", "attention scores can"),
        (1e8, "out", "activations can reach"),
    ],
)
def test_a_model_that_no_range_holds_is_refused_in_one_line(
    scale: float, name: str, what: str
) -> None:
    params = params_with(1.0, name)
    for block in params["blocks"]:
        block[name]["weight"] = scale * block[name]["weight"]
    with pytest.raises(InputError, match=what) as caught:
        check_ranges(fold(params, CONFIG), CONFIG)
    assert "cannot be served" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InputError):
        calibrated(CONFIG, params, [np.arange(16)])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(value: float) -> None:
    broken = weights(1.0, "fc")
    broken["blocks"][0]["fc"]["weight"] = broken["blocks"][0]["fc"]["weight"].at[0, 0].set(value)
    with pytest.raises(InputError, match="NaN or infinite"):
        check_ranges(broken, CONFIG)


@pytest.mark.parametrize(
    "wrong",
    [
        {"norm_low": (0.0,)},
        {"norm_low": (2.0,), "norm_high": (1.0,)},
        {"norm_low": (2.0**-20,)},
        {"norm_low": (1.0, 1.0)},
        {"norm_low": (), "norm_high": ()},
        {"longest_inner": (-1.0,)},
        {"largest_activation": (5000.0,)},
        {"largest_score": (9.0, float("nan"))},
        {"stream_shift": -1},
        {"logit_spread": 1e6},
        {"logit_spread": 32.0},
        {"public_rows": -1},
        {"largest_score": ()},
        {"longest_inner": (1e6,)},
    ],
)
def test_ranges_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Ranges(**wrong)


@pytest.mark.parametrize("width", [64, 256, 768, 1600, 4096])
@pytest.mark.parametrize("octaves", [1, 8, 26])
def test_every_range_of_a_norm_that_is_accepted_can_be_built(width: int, octaves: int) -> None:
    high = norm_high(width)
    shape = {"vocab_size": 8, "n_positions": 8, "n_embd": width, "n_layer": 1, "n_head": 1}
    config = GPT2Config(**shape, norm_low=(high * 2.0**-octaves,), norm_high=(high,))  # type: ignore[arg-type]
    assert config.norm_range(2)[1] == high
    with pytest.raises(ValueError, match="mean squares"):
        replace(config, norm_low=(high,), norm_high=(2 * high,))


def test_values_that_attention_cannot_add_up_are_refused() -> None:
    """Before they are normalised, weights of a whole cache come to its number of rows."""
    params = params_with(1.0, "fc")
    for scale, refused in ((2.0**12, False), (2.0**14, True)):
        params["blocks"][0]["qkv"]["bias"] = np.full(24, scale, np.float32)
        weights = jax.tree.map(np.array, fold(params, CONFIG))
        weights["blocks"][0]["qkv"]["bias"][:16] *= 0  # queries and keys
        weights["blocks"][0]["out"]["weight"] *= 2.0**-12
        if refused:
            with pytest.raises(InputError, match="activations can reach"):
                check_ranges(weights, CONFIG)
        else:
            check_ranges(weights, CONFIG)


# ---- a model with outliers, as trained ones have them

OUTLIERS = GPT2Config(vocab_size=64, n_positions=24, n_embd=64, n_layer=2, n_head=2)
TEXT = np.arange(24) * 7 % 64


def outliers() -> Params:
    """Return a residual norm of 3,000 at the first position, scores to about 200, inputs of the
    GELU to about 60, and a bound of more than 150 nats on the spread of logits.
    """
    params = tiny_params(OUTLIERS, 3)
    params["wpe"] *= 4  # type: ignore[index]
    params["wte"] *= 2  # type: ignore[index]
    params["wpe"][0, 5] = 3000.0
    for block in params["blocks"]:
        block["qkv"]["weight"][:, :128] *= 7.8
        block["fc"]["weight"][:, 7] *= 28.0
        block["proj"]["weight"] *= 0.2
    params["ln_f"]["gain"] = np.full(64, 4.5, np.float32)
    return params


def test_outliers_are_as_large_as_they_should_be() -> None:
    params = outliers()
    seen = calibration_squares(params)
    assert np.sqrt(seen.max() * 64) == pytest.approx(3000, rel=0.02)
    actual = bounds_of(fold(params, OUTLIERS), OUTLIERS)
    assert actual.spread > 150
    assert np.sqrt(seen.min() * 64) < 10  # other positions
    folded = jax.tree.map(np.asarray, fold(params, OUTLIERS))
    x = folded["wte"][TEXT] + folded["wpe"][: len(TEXT)]
    x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True))
    block = folded["blocks"][0]
    query, key, _ = np.split(x @ block["qkv"]["weight"], 3, axis=1)
    scores = [np.abs(query[:, h : h + 32] @ key[:, h : h + 32].T).max() for h in (0, 32)]
    assert 150 < max(scores) < 250
    assert 50 < np.abs(x @ block["fc"]["weight"]).max() < 80


# Part of the logits' range that two parties may be off by. Their largest error is 0.3 of it, with a
# deviation of 0.04 from run to run.
OFF = 8e-3


def calibration_squares(params: Params) -> np.ndarray:
    return activations(OUTLIERS, fold(params, OUTLIERS), TEXT).squares


def secure_logits(simulation: Simulation, config: GPT2Config, params: Params, ids: Any) -> Any:
    """Run the forward between two parties; return the client's and the provider's result or
    error.
    """
    forward, folded = build(config), fold(params, config)

    def program(session: PartySession) -> Any:
        held = jax.tree.map(
            lambda w: session.private(1 - CLIENT, lambda: np.asarray(w), w.shape, w.dtype), folded
        )
        tokens = session.private(CLIENT, lambda: np.asarray(ids), (len(ids),), np.int32)
        try:
            return session.get(session.call(forward, held, tokens))
        except RangeError as error:
            return error

    return simulation.run(program)


def test_a_model_with_outliers_is_right_in_its_own_ranges(own_simulation: Simulation) -> None:
    """The first position included; the residual stream is scaled down by a power of two."""
    params = outliers()
    with pytest.raises(InputError, match="spu-llm calibrate"):
        check_ranges(fold(params, OUTLIERS), OUTLIERS)
    chosen = calibrated(OUTLIERS, params, [TEXT])
    assert chosen.stream_shift > 0 and max(chosen.norm_high) <= norm_high(64)
    ids = TEXT[:10]
    scores, _ = secure_logits(own_simulation, chosen, params, ids)
    exact = np.asarray(logits(params, OUTLIERS, jnp.asarray(ids)))
    assert np.max(np.abs(scores - exact)) < OFF * np.ptp(exact)


AT = 9  # the position that the unit of the next model knows


def outliers_of_a_unit() -> Params:
    """Return a residual norm of 3,000 at one position, which one unit of the first block writes
    there, as units of trained models do: nothing in the embeddings is as large.
    """
    params = tiny_params(OUTLIERS, 3)
    params["wpe"] *= 4  # type: ignore[index]
    params["wte"] *= 2  # type: ignore[index]
    params["wpe"][AT, 5] = 40.0
    unit = params["blocks"][0]
    unit["fc"]["weight"][:, 7], unit["fc"]["bias"][7] = 0, -40
    unit["fc"]["weight"][5, 7] = 11.25
    unit["proj"]["weight"][7, :] = 0
    unit["proj"]["weight"][7, 9] = 60
    return params


@pytest.mark.slow
def test_a_unit_may_write_the_outlier() -> None:
    """Right where the model was calibrated on text with that position; where it was not, rows
    outside the ranges end the session at both parties.
    """
    params = outliers_of_a_unit()
    chosen = calibrated(OUTLIERS, params, [TEXT])
    assert np.sqrt(calibration_squares(params).max() * 64) == pytest.approx(3000, rel=0.1)
    assert chosen.stream_shift > 0
    ids = TEXT[: AT + 2]
    with Simulation() as simulation:
        scores, _ = secure_logits(simulation, chosen, params, ids)
    exact = np.asarray(logits(params, OUTLIERS, jnp.asarray(ids)))
    assert np.max(np.abs(scores - exact)) < OFF * np.ptp(exact)
    blind = calibrated(OUTLIERS, params, [TEXT[:AT]])
    with Simulation() as simulation:
        for seen in secure_logits(simulation, blind, params, ids):
            assert isinstance(seen, RangeError), seen


def test_a_first_row_that_is_public_need_not_fit() -> None:
    """A norm so large that no range holds it and all others: refused, but where each text begins
    with public tokens, of which those that fit need not be public.
    """
    params = outliers()
    params["wpe"][0, 5] = 2.0**17
    with pytest.raises(InputError, match="octaves"):
        calibrated(OUTLIERS, params, [TEXT])
    chosen = calibrated(OUTLIERS, params, [TEXT, TEXT[::-1]], public=3)
    assert chosen.public_rows == 1 and max(chosen.norm_high) <= 64
    assert calibrated(OUTLIERS, tiny_params(OUTLIERS, 3), [TEXT], public=3).public_rows == 0
    with pytest.raises(InputError, match="no text comes after what is public"):
        calibrated(OUTLIERS, params, [TEXT[:3]], public=3)


def far_bounds() -> Params:
    """Return a unit of the first block that a single position sets off, so strong that what weights
    bound is above what shares hold.
    """
    params = jax.tree.map(np.array, tiny_params(OUTLIERS, 3))
    params["wte"][:, 5] = params["wpe"][:, 5] = 0
    params["wpe"][AT, 5] = np.linalg.norm(params["wte"], axis=1).mean()
    for block in params["blocks"]:
        block["fc"]["weight"] *= 0.1
        block["out"]["weight"] *= 0.1
        block["out"]["weight"][:, 5] = block["proj"]["weight"][:, 5] = 0
    unit = params["blocks"][0]
    unit["fc"]["weight"][:, 7], unit["fc"]["bias"][7] = 0, -120
    unit["fc"]["weight"][5, 7], unit["proj"]["weight"][7, :32] = 40, 200
    return params


def test_lengths_that_weights_do_not_bound_are_checked() -> None:
    """Where they need be: in the one block. A text that leaves them ends the session."""
    params = far_bounds()
    chosen = calibrated(OUTLIERS, params, [TEXT[:AT]])
    first, second = chosen.longest_inner
    assert first > 0 == second == chosen.stream_shift
    low, high = min(chosen.norm_low), max(chosen.norm_high)
    chosen = replace(chosen, norm_low=(low / 4,), norm_high=(high,))  # no norm is to notice first
    ids = TEXT[: AT + 1]
    with Simulation() as simulation:
        scores, _ = secure_logits(simulation, chosen, params, ids[:6])
        left = secure_logits(simulation, chosen, params, ids)
    exact = np.asarray(logits(params, OUTLIERS, jnp.asarray(ids[:6])))
    assert np.max(np.abs(scores - exact)) < OFF * np.ptp(exact)
    assert all(isinstance(seen, RangeError) for seen in left), left
    assert "rows of gates in block 0" in str(left[CLIENT])


def test_sites_are_named_as_in_the_whole_model() -> None:
    """Also where a part of its blocks is run alone."""
    config, family = OUTLIERS, family_of(OUTLIERS)
    weights = fold(tiny_params(config, 3), config)
    x, rows = jnp.ones((2, config.width)), rows_after(0, 2, 2)
    _, _, whole = family.forward(weights, config, x, rows, config.empty_cache(2))
    kinds = "norm of attention", "sums of attention", "norm of feed-forward"
    blocks = [f"{kind} in block {i}" for i in (0, 1) for kind in kinds]
    assert list(whole) == [*blocks, "last norm"]
    part = config.with_blocks([1])
    cache = part.empty_cache(2)
    _, _, actual = family.through(weights["blocks"][1:], part, x, rows, cache, first=1)
    assert list(actual) == blocks[3:]


def test_each_block_keeps_its_ranges() -> None:
    chosen = calibrated(OUTLIERS, far_bounds(), [TEXT[:AT]])
    last = chosen.with_blocks([1])
    assert last.layers == 1 and last.longest_inner == chosen.longest_inner[1:]
    assert last.norm_low == chosen.norm_low[2:] and len(last.norm_high) == 3
    assert chosen.with_layers(4).longest_inner == 2 * chosen.longest_inner
    assert Split(1, 0).held(chosen) == last


def test_ranges_are_stated_as_scalars() -> None:
    chosen = calibrated(OUTLIERS, far_bounds(), [TEXT[:AT]])
    stated = chosen.asdict()
    assert isinstance(stated["norm_low"], str) and config_from(stated) == chosen
    for wrong in ("", "1,", "nan", "x", "1,2,3", "0.5" + ",1" * 4, [1.0], 1.0):
        with pytest.raises(ValueError):
            config_from(stated | {"norm_low": wrong})


def test_ranges_are_stored_beside_the_weights(tmp_path: Path) -> None:
    params = outliers()
    chosen = calibrated(OUTLIERS, params, [TEXT])
    save_model(tmp_path, OUTLIERS, params, np.float32)
    assert load_config(tmp_path) == OUTLIERS
    save_ranges(tmp_path / RANGES_FILE, chosen)
    assert load_config(tmp_path) == chosen
    other = tmp_path / "other.json"
    save_ranges(other, OUTLIERS)
    assert load_config(tmp_path, other) == OUTLIERS == load_model(tmp_path, other)[0]
    with pytest.raises(InputError, match="none.json is missing; spu-llm calibrate"):
        load_config(tmp_path, tmp_path / "none.json")
    stored = json.loads((tmp_path / RANGES_FILE).read_text())
    for wrong in ({"norm_low": [1.0]}, stored | {"norm_low": 1.0}, stored | {"norm_low": ["1"]}):
        (tmp_path / RANGES_FILE).write_text(json.dumps(wrong))
        with pytest.raises(InputError, match="calibrate again"):
            load_config(tmp_path)
        assert load_uncalibrated(tmp_path)[0] == OUTLIERS
