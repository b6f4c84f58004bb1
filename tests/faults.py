"""`python -m tests.faults [PYTEST'S OPTIONS]`: meet every fault, and write docs/reference/faults.md
with how long each took. `-m "not slow"` leaves out those that `make test` does, too.

A fault's tests say what both parties do. Its seconds are the longest that a command took to end
after the fault (`Command.assert_failed`) and, since not all of them end one, that a test took.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from spu_llm.core.machine import machine
from tests.kit.paths import ROOT

TABLE = ROOT / "docs" / "reference" / "faults.md"
OBSERVED = "SPU_LLM_OBSERVED"  # names a file for what commands took
LIMIT_S = 15.0


@dataclass(frozen=True)
class Met:
    """A fault, what users see of it, and the tests that meet it (FILE::NAME)."""

    fault: str
    expected: str
    tests: tuple[str, ...]


FAULTS = (
    Met(
        "the peer never starts",
        "`cannot reach provider at HOST:PORT`, exit code 1",
        ("app/test_bad_input.py::test_a_port_where_nobody_listens",),
    ),
    Met(
        "the peer is killed in the midst",
        "each side says so and why; streamed text stays",
        (
            "service/test_faults.py::test_a_killed_provider_ends_the_client",
            "service/test_faults.py::test_a_killed_client_ends_serve_once",
            "service/test_faults.py::test_the_client_s_worker_killed_ends_both",
        ),
    ),
    Met(
        "the peer is frozen, or packets vanish",
        "`peer stalled: no heartbeat for 9 s`",
        (
            "service/test_faults.py::test_a_frozen_provider_ends_the_client",
            "service/test_faults.py::test_a_frozen_client_ends_serve_once",
            "service/test_wire_faults.py::test_a_fault_in_the_midst[black-hole-provider]",
        ),
    ),
    Met(
        "the peer is slow but lives",
        "it is waited for",
        (
            "service/test_faults.py::test_a_slow_worker_is_waited_for",
            "service/test_wire_faults.py::test_a_delay_is_waited_for",
        ),
    ),
    Met(
        "the connection is cut, or anything in it lost, doubled or turned",
        "both end, nothing is resumed; the place is free for a session with fresh randomness",
        (
            "service/test_wire_faults.py::test_a_fault_in_the_midst",
            "service/test_wire_faults.py::test_a_fault_before_there_is_a_session",
            "service/test_faults.py::test_a_spoilt_connection_ends_both",
        ),
    ),
    Met(
        "another program or model",
        "the setting is named with both values, exit code 2",
        (
            "app/test_bad_input.py::test_settings_that_differ_are_named_on_both_sides",
            "app/test_bad_input.py::test_models_with_different_tokenizers_do_not_work_together",
            "runtime/test_secure.py::test_parties_with_different_programs_stop",
        ),
    ),
    Met(
        "other fixed-point bits",
        "the setting is named with both values, exit code 2",
        ("service/test_tickets.py::test_what_sessions_run_on_is_compared",),
    ),
    Met(
        "another ring, protocol, oblivious transfer, wire format or version of SPU",
        "the setting is named with both values, exit code 2",
        (
            "service/test_tickets.py::test_what_sessions_run_on_is_compared",
            "net/test_control_plane.py::test_a_peer_that_is_no_provider",
        ),
    ),
    Met(
        "a stale peer, another session's id",
        "refused: the id follows from both nonces and certificates, and is in every key",
        (
            "service/test_programs.py::test_a_worker_s_peer_knows_the_session",
            "service/test_tickets.py::test_a_ticket_expires_and_its_place_is_free",
        ),
    ),
    Met(
        "a message or a transcript is played back",
        "refused, also after a restart",
        (
            "service/test_tickets.py::test_a_ticket_used_again_is_refused_also_after_a_restart",
            "service/test_tickets.py::test_a_session_played_back_is_refused",
        ),
    ),
    Met(
        "a stranger comes to the data port, or a peer writes something else to SPU's",
        "never reaches SPU, which nobody else can connect to",
        (
            "net/test_link_frames.py::test_a_worker_never_gets_them",
            "net/test_link_frames.py::test_a_program_without_spu_has_no_door_to_it",
            "net/test_stream_channel.py::test_whoever_does_not_say_which_channel_is_no_peer",
            "service/test_sockets.py::test_only_the_provider_s_port_can_be_reached",
            "net/test_tls.py::test_no_certificate_no_tls_and_older_tls",
            "net/test_worker_side.py::test_on_loopback_another_user_is_turned_away",
        ),
    ),
    Met(
        "an expired, unknown or wrong-name certificate",
        "refused, and told at both ends",
        (
            "net/test_tls.py::test_a_certificate_out_of_its_time",
            "net/test_tls.py::test_strangers_are_refused_and_told",
            "net/test_tls.py::test_an_authority_answers_for_names",
            "service/test_certificates.py::test_whoever_is_not_known_is_refused_and_told",
        ),
    ),
    Met(
        "TLS on one side only",
        "`the peer is (not) speaking TLS`, with the options to give",
        ("service/test_certificates.py::test_whoever_is_not_known_is_refused_and_told",),
    ),
    Met(
        "a known peer sends huge or malformed lengths, or too much",
        "that session ends; so many bytes, minutes and MB of memory for one",
        (
            "net/test_relay.py::test_broken_rules_end_the_connection",
            "net/test_stream_channel.py::test_huge_lengths_are_refused",
            "service/test_limits.py::test_a_session_that_takes_too_much_ends_alone",
        ),
    ),
    Met(
        "malformed protobuf, JSON, message or checkpoint",
        "refused; there is no pickle",
        (
            "fuzz/test_fuzz.py::test_changed_bytes_are_taken_or_refused",
            "fuzz/test_fuzz.py::test_recorded_bytes_are_refused",
            "models/test_hf.py::test_weights_truncated",
        ),
    ),
    Met(
        "a message too long for gRPC",
        "refused; others are answered",
        ("net/test_control_plane.py::test_a_manifest_too_large_is_refused",),
    ),
    Met(
        "the client goes in the midst",
        "both workers end, none is left",
        ("service/test_faults.py::test_the_server_outlives_clients_that_fail",),
    ),
    Met(
        "a stranger holds connections, silent, half-open or talking nonsense",
        "the oldest of the address that holds most makes room; whoever is known gets in, also from "
        "that address, and health is answered",
        (
            "service/test_strangers.py::test_strangers_keep_nobody_out",
            "service/test_many_clients.py::test_a_client_that_only_connects_takes_no_place",
            "service/test_many_clients.py::test_a_provider_with_all_places_taken_is_well",
            "service/test_faults.py::test_a_busy_provider_turns_a_client_away_and_goes_on",
        ),
    ),
    Met(
        "a prompt too long",
        "refused before a session, with the numbers, exit code 2",
        ("app/test_bad_input.py::test_a_prompt_too_long_for_the_provider_is_refused",),
    ),
    Met(
        "a worker runs out of memory",
        "that session ends, with what it took and what it may (`--client-memory`)",
        ("service/test_limits.py::test_a_session_that_takes_too_much_ends_alone",),
    ),
    Met(
        "a bad model directory",
        "refused with its path before the provider listens",
        ("app/test_bad_input.py::test_a_damaged_model_is_named",),
    ),
    Met(
        "NaN, infinite or out-of-range weights and activations",
        "refused at load; a range that is left ends the session before anything is opened but "
        "where, to the client",
        (
            "app/test_bad_input.py::test_serve_refuses_a_model_that_may_leave_its_ranges",
            "models/test_resident.py::test_weights_that_may_leave_their_ranges_are_refused",
            "models/test_hf.py::test_weights_do_not_fit",
        ),
    ),
    Met(
        "a user's settings of JAX and XLA",
        "without effect on any process; `doctor` names them",
        (
            "app/test_jax_settings.py::test_both_parties_work",
            "app/test_jax_settings.py::test_doctor_says_what_was_overridden",
            "app/test_jax_settings.py::test_what_runs_as_a_module",
        ),
    ),
    Met(
        "a sampler's server limits, fails or cuts an answer off",
        "a limit, a restart is waited for; else its reason in one line, and what was written is "
        "kept, to go on from",
        (
            "systems/watermark/test_watermark_endpoint.py::test_a_limit_is_waited_for",
            "systems/watermark/test_watermark_endpoint.py::"
            "test_a_connection_that_ends_before_an_answer_is_tried_again",
            "systems/watermark/test_watermark_endpoint.py::test_what_may_have_been_done_is_not_asked_again",
            "systems/watermark/test_watermark_endpoint.py::test_a_text_that_was_cut_short_is_kept",
            "systems/watermark/test_watermark_endpoint.py::"
            "test_no_n_gram_decides_twice_when_a_text_goes_on",
        ),
    ),
    Met(
        "SIGTERM, Ctrl-C, a restart",
        "sessions drain, or hear why; nothing is left running",
        (
            "service/test_faults.py::test_ctrl_c",
            "service/test_faults.py::test_a_killed_demo_leaves_nothing",
            "service/test_many_clients.py::test_whoever_is_cut_off_hears_why",
        ),
    ),
    Met(
        "a certificate is renewed or taken back, SIGHUP",
        "new sessions run under what was read, others go on; what cannot be read replaces nothing, "
        "and is tried again",
        (
            "service/test_reloading.py::test_serve_goes_on_under_what_it_reads",
            "service/test_reloading.py::test_split_serve_reloads",
            "service/test_reloading.py::test_engine_and_vault_renew_their_certificates",
        ),
    ),
    Met(
        "secrets in logs, on the wire, in another process, in files, in core files",
        "none is found; there are no core files",
        (
            "service/test_confine.py::test_workers_give_it_up",
            "service/test_secrets.py::test_no_secret_crosses_the_wire",
            "service/test_secrets.py::test_the_provider_never_holds_the_prompt",
            "service/test_secrets.py::test_the_client_never_holds_the_weights",
            "app/test_runs.py::test_the_prompt_is_in_no_output_of_the_provider",
            "app/test_runs.py::test_no_temporary_file_is_left",
        ),
    ),
    Met(
        "object storage is away, slow, full or not mounted",
        "the session ends with the place and its reason, and its batches stay; a batch that cannot "
        "be stored is none",
        (
            "offline/test_object_store.py::test_storage_that_is_down_costs_nothing",
            "offline/test_object_store.py::test_a_batch_that_cannot_be_stored_is_none",
            "offline/test_object_store.py::test_a_place_that_is_not_mounted",
            "offline/test_object_store.py::test_a_place_that_does_not_answer",
            "offline/test_object_store.py::test_calls_that_hang_are_bounded",
        ),
    ),
    Met(
        "a stored object is lost, changed, or put back after its use",
        "its batch alone is given up, with a line; what was used opens to nobody",
        (
            "offline/test_object_store.py::test_a_lost_object_costs_its_batch_alone",
            "offline/test_object_store.py::test_a_changed_object_does_not_open",
            "offline/test_object_store.py::test_copies_of_used_objects_open_to_nobody",
            "offline/test_object_store.py::test_a_copy_put_back_serves_nobody",
        ),
    ),
    Met(
        "a machine of a cluster, its door or a pair's network is gone",
        "its sessions end with the reason, a pair's batch is made by another; all else goes on",
        (
            "cluster/test_door_words.py::test_a_front_door_that_is_gone_ends_it",
            "cluster/test_door_words.py::test_a_door_that_is_gone_ends_it",
            "cluster/test_doors.py::test_a_lost_machine_costs_its_pairs_alone",
            "cluster/test_cut_pairs.py::test_a_pair_that_is_cut_off_costs_its_batch",
        ),
    ),
    Met(
        "a disk or a cluster's object store is full",
        "one line says which; no object is left over, and batches go by disk beside a full store",
        (
            "offline/test_object_store.py::test_a_disk_that_fills_up_leaves_no_object",
            "cluster/test_full_store.py::test_producers_go_on_beside_a_full_store",
            "cluster/test_full_store.py::test_a_full_store_on_a_full_disk_ends_in_a_line",
        ),
    ),
)


def seconds_of(tests: tuple[str, ...], took: dict[str, float]) -> float | None:
    """Return the longest of these tests and their cases; None where none of them has run."""
    collected = [
        seconds
        for name, seconds in took.items()
        if any(name == test or name.startswith(f"{test}[") for test in tests)
    ]
    return max(collected, default=None)


def table(took: dict[str, float], after: dict[str, float], line: str) -> str:
    """Return `took`: whole tests, `after`: from the fault on until a command had ended."""
    rows = [
        f"| {i} | {met.fault} | {met.expected} | {_shown(seconds_of(met.tests, after))} | "
        f"{_shown(seconds_of(met.tests, took))} |"
        for i, met in enumerate(FAULTS, 1)
    ]
    return "\n".join(
        [
            "# Faults",
            "",
            "What a session meets, what both parties do, and how long that took: seconds from the",
            "fault on until a party's command had ended, the longest of the tests that",
            "`tests/faults.py` names; beside it the longest whole test, with processes' starts. "
            "The",
            f"limit is {LIMIT_S:g} s from when a fault can be known (a frozen party: after 9 s",
            "without a heartbeat).",
            "",
            line,
            "",
            "| | fault | what both parties do | after it (s) | whole test (s) |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def main() -> int:
    names = list(dict.fromkeys(test for met in FAULTS for test in met.tests))
    with tempfile.TemporaryDirectory() as folder:
        observed, report = Path(folder) / "observed", Path(folder) / "report.xml"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-m",
                "",
                f"--junitxml={report}",
                *sys.argv[1:],
                *(f"tests/{name}" for name in names),
            ],
            cwd=ROOT,
            env=os.environ | {OBSERVED: str(observed)},
        )
        took = {
            f"{case.get('classname', '').removeprefix('tests.').replace('.', '/')}.py"
            f"::{case.get('name')}": float(case.get("time", 0))
            for case in ElementTree.parse(report).iter("testcase")
            if case.find("skipped") is None
        }
        waited: dict[str, float] = {}
        lines = observed.read_text().splitlines() if observed.exists() else []
        for line in lines:
            test, seconds = json.loads(line)
            waited[test] = max(seconds, waited.get(test, 0.0))
    lacking = [met.fault for met in FAULTS if met.tests and seconds_of(met.tests, took) is None]
    late = [name for name, seconds in waited.items() if seconds > LIMIT_S]
    if lacking or late:
        print(f"not met: {lacking}; too late: {late}", flush=True)
        return 1
    if done.returncode == 0:
        here = machine()
        TABLE.parent.mkdir(exist_ok=True)
        where = f"Measured on {here.date[:10]} at {here.commit}, {here.processor}, "
        command = shlex.join(["python", "-m", "tests.faults", *sys.argv[1:]])
        TABLE.write_text(table(took, waited, f"{where}{here.cores} cores, by `{command}`."))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
