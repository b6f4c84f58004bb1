"""LLaMA: logits against `transformers` and a second reading of the paper, then between two parties:
lanes, positions public and hidden, drafted completions; and checkpoints that are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments.common.replay import dry_parties
from models.calibration import calibrated
from models.draft import Drafter
from models.family import Params, bounds_of, check_ranges, logits, weight_shapes
from models.hf import load_config, load_model, save_model
from models.llama import LlamaConfig, describe, fold, init_params, turns
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.plan import OpCall
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession, Session
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.preparation import demand_of
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.program import SystemPromptShape
from tests.kit.models import LLAMA, save_tokenizer, tiny_params
from tests.models.checkpoints import assert_same, change_config, change_tensors, fault
from tests.models.opened import OPENED
from tests.systems.decoding.watching import Watched

SMALL = LlamaConfig(
    vocab_size=50,
    max_position_embeddings=24,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TIED = replace(SMALL, tie_word_embeddings=True)
# What `transformers` has in torch alone: heads of a size of their own, another base of angles.
ODD = LlamaConfig(20, 40, 12, 10, 2, 6, 2, head_dim=10, rms_norm_eps=1e-2, rope_theta=500.0)
TOKENS = np.random.default_rng(0).integers(50, size=24)


def random_params(config: LlamaConfig) -> Params:
    """Parameters in which every gain differs from its initial value."""
    key = jax.random.key(0)
    return jax.tree.map(
        lambda w: np.asarray(w + 0.2 * jax.random.normal(key, w.shape)), init_params(config, key)
    )


def centred(rows: np.ndarray) -> np.ndarray:
    """Logits of mean zero over the vocabulary, which changes no distribution."""
    return rows - rows.mean(axis=-1, keepdims=True)


# ---- in plaintext


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_logits_are_those_of_transformers(tmp_path: Path, config: LlamaConfig) -> None:
    """From one directory, whose `config.json` is the library's own."""
    import transformers

    save_model(tmp_path, config, random_params(config), dtype=np.float32)
    if config.tie_word_embeddings:  # Flax has no tied heads: it reads the copy

        def copy(stored: dict[str, np.ndarray]) -> None:
            stored["lm_head.weight"] = stored["model.embed_tokens.weight"].copy()

        change_tensors(tmp_path, copy)
        weights = tmp_path / "model.safetensors"
        save_file(load_file(weights), weights, metadata={"format": "pt"})
    transformers.LlamaConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    reference = transformers.FlaxLlamaForCausalLM.from_pretrained(tmp_path)
    wanted = np.asarray(reference(TOKENS[None]).logits[0])
    found_config, params = load_model(tmp_path)
    assert found_config == config
    scores = jax.jit(lambda p, t: logits(p, config, t))(params, TOKENS)
    assert wanted.dtype == scores.dtype == np.float32
    np.testing.assert_allclose(scores, centred(wanted), atol=1e-4)


def slowly(params: Params, config: LlamaConfig, tokens: np.ndarray) -> np.ndarray:
    """Logits [n, vocab] in float64, one head and one position at a time."""
    p = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    size, n = config.head_dim, len(tokens)

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps) * gain

    def head(x: np.ndarray, weight: np.ndarray, h: int) -> np.ndarray:
        return x @ weight[:, h * size : (h + 1) * size]

    def turned(x: np.ndarray) -> np.ndarray:
        out = np.array(x)
        for m in range(n):
            for i in range(size // 2):
                angle = m * config.rope_theta ** (-2 * i / size)
                c, s = np.cos(angle), np.sin(angle)
                j = i + size // 2
                out[m, i], out[m, j] = c * x[m, i] - s * x[m, j], s * x[m, i] + c * x[m, j]
        return out

    x = p["embed"][tokens]
    for b in p["blocks"]:
        y, parts = norm(x, b["ln_1"]), []
        for h in range(config.num_attention_heads):
            shared = h * config.num_key_value_heads // config.num_attention_heads
            q, k = turned(head(y, b["q"], h)), turned(head(y, b["k"], shared))
            scores = np.where(np.tri(n, dtype=bool), q @ k.T / np.sqrt(size), -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            parts.append(weights @ head(y, b["v"], shared))
        x = x + np.concatenate(parts, axis=-1) @ b["o"]
        y = norm(x, b["ln_2"])
        gate = y @ b["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ b["up"])) @ b["down"]
    last = p["head"] if "head" in p else p["embed"].T
    return np.asarray(norm(x, p["norm"]) @ last)


@pytest.mark.parametrize("config", [SMALL, TIED, ODD], ids=["untied", "tied", "odd"])
def test_logits_are_those_of_the_formulas(config: LlamaConfig) -> None:
    """Also when the residual stream is scaled for shares."""
    params, tokens = random_params(config), TOKENS % config.vocab_size
    wanted = centred(slowly(params, config, tokens))
    for shift in (0, 3):
        scaled = replace(config, stream_shift=shift, norm_low=(2.0**-16,), norm_high=(2.0**8,))
        scores = logits(params, scaled, jnp.asarray(tokens))
        np.testing.assert_allclose(scores, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("config", [SMALL, TIED, ODD], ids=["untied", "tied", "odd"])
def test_round_trip(tmp_path: Path, config: LlamaConfig) -> None:
    params = random_params(config)
    save_model(tmp_path, config, params, dtype=np.float32)
    found_config, loaded = load_model(tmp_path)
    assert found_config == config
    assert_same(loaded, params)
    stored = load_file(tmp_path / "model.safetensors")
    few = config.num_key_value_heads * config.head_dim
    assert stored["model.layers.1.self_attn.k_proj.weight"].shape == (few, config.hidden_size)


def test_an_old_config_lacks_what_follows(tmp_path: Path) -> None:
    """LLaMA's first ones: no grouped queries, heads of the usual size, heads not tied."""
    fields = describe(replace(SMALL, num_key_value_heads=4))
    for name in ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings"):
        del fields[name]
    save_model(tmp_path, SMALL, random_params(SMALL))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    change_config(tmp_path, **fields)
    assert load_config(tmp_path) == replace(SMALL, num_key_value_heads=4)


@pytest.mark.parametrize(
    ("stated", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, 500000.0),
        ({"rope_parameters": {"rope_type": "default"}}, 10000.0),
        ({"rope_theta": 5000.0, "rope_parameters": {"rope_type": "default"}}, 5000.0),
        ({"rope_theta": 5000, "rope_scaling": {"rope_type": "default"}}, 5000.0),
        ({"rope_scaling": {"type": "default"}}, 10000.0),
        ({"rope_scaling": None, "rope_parameters": None}, 10000.0),
    ],
)
def test_plain_rotary_positions_however_they_are_stated(
    tmp_path: Path, stated: dict[str, Any], theta: float
) -> None:
    """As releases of the transformers library before 5 and since then write them."""
    fields = describe(SMALL)
    del fields["rope_theta"], fields["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps(fields | stated))
    assert load_config(tmp_path) == replace(SMALL, rope_theta=theta)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'with rope_type "dynamic"; only'),
        ({"rope_scaling": {"type": "default", "rope_type": "yarn"}}, '"default" and "yarn"; only'),
        ({"rope_scaling": {}}, "rope_scaling with rope_type none; only"),
        ({"rope_scaling": "default"}, 'rope_scaling = "default"; it must be an object'),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters with rope_type none; only"),
        ({"rope_parameters": {"rope_type": ["default"]}}, 'rope_type ["default"]; only'),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            "rope_parameters.rope_theta 5.0 beside rope_theta 10000.0; leave one",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5; only 1.0",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5; only 1.0"),
        ({"attention_bias": True}, "attention_bias = true; only false"),
        ({"mlp_bias": True}, "mlp_bias = true; only false"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"; only silu'),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings 1; it must be true or false"),
        ({"rope_theta": "10000"}, 'rope_theta "10000"; it must be above 1'),
        ({"rope_theta": 0.5}, "rope_theta 0.5; it must be above 1"),
        ({"rope_theta": 10**400}, "rope_theta 1000"),
        ({"rope_theta": float("inf")}, "rope_theta Infinity"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0; it must be a positive integer"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0; it must be a positive integer"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": None, "hidden_size": 34}, "hidden_size must be a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"num_hidden_layers": 2}, "more layers than 2, the number"),
        ({"num_hidden_layers": 4}, "has no tensor model.layers.3.input_layernorm.weight"),
        ({"tie_word_embeddings": True}, "only a tied head is supported"),
        ({"intermediate_size": 40}, "gate_proj.weight of shape [48, 32], expected [40, 32]"),
        ({"head_dim": 16}, "q_proj.weight of shape [32, 32], expected [64, 32]"),
    ],
)
def test_config_does_not_fit(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    directory = tmp_path / "model"
    save_model(directory, SMALL, random_params(SMALL), dtype=np.float32)
    change_config(directory, **changes)
    assert expected in fault(directory)


def test_a_head_of_its_own_is_needed(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    save_model(directory, TIED, random_params(TIED), dtype=np.float32)
    change_config(directory, tie_word_embeddings=False)
    assert "has no tensor lm_head.weight" in fault(directory)


# ---- what weights bound


def test_no_activation_passes_its_bound_and_some_come_near() -> None:
    d, inner, size = SMALL.hidden_size, SMALL.intermediate_size, SMALL.head_dim
    weights = jax.tree.map(np.asarray, fold(random_params(SMALL), SMALL))
    weights["blocks"] = weights["blocks"][:1]
    (block,), (bound,) = weights["blocks"], bounds_of(weights, SMALL).blocks
    x = np.random.default_rng(0).normal(size=(20_000, d))
    x[: 2 * inner] = block["gate_up"]["weight"].T  # the worst rows
    x /= np.sqrt(np.mean(x * x, axis=1, keepdims=True))
    gate, up = np.split(x @ block["gate_up"]["weight"], 2, axis=1)
    assert 0.9 * bound.activation < np.abs(gate).max() <= bound.activation
    gated = gate / (1 + np.exp(-gate)) * up
    assert np.abs(gated).max() <= bound.product
    added = np.abs(gated @ block["down"]["weight"])
    assert added.max() <= bound.inner
    lengths = np.linalg.norm(gated, axis=1, keepdims=True)
    assert 0.5 * bound.per_length < np.max(added / lengths) <= bound.per_length
    query, key, value = np.split(x @ block["qkv"]["weight"], [32, 48], axis=1)
    assert 0.5 * bound.value < np.abs(value).max() <= bound.value
    # Every head of queries may look at another row.
    values, out = value.reshape(-1, 2, size), block["out"]["weight"].reshape(4, size, d)
    attended = sum(np.abs(values[:, h // 2] @ out[h]).max(axis=0) for h in range(4))
    assert np.max(attended) <= bound.attended <= bound.added(0.0)
    cos, sin = np.moveaxis(turns(SMALL)[[0, 7], :, :, 0], -1, 0)
    largest = 0.0
    for head in range(4):
        q = query[:3000, head * size : (head + 1) * size]
        k = key[:3000, head // 2 * size : (head // 2 + 1) * size]
        for at in (0, 1):  # any turn of one against the other
            a, b = np.split(q, 2, axis=1)
            turned = np.concatenate([a * cos[at] - b * sin[at], b * cos[at] + a * sin[at]], axis=1)
            largest = max(largest, np.abs(turned @ k.T).max())
    assert 0.2 * bound.score < largest <= bound.score


def test_ranges_are_chosen_for_a_model_beyond_the_default() -> None:
    params = random_params(SMALL)
    params["embed"] = 400.0 * params["embed"]  # type: ignore[index]
    for block in params["blocks"]:
        block["ln_2"] = 20.0 * block["ln_2"]
        block["down"] = 0.01 * block["down"]
    chosen = calibrated(SMALL, params, [TOKENS])
    assert isinstance(chosen, LlamaConfig) and chosen.stream_shift > 0
    check_ranges(fold(params, chosen), chosen)
    wanted = centred(slowly(params, SMALL, TOKENS))
    scores = logits(params, chosen, jnp.asarray(TOKENS))
    np.testing.assert_allclose(scores, wanted, atol=1e-4 * np.abs(wanted).max())


def with_far_bounds(name: str, size: float) -> Params:
    """Weights along a direction that no text takes: a bound far above all activations."""
    params = jax.tree.map(np.array, random_params(SMALL))
    params["embed"][:, 0] = 0
    for block in params["blocks"]:
        block["o"][:, 0] = block["down"][:, 0] = 0
        block[name][0] = size
    return params


def test_the_stream_is_scaled_for_what_bounds_say() -> None:
    params = with_far_bounds("v", 1500.0)
    with pytest.raises(InputError, match="activations can reach"):
        check_ranges(fold(params, SMALL), SMALL)
    chosen = calibrated(SMALL, params, [TOKENS])
    assert chosen.stream_shift > 0
    wanted = centred(slowly(params, SMALL, TOKENS))
    scores = logits(params, chosen, jnp.asarray(TOKENS))
    np.testing.assert_allclose(scores, wanted, atol=1e-4 * np.abs(wanted).max())
    # So small that scaled rows would be noise.
    params["embed"] *= 2.0**-6  # type: ignore[index]
    with pytest.raises(InputError, match="activations can reach"):
        calibrated(SMALL, params, [TOKENS])


def test_products_that_weights_do_not_bound_are_checked() -> None:
    """As long as the last matrix takes them, and no longer."""
    params = with_far_bounds("up", 200.0)
    with pytest.raises(InputError, match="can reach .* in block"):
        check_ranges(fold(params, SMALL), SMALL)
    chosen = calibrated(SMALL, params, [TOKENS])
    assert chosen.stream_shift == 0 and any(chosen.longest_inner)
    wanted = centred(slowly(params, SMALL, TOKENS))
    scores = logits(params, chosen, jnp.asarray(TOKENS))
    np.testing.assert_allclose(scores, wanted, atol=1e-4 * np.abs(wanted).max())
    for longest in (0.0, 2.0**13):
        some = tuple(longest if most else 0.0 for most in chosen.longest_inner)
        with pytest.raises(InputError, match="can reach .* in block"):
            check_ranges(fold(params, chosen), replace(chosen, longest_inner=some))


# ---- between two parties

PARAMS = tiny_params(LLAMA, 5)
PROMPTS = [[40, 41, 42, 43], [50, 51]]
COUNT = 3  # rows of a step
RETAINED = np.array([[1, 1, 0], [1, 0, 0]], bool)  # of each step, lane by lane


def tokens_of(lane: int, step: int) -> list[int]:
    return [100 + 40 * step + 7 * lane + i for i in range(COUNT)]


def decode(session: Session, weights: Any, lanes: Sequence[int], hidden: bool) -> list[Any]:
    """Return the opened rows of the prefill and of two steps, lane by lane. Some rows of the first
    step are rejected; where that is hidden, the block is packed before the second step.
    """
    prompts = [PROMPTS[lane] for lane in lanes]
    longest = max(map(len, prompts))
    live = longest + 2
    sizes = (longest, live + COUNT if hidden else longest + 2 * COUNT)
    layout = SessionShape(LLAMA, tuple(map(len, prompts)), sizes, live, hidden, packs=hidden)
    decoder = Decoder(session, layout, OPENED, weights)
    inputs = JudgeInputs(None, None)

    def given(rows: list[list[int]]) -> Any:
        return session.private(CLIENT, np.array, (len(rows), len(rows[0])), np.int32, rows)

    padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
    collected = [decoder.prefill(given(padded), inputs)]
    for step in range(2):
        rows = [tokens_of(lane, step) for lane in lanes]
        collected.append(decoder.step(given(rows), inputs, RETAINED[list(lanes)]))
    return [session.get(judged.outcome) for judged in collected]


_whole = jax.jit(lambda tokens: logits(PARAMS, LLAMA, tokens))


def whole(text: list[int]) -> np.ndarray:
    """Logits [n, vocab] of a text without a cache."""
    padded = text + [0] * (LLAMA.context - len(text))  # what follows changes nothing before
    return np.asarray(_whole(np.array(padded, np.int32)))[: len(text)]


def alone(lane: int) -> list[np.ndarray]:
    """Return the same rows of one lane's text, without a cache."""
    text = list(PROMPTS[lane])
    collected = [whole(text)[-1:]]
    for step in range(2):
        fresh = tokens_of(lane, step)
        collected.append(whole(text + fresh)[-COUNT:])
        text += [t for t, stays in zip(fresh, RETAINED[lane], strict=True) if stays]
    return collected


@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("lanes", [[0], [1, 0]], ids=["one", "two"])
def test_steps_of_lanes_equal_the_whole(lanes: list[int], hidden: bool) -> None:
    session = PlaintextSession()
    actual = decode(session, share_weights(session, LLAMA, PARAMS), lanes, hidden)
    for i, lane in enumerate(lanes):
        for of_step, wanted in zip(actual, alone(lane), strict=True):
            np.testing.assert_allclose(of_step[i], wanted, atol=2e-5)


@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
def test_two_party_logits(own_simulation: Simulation, hidden: bool) -> None:
    """Two lanes, positions public and hidden, rejected rows, a packed block."""
    lanes = [0, 1]

    def program(session: PartySession) -> Any:
        params = None if session.rank == CLIENT else PARAMS
        return decode(session, share_weights(session, LLAMA, params), lanes, hidden)

    client, provider = own_simulation.run(program)
    assert provider == [None] * 3
    for i, lane in enumerate(lanes):
        for of_step, wanted in zip(client, alone(lane), strict=True):
            np.testing.assert_allclose(of_step[i], wanted, atol=0.05)


@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
def test_a_forward_has_no_segment(hidden: bool) -> None:
    """All that is not one party's own work is an op, or linear work on shares."""
    party = dry_parties()[CLIENT]
    layout = SessionShape(LLAMA, (4,), (4, 4 + COUNT), 4, hidden)
    decoder = Decoder(party, layout, OPENED, weight_shapes(LLAMA))
    shape = jax.ShapeDtypeStruct
    decoder.prefill(shape((1, 4), np.int32), decoder.judge_shapes(1))
    decoder.step(shape((1, COUNT), np.int32), decoder.judge_shapes(COUNT), None)
    calls = party.taken()
    assert [call.function.name for call in calls][0] == "prefill" and len(calls) >= 2
    for call in calls:
        assert all(isinstance(step, OpCall) or step.local for step in call.plan.steps)


# ---- drafted completions

PROMPT = PROMPTS[0]


def drafts_params() -> Params:
    """Return a draft model's that often agrees."""
    return jax.tree.map(
        lambda w, e: w + 0.3 * e if w.ndim == 2 else w, PARAMS, tiny_params(LLAMA, 105)
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


def client_side(tokenizer: Tokenizer, completion: Completion) -> ClientSide:
    streams = Streams(Prg.from_seed(8, "drafts"), Prg.from_seed(8, "sampling"))
    drafter = Drafter(LLAMA, drafts_params(), 80)
    return ClientSide(list(PROMPT), tokenizer, drafter, completion.verifier, streams)


def provider_stream() -> Prg:
    return Prg.from_seed(8, "joint randomness")


@pytest.mark.parametrize("show", [True, False], ids=["shown", "hidden"])
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_drafts_verified_by_two_parties(
    own_simulation: Simulation, tokenizer: Tokenizer, temperature: float, show: bool
) -> None:
    """The plaintext text; every step finds all that it takes, and takes what is prepared."""
    completion = Completion.of(LLAMA, Request(len(PROMPT), 6, 2, temperature, show_progress=show))
    plain_session, plain = PlaintextSession(), client_side(tokenizer, completion)
    weights = share_weights(plain_session, LLAMA, PARAMS)
    decoder = completion.decoder(plain_session, weights)
    generate(plain_session, completion, decoder, plain, provider_stream())

    def program(session: PartySession) -> Any:
        client = session.local(CLIENT, client_side, tokenizer, completion)
        provider = session.local(PROVIDER, provider_stream)
        params = None if session.rank == CLIENT else PARAMS
        weights = share_weights(session, LLAMA, params)
        watched: Any = Watched(session)
        decoder = completion.decoder(watched, weights)
        report = generate(watched, completion, decoder, client, provider)
        course = demand_of(session.dry(), completion, weights, report.steps)
        for name, need in sum(course, Demand()).correlations.items():
            assert watched.units[name] == need.units, name
        return client, report

    client, report = own_simulation.run(program)[CLIENT]
    assert client.tokens == plain.tokens
    assert report.accepted > 0 and (temperature or report.accepted < report.drafted)


def test_greedy_drafts_do_not_change_the_text(tokenizer: Tokenizer) -> None:
    completion = Completion.of(LLAMA, Request(len(PROMPT), 12, 3, 0.0))
    session, client = PlaintextSession(), client_side(tokenizer, completion)
    decoder = completion.decoder(session, share_weights(session, LLAMA, PARAMS))
    report = generate(session, completion, decoder, client, provider_stream())
    text = list(PROMPT)
    for _ in client.tokens:
        text.append(int(np.argmax(whole(text)[-1])))
    assert client.tokens == text[len(PROMPT) :] and report.accepted > 0


@pytest.mark.parametrize("show", [True, False], ids=["shown", "hidden"])
def test_text_before_the_prompt_is_part_of_the_text(tokenizer: Tokenizer, show: bool) -> None:
    """A public one, and the provider's own, of which the client knows a rounded length, no more:
    distances between positions are those of one long text.
    """
    system, prefix = [50, 51, 52, 53, 54], (30, 31)
    request = Request(len(PROMPT), 10, 3, 0.0, show_progress=show, public_prefix=prefix)
    completion = Completion.of(LLAMA, request, SystemPromptShape(8, 7))
    session, client = PlaintextSession(), client_side(tokenizer, completion)
    client.prefix = list(prefix)
    weights = share_weights(session, LLAMA, PARAMS)
    decoder = completion.decoder(session, weights, completion.text(session, system))
    generate(session, completion, decoder, client, provider_stream())
    text = [*prefix, *system, *PROMPT]
    for _ in client.tokens:
        text.append(int(np.argmax(whole(text)[-1])))
    assert client.tokens == text[-len(client.tokens) :] and len(client.tokens) == 10
