"""The criterion on synthetic transcripts, each way it must fail, and one real session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.common.wire import Message
from experiments.completions import transcript
from experiments.completions.transcript import Comparison, Recorded, compare
from models.tokenizer import Tokenizer
from spu_llm.core.values import CLIENT, PROVIDER
from tests.experiments.committed_results import MACHINE, mistakes_of

CIPHERTEXTS, FIXED = 400, 600  # messages per sender


def recorded(name: str, seed: int, shift: int = 0, spread: float = 120.0) -> Recorded:
    """Return a run whose ciphertexts have sizes near 125,000 bytes."""
    rng = np.random.default_rng(seed)
    messages = []
    for sender in (CLIENT, PROVIDER):
        sizes = 125_000 + shift + np.clip(rng.normal(0, spread, CIPHERTEXTS), -400, 400)
        messages += [Message(sender, f"root:P2P-{i}", i, int(size)) for i, size in enumerate(sizes)]
        messages += [
            Message(sender, f"root-2:{i}:ALLGATHER", CIPHERTEXTS + i, 8 * i) for i in range(FIXED)
        ]
    steps = [{"sent_messages": 1000, "received_messages": 1000}]
    return Recorded(name, messages, steps)


EQUAL = [recorded(f"equal {i}", seed=i) for i in range(transcript.EQUAL_RUNS)]


def judged(other: Recorded) -> Comparison:
    return compare(EQUAL, [other])


def changed(other: Recorded, index: int, by: int) -> Recorded:
    messages = list(other.messages)
    messages[index] = replace(messages[index], size=messages[index].size + by)
    return replace(other, messages=messages)


def test_an_equal_run_passes() -> None:
    # The false alarms of 4 are a few in a million; fixed seeds leave nothing to chance.
    for seed in range(100, 120):
        result = judged(recorded("other", seed))
        assert result.failures == []
    assert result.messages == [CIPHERTEXTS + FIXED] * 2
    assert (result.fixed, result.random) == (2 * FIXED, 2 * CIPHERTEXTS)
    assert result.outside_expected == 2 * CIPHERTEXTS * 2 / 5
    assert result.reordered == 0


def test_a_missing_message_fails() -> None:
    other = recorded("other", 100)
    result = judged(replace(other, messages=other.messages[:-1]))
    assert result.failures == ["other: 1 messages in one run only"]


def test_a_further_message_fails() -> None:
    other = recorded("other", 100)
    more = [*other.messages, Message(CLIENT, "root:P2P-9999", 9999, 8)]
    assert judged(replace(other, messages=more)).others[0].other_messages == 1


def test_another_count_in_a_plan_step_fails() -> None:
    other = replace(
        recorded("other", 100), plan_steps=[{"sent_messages": 999, "received_messages": 1000}]
    )
    assert judged(other).others[0].other_counts == 1
    assert judged(replace(other, plan_steps=[])).others[0].other_counts == 1


def test_one_byte_in_a_fixed_message_fails() -> None:
    result = judged(changed(recorded("other", 100), CIPHERTEXTS + 5, by=1))
    assert result.failures == ["other: 1 messages of fixed size have another size"]


def test_one_ciphertext_of_another_length_fails() -> None:
    result = judged(changed(recorded("other", 100), 5, by=8000))
    assert [f.split(" by ")[0] for f in result.failures] == ["other: a size differs"]


@pytest.mark.parametrize("shift", [-150, 150])
def test_a_small_shift_of_all_ciphertexts_fails(shift: int) -> None:
    result = judged(recorded("other", 100, shift=shift))
    assert len(result.failures) == 1 and "out of range" in result.failures[0]


def test_ciphertexts_that_vary_less_fail() -> None:
    assert "out of range" in judged(recorded("other", 100, spread=20.0)).failures[0]


def test_equal_runs_must_agree_themselves() -> None:
    short = replace(EQUAL[0], messages=EQUAL[0].messages[:-1])
    result = compare([*EQUAL[1:], short], [])
    assert result.failures == ["runs with equal secrets differ in their messages"]


def test_sending_order_is_reported_only() -> None:
    messages = list(EQUAL[0].messages)
    first, second = messages[0], messages[1]
    messages[:2] = [replace(first, number=1), replace(second, number=0)]
    result = compare([replace(EQUAL[0], messages=messages), *EQUAL[1:]], [])
    assert (result.reordered, result.failures) == (2, [])


def test_the_tables_name_every_run(tmp_path: Path) -> None:
    from dataclasses import asdict

    other = replace(
        recorded("other prompt", 100),
        plan_steps=[
            {
                "phase": "prefill",
                "sent_bytes": 3,
                "received_bytes": 4,
                "sent_messages": 1000,
                "received_messages": 1000,
            }
        ],
    )
    result = asdict(judged(other)) | {"totals": [transcript._totals(other)]}
    text = transcript.table(result)
    assert "| other prompt | 0 | 0 | 0 |" in text
    assert "prefill, metered" in text and "criterion: holds" in text
    result["machine"] = MACHINE
    sentences, compared, _ = transcript.in_results(result, "data/transcript.json")
    assert "Bytes online in all 1 runs: 7 in prefill." in sentences
    assert "1200 of fixed size" in sentences
    assert compared in text and "| allowed | 0 | 0 | 0 |" in compared
    assert mistakes_of("transcript", result, tmp_path) == []


def test_every_session_fetches_its_hints() -> None:
    """Kept ones would tell a first run from a second one, whatever the secrets."""
    assert not transcript.PROGRAM.keeps_hints


@pytest.mark.slow
def test_a_recorded_session_agrees_with_the_meter(tiny_pair: tuple[Path, Path]) -> None:
    """Two processes: the recorder lists what the client's meter counts, and SPU's hand-shake."""
    private = tiny_pair[0]
    prompt = Tokenizer.load(private).encode("def read")
    secrets = transcript.client_secrets(prompt, vocab=288, seed=0)
    run, _ = transcript._record("equal 1", "run 1 of 1", private, secrets)
    phases = {s["phase"] for s in run.plan_steps}
    assert phases == {"offline", "prefill", "step 1", "step 2"}
    sent = sum(s["sent_bytes"] for s in run.plan_steps)
    received = sum(s["received_bytes"] for s in run.plan_steps)
    totals = transcript._totals(run)
    # Recorded beside: SPU's hand-shake when a runtime starts.
    assert 0 <= totals["client_to_provider"] - sent < 12_000
    assert 0 <= totals["provider_to_client"] - received < 12_000
    metered = sum(s["sent_messages"] + s["received_messages"] for s in run.plan_steps)
    assert 0 <= totals["messages"] - metered < 40
    # Equal to itself, whatever its sizes are.
    assert compare([run] * transcript.EQUAL_RUNS, [run]).failures == []
