"""Settings of the MPC backend that both parties must share; part of the manifest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

# What computes a model's forward: the protocols of this framework, or segments that SPU compiles.
# What decides on tokens is computed by the protocols either way.
OWN, SPU = "own", "spu"
BACKENDS = (OWN, SPU)


@dataclass(frozen=True)
class SpuConfig:
    """SPU's protocol, ring and fixed point. Parties that differ here would compute garbage."""

    protocol: str = "CHEETAH"
    field: str = "FM64"
    frac_bits: int = 18
    # SPU makes few transfers (`spu_llm.offline.ot` makes the others), and this kind has no stock of
    # ten million to make first, which takes a processor 2.3 s at each party.
    ot_kind: str = "YACL_Softspoken"
    exp_mode: str = "EXP_DEFAULT"
    exp_iters: int = 8
    # Otherwise SPU splits work above 2,048 elements per core and messages double.
    max_concurrency: int = 1

    def computing(self, backend: str) -> SpuConfig:
        """Return the settings for sessions whose forwards `backend` computes. SPU makes its own
        transfers in bulk then, and its default exponential returns noise far below zero, where
        scores of a softmax are.
        """
        if backend != SPU:
            return self
        # A third faster than EMP_Ferret. Extending its stock takes 1,300 small messages each way,
        # none of which waits for another.
        return replace(self, exp_mode="EXP_PADE", ot_kind="YACL_Ferret")

    def settings(self) -> dict[str, Any]:
        """Return the settings by SPU's own names; what is no field here is the same in every
        session.
        """
        return {
            "protocol": self.protocol,
            "field": self.field,
            "fxp_fraction_bits": self.frac_bits,
            "fxp_exp_mode": self.exp_mode,
            "fxp_exp_iters": self.exp_iters,
            # One owner's values stay local; private x shared products use the cheaper kernels.
            "experimental_enable_colocated_optimization": True,
            "max_concurrency": self.max_concurrency,
            # Integer products must be exact: no error in the lowest bit.
            "cheetah_2pc_config": {"ot_kind": self.ot_kind, "enable_mul_lsb_error": False},
        }

    def manifest(self) -> dict[str, str | int]:
        return {f"spu.{k}": v for k, v in vars(self).items()} | {"spu.version": version("spu")}
