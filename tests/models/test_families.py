"""Families with LLaMA's blocks: logits are those of `transformers`, bounds hold with biases, and
what is another model than is computed here is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.family import ModelConfig, bounds_of, config_from, family_of, logits
from models.hf import load_config, load_model, save_model
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.decoding.session_shape import SessionShape
from tests.models.checkpoints import assert_same
from tests.models.opened import OPENED
from tests.models.references import LAST, MODELS, params_of, recorded, tokens_of

QWEN2, MISTRAL = MODELS["qwen2"], MODELS["mistral"]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    save_model(tmp_path, MODELS[name], params_of(name), dtype=np.float32)
    config, params = load_model(tmp_path)
    assert config == MODELS[name] == config_from(config.asdict())
    assert_same(params, params_of(name))
    wanted = recorded(name)
    scores = logits(params, config, jnp.asarray(tokens_of(name)))[-LAST:]
    np.testing.assert_allclose(scores, wanted - wanted.mean(axis=-1, keepdims=True), atol=1e-4)


def stated(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    return {**family_of(config).describe(config), **changes}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 63}, "sliding_window = 63, below max_position_embeddings"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0; it must be a positive integer"),
        ("mistral", {"hidden_act": "gelu"}, 'hidden_act "gelu"; only silu'),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = true; only false"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5; only 1.0"),
        ("llama", {"model_type": "qwen3"}, "is a qwen3 model; only gpt2, llama, mistral, qwen2"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, 'rope_type "yarn"; only "default"'),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor = null; it must be a"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "must be 1 to 1e6"),
        (
            "llama",
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            "low_freq_factor must be positive, and below",
        ),
        (
            "llama",
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1.5}},
            "original_max_position_embeddings = 1.5; it must be whole",
        ),
        (
            "llama",
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters and rope_scaling that differ",
        ),
    ],
)
def test_another_model_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stated(MODELS[name], **changes)))
    with pytest.raises(InputError) as caught:
        load_config(tmp_path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_window_that_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(stated(MISTRAL, sliding_window=64)))
    assert load_config(tmp_path) == MISTRAL
    fields = stated(MISTRAL)
    del fields["sliding_window"]  # 4096 then
    path.write_text(json.dumps(fields))
    assert load_config(tmp_path) == MISTRAL


def test_no_activation_passes_its_bound_with_biases() -> None:
    """Queries, keys, values and scores of the worst rows, of one block."""
    rng, config = np.random.default_rng(0), replace(QWEN2, num_hidden_layers=1)  # type: ignore[call-arg]
    params = params_of("qwen2")
    params["blocks"] = params["blocks"][:1]  # type: ignore[index]
    params["blocks"][0]["k_bias"] *= 30  # as published ones are, far above the products
    weights = jax.tree.map(np.asarray, family_of(config).fold(params, config))
    (bound,) = bounds_of(weights, config).blocks
    qkv = weights["blocks"][0]["qkv"]
    x = rng.normal(size=(4000, 16))
    x[:32] = qkv["weight"].T * np.sign(qkv["bias"])[:, None]
    x /= np.sqrt(np.mean(x * x, axis=1, keepdims=True))
    query, key, value = np.split(x @ qkv["weight"] + qkv["bias"], [16, 24], axis=1)
    assert 0.9 * bound.value < np.abs(value).max() <= bound.value
    assert max(np.abs(query).max(), np.abs(key).max()) <= bound.product
    reach = max(
        np.linalg.norm(query.reshape(-1, 2, 2, 4)[:, h], axis=-1).max()
        * np.linalg.norm(key.reshape(-1, 2, 4)[:, h], axis=-1).max()
        for h in range(2)
    )
    assert 0.3 * bound.score < reach <= bound.score


@pytest.mark.slow
def test_two_party_logits_with_biases(own_simulation: Simulation) -> None:
    """Of a prefill's last row."""
    params, prompt = params_of("qwen2"), tokens_of("qwen2")[:5].astype(np.int32)

    def program(session: PartySession) -> Any:
        weights = share_weights(session, QWEN2, None if session.rank == CLIENT else params)
        decoder = Decoder(session, SessionShape(QWEN2, (5,), (5, 5), 5, False), OPENED, weights)
        given = session.private(CLIENT, lambda: prompt[None], (1, 5), np.int32)
        return session.get(decoder.prefill(given, JudgeInputs(None, None)).outcome)

    opened, nothing = own_simulation.run(program)
    assert nothing is None
    wanted = np.asarray(logits(params, QWEN2, jnp.asarray(prompt)))[-1:]
    np.testing.assert_allclose(opened[0], wanted, atol=0.01 * np.abs(wanted).max())
