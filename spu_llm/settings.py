"""Settings of the MPC backend that both parties must share; part of the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True)
class SpuConfig:
    """SPU's protocol, ring and fixed point. Parties that differ here would compute garbage."""

    protocol: str = "CHEETAH"
    field: str = "FM64"
    frac_bits: int = 18
    ot_kind: str = "EMP_Ferret"
    exp_mode: str = "EXP_DEFAULT"
    exp_iters: int = 8
    # Otherwise SPU splits work above 2,048 elements per core and messages double.
    max_concurrency: int = 1

    def manifest(self) -> dict[str, str | int]:
        return {f"spu.{k}": v for k, v in vars(self).items()} | {"spu.version": version("spu")}
