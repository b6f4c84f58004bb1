"""Ask a party in this container how it is, for the container engine: exit code 0 if it is well.

    healthy.py provider IDENTITY    asks gRPC's health service, as the provider's own certificate,
                                    which its --trust must hold
    healthy.py gateway              asks for /health, which takes no token

It loads neither JAX nor SPU, and starts nothing.
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

WAIT_S = 10.0


def provider(identity: Path, port: int = 9000) -> bool:
    """Return whether the provider here takes sessions; SpuLlmError where it does not answer."""
    from spu_llm.net import tls
    from spu_llm.net.control_plane import check_health
    from spu_llm.net.identity import CERTIFICATE, load
    from spu_llm.service.client import Server, connected

    server = Server("127.0.0.1", port, "local", load(identity, identity / CERTIFICATE))
    stream, _ = connected(server, tls.CONTROL)
    return check_health(stream, WAIT_S)


def gateway(port: int = 8000) -> bool:
    """Return whether the gateway here answers; OSError where it does not."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=WAIT_S) as answer:
        return bool(answer.status == 200)


def main() -> None:
    """Ask the party that the command line names, and exit."""
    match sys.argv[1:]:
        case ["provider", identity]:
            well = provider(Path(identity))
        case ["gateway"]:
            well = gateway()
        case _:
            sys.exit("give provider IDENTITY, or gateway")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
