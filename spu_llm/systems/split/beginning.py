"""A tuning before its first round: the secrets that it draws (NOIR §2.2, §2.3)."""

from __future__ import annotations

import os

import numpy as np

from models.family import ModelConfig, Params
from spu_llm.core.errors import InputError
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.systems.split.ends import client_ends, table_of, without_table
from spu_llm.systems.split.ltokenizer import Permutation
from spu_llm.systems.split.modes import PERMUTATION, PLAIN
from spu_llm.systems.split.state import ClientSecrets, Settings
from spu_llm.systems.split.vocabulary import draw_codebook

NONE = "none"  # in place of a mechanism: no codebook


def begin(
    settings: Settings, config: ModelConfig, params: Params, prg: Prg | None = None
) -> ClientSecrets:
    """Draw fresh secrets; `prg`: from the OS by default, for a study a stream of its own.
    InputError for an epsilon that the mechanism cannot draw for. That it spends no more than that
    is not checked: ARR, as published, may spend more (`spu-llm split spent`).
    """
    stream = prg or Prg.from_os()
    table, permutation = table_of(params, config), Permutation.identity(config.vocab_size)
    if settings.mechanism != NONE:
        try:
            table = draw_codebook(
                table, settings.mechanism, settings.epsilon, stream.child("codebook")
            )
        except ValueError as exc:
            raise InputError(str(exc)) from None
    if settings.mode != PLAIN and settings.leave_out != PERMUTATION:
        permutation = Permutation.draw(config.vocab_size, stream.child("permutation"))
    front, back = client_ends(params, config, settings.split)
    tuned, _ = without_table(front, config)
    key = os.urandom(KEY_BYTES) if prg is None else prg.child("batches").words((4,)).tobytes()
    forward = np.asarray(permutation.forward, np.int64)
    return ClientSecrets(settings, key, np.asarray(table, np.float32), forward, tuned, back, [], 0)
