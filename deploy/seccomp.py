"""Write a container engine's seccomp profile with one call more: the `unshare` by which a worker
takes a network of its own.

    python3 deploy/seccomp.py default.json > deploy/seccomp.json

The first argument is the engine's own profile: docker's is `seccomp/default.json` of
github.com/moby/profiles. Added is `unshare` of a user and a network namespace together, as
`spu_llm.net.worker_side` asks for, and of no other kinds.
"""

from __future__ import annotations

import json
import sys
from typing import Any

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000


def extended(profile: dict[str, Any]) -> dict[str, Any]:
    """Return a profile that allows besides what a worker asks for."""
    rule = {
        "names": ["unshare"],
        "action": "SCMP_ACT_ALLOW",
        "args": [{"index": 0, "value": NEW_USER | NEW_NETWORK, "op": "SCMP_CMP_EQ"}],
    }
    return profile | {"syscalls": [*profile["syscalls"], rule]}


def main() -> None:
    """Read the profile that the command line names, write the other one to stdout."""
    if len(sys.argv) != 2:
        sys.exit("give the engine's own profile: seccomp.py PROFILE.json > seccomp.json")
    with open(sys.argv[1], encoding="utf-8") as file:
        profile = json.load(file)
    json.dump(extended(profile), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
