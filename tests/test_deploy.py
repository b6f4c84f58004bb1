"""What `deploy` holds fits the commands, the locks and what workers need of the system."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from spu_llm.app.cli import command_line
from spu_llm.net import identity
from spu_llm.service.provider import DRAIN_S, STOP_S
from tests.kit.pair import Pair
from tests.kit.paths import ROOT
from tests.kit.processes import Start, credentials

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SAMPLES = {
    "/etc/spu-llm/provider.toml": DEPLOY / "provider.toml",
    "%E/spu-llm/gateway.toml": DEPLOY / "gateway.toml",
}


def script(name: str) -> ModuleType:
    """Return a script of `deploy` as a module."""
    spec = importlib.util.spec_from_file_location(name, DEPLOY / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(words: list[str]) -> argparse.Namespace:
    options: argparse.Namespace = command_line().parse_args(words)
    return options


# ---- systemd


def settings(unit: Path) -> dict[str, str]:
    """Return a unit's settings; of one that is given again, the last."""
    lines = unit.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")]
    return {name: value for name, value in pairs}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_with_its_sample(unit: Path) -> None:
    program, *words = settings(unit)["ExecStart"].split()
    assert program == "/opt/spu-llm/bin/spu-llm" and words[1] == "--config"
    options = parsed([words[0], "--config", str(SAMPLES[words[2]])])
    assert options.command in unit.stem or options.command == "serve"
    assert not options.insecure and options.identity is not None and options.trust is not None


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_leaves_workers_what_they_need(unit: Path) -> None:
    """Without its namespaces or Landlock a worker would go on less confined, with a warning of
    `doctor` alone; without memory that is written and run, XLA would not.
    """
    given = settings(unit)
    assert given["RestrictNamespaces"] == "user net"
    calls = given["SystemCallFilter"].split()
    assert {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"} <= set(calls)
    assert {"@system-service", "seccomp"} <= set(calls)
    assert not {"MemoryDenyWriteExecute", "ProcSubset", "PrivateNetwork"} & given.keys()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_restarts_but_not_on_bad_input(unit: Path) -> None:
    given = settings(unit)
    assert (given["Restart"], given["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert given["SuccessExitStatus"] == "143" and given["KillMode"] == "mixed"


def test_the_provider_has_time_to_drain() -> None:
    given = settings(DEPLOY / "systemd" / "spu-llm-provider.service")
    assert float(given["TimeoutStopSec"]) > DRAIN_S + STOP_S
    assert given["ExecReload"] == "/bin/kill -HUP $MAINPID"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_a_unit(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text(encoding="utf-8").replace("/opt/spu-llm/bin/spu-llm", "/bin/true")
    (tmp_path / unit.name).write_text(text, encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if unit.name in line]
    assert done.returncode == 0 and not said, done.stderr


# ---- containers


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return content


def test_compose_starts_commands() -> None:
    services = compose()["services"]
    serve = parsed(services["provider"]["command"])
    gateway = parsed(services["gateway"]["command"])
    assert gateway.server == "provider:" + serve.listen.rpartition(":")[2]
    assert gateway.token_file is not None and not serve.insecure and not gateway.insecure


def test_compose_confines_every_service() -> None:
    content = compose()
    for service in content["services"].values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"] and service["mem_limit"]
        assert "privileged" not in service
    assert content["networks"]["link"]["internal"]
    assert content["services"]["provider"]["networks"] == ["link"]
    assert content["services"]["gateway"]["ports"] == ["127.0.0.1:8000:8000"]
    assert "ports" not in content["services"]["provider"]


def test_compose_waits_for_a_drain() -> None:
    period = compose()["services"]["provider"]["stop_grace_period"]
    assert float(period.removesuffix("s")) > DRAIN_S + STOP_S


def test_the_container_copies_what_is_there() -> None:
    """Every path that is copied exists, and the engine is given it, no more."""
    lines = (DEPLOY / "Containerfile").read_text(encoding="utf-8").splitlines()
    copied = {
        path
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for path in line.split()[1:-1]
    }
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[1] == "*" and copied == {line[1:] for line in ignored if line[:1] == "!"}
    assert all((ROOT / path).exists() for path in copied)


def test_the_profile_has_one_more_rule() -> None:
    """A worker unshares a user and a network namespace at once: 1 << 28 and 1 << 30."""
    seccomp = script("seccomp")
    before = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"]}]}
    after = seccomp.extended(before)
    *kept, rule = after["syscalls"]
    assert kept == before["syscalls"] and after["defaultAction"] == before["defaultAction"]
    assert rule["names"] == ["unshare"]
    assert rule["args"] == [{"index": 0, "value": 0x50000000, "op": "SCMP_CMP_EQ"}]
    told = (ROOT / "spu_llm" / "net" / "worker_side.py").read_text(encoding="utf-8")
    assert "new_user, new_network = 0x10000000, 0x40000000" in told
    assert "unshare(new_user | new_network)" in told


def test_a_provider_is_well_or_not(
    start: Start, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = script("healthy")
    identity.make(tmp_path / "provider", "provider", 30)
    server = start(
        "serve",
        "--model",
        str(pair.private),
        "--listen",
        "127.0.0.1:0",
        *credentials(tmp_path / "provider", tmp_path / "provider"),
        stub="",
    )
    assert healthy.provider(tmp_path / "provider", server.until_listening())
    monkeypatch.setattr(sys, "argv", ["healthy.py", "nobody"])
    with pytest.raises(SystemExit, match="give provider IDENTITY, or gateway"):
        healthy.main()


# ---- the locks


def pins(lock: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Return version and hashes of a lock's packages; both where there are several."""
    text = lock.read_text(encoding="utf-8")
    entries = re.findall(r"^([a-z0-9-]+)==(\S+)[^\n]*\\\n((?: +--hash=\S+(?: \\)?\n)+)", text, re.M)
    return {
        f"{name}=={version}": (name, frozenset(re.findall(r"--hash=(\S+)", hashes)))
        for name, version, hashes in entries
    }


def test_the_lock_of_a_deployment_is_part_of_the_whole() -> None:
    whole, part = pins(ROOT / "requirements.lock"), pins(DEPLOY / "requirements.lock")
    assert 40 < len(part) < len(whole)
    assert {pin: whole.get(pin) for pin in part} == part
    names = {name for name, _ in part.values()}
    assert not {"pytest", "mypy", "jupytext", "mkdocs-material"} & names


def test_the_lock_of_a_deployment_has_what_is_needed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = dict(pin.split("==") for pin in pins(DEPLOY / "requirements.lock"))
    for text in project["dependencies"]:
        needed = Requirement(text)
        assert versions[needed.name.lower()] in needed.specifier, text
