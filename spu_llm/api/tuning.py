"""Tuning of a split model's ends on private texts, through a provider's middle (NOIR, STuning)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from models.family import ModelConfig, Params
from models.files import files_of
from models.split import ends_digest
from models.tokenizer import Tokenizer
from spu_llm.api.events import OnEvent, Stage, event_of
from spu_llm.api.split import SplitClient
from spu_llm.core.errors import InputError
from spu_llm.net.relay import Relay
from spu_llm.service.client import run_as_client
from spu_llm.systems.split.beginning import begin
from spu_llm.systems.split.modes import CODEBOOK, ENDS, EPSILON, FEATURES, MPC, PLAIN
from spu_llm.systems.split.records import TUNE, TuneInputs, TuneRequest
from spu_llm.systems.split.state import SECRETS, ClientSecrets, Settings, held
from spu_llm.systems.split.texts import digest_of, tokens_of


@dataclass(frozen=True)
class TuneOptions:
    """Options of a tuning. The provider learns all but `mechanism`, `epsilon` and `tuned`."""

    rounds: int = 200  # in all, with what was done before
    batch: int = 16  # texts of a round
    length: int = 64  # tokens of each
    learning_rate: float = 1e-3  # Adam's
    lora: int = 0  # rank of what the provider tunes in the middle and keeps; 0: nothing
    save_every: int = 10  # rounds
    mechanism: str | None = None  # of the codebook; "exponential" in noir, "none" in plain
    epsilon: float | None = None  # of all features together; the paper's for each, by default
    precision: str = "float32"  # of what crosses the boundaries
    leave_out: str = ""  # "codebook" or "permutation": noir without it, to see what it is for
    tuned: str = ENDS  # or "back" alone

    def settings(
        self, client: SplitClient, config: ModelConfig, params: Params, texts: Sequence[Path]
    ) -> Settings:
        """Return the settings of such a tuning, with a fresh id. InputError for nonsense."""
        plain = client.mode == PLAIN
        if plain and self.leave_out:
            raise InputError("--mode plain has neither codebook nor permutation to leave out")
        if self.leave_out == CODEBOOK and (self.mechanism, self.epsilon) != (None, None):
            raise InputError("--mechanism and --epsilon are of the codebook that is left out")
        bare = plain or self.leave_out == CODEBOOK
        mechanism = self.mechanism or ("none" if bare else "exponential")
        if bare != (mechanism == "none"):
            raise InputError(
                "--mode plain is without a codebook; leave --mechanism out"
                if plain
                else "--mechanism none protects nothing; that is --mode plain"
            )
        if plain and self.epsilon is not None:
            raise InputError("--epsilon is of a codebook, which --mode plain has none of")
        epsilon = EPSILON / FEATURES * config.width if self.epsilon is None else self.epsilon
        if not 0 < epsilon < math.inf:
            raise InputError(f"--epsilon must be above 0, found {epsilon}")
        tokens = tokens_of(texts, Tokenizer.load(client.model))
        if len(tokens) <= self.length:
            raise InputError(
                f"--texts have {len(tokens)} tokens in all; a batch needs {self.length + 1} in a "
                "row"
            )
        return Settings(
            id=token_hex(16),
            ends=ends_digest(params, client.split),
            mode=client.mode,
            front=client.split.front,
            back=client.split.back,
            mechanism=mechanism,
            epsilon=0.0 if bare else epsilon,
            precision=self.precision,
            batch=self.batch,
            length=self.length,
            learning_rate=self.learning_rate,
            lora=self.lora,
            texts=digest_of(tokens),
            leave_out=self.leave_out,
            tuned=self.tuned,
        )

    def request(self, secrets: ClientSecrets) -> TuneRequest:
        """Return what both parties know of a session that goes on from these secrets."""
        settings = secrets.settings
        return TuneRequest(
            settings.mode,
            settings.front,
            settings.back,
            settings.ends,
            settings.precision,
            tuning=settings.id if settings.lora else "",
            lora=settings.lora,
            round=secrets.round,
            batch=settings.batch,
            length=settings.length,
            rounds=self.rounds,
            save_every=self.save_every,
            learning_rate=settings.learning_rate,
            leave_out=settings.leave_out,
        )


@dataclass(frozen=True)
class Tuned:
    """Result of a tuning."""

    secrets: Path  # directory: codebook, permutation, tuned ends, the curve of the loss
    rounds: int
    loss: float | None  # of the last round; None where none was left to do
    learned: dict[str, list[str]]  # by "client" and "provider", from the ledger


def tune(
    client: SplitClient,
    texts: Sequence[Path],
    options: TuneOptions = TuneOptions(),
    on_event: OnEvent = lambda event: None,
) -> Tuned:
    """Tune the ends of a client's model on texts, a file each or a line of a .jsonl; what is tuned
    is kept in `client.secrets`, from where the same call goes on after it was cut off.

    The provider learns rows and gradients as the mode has them: `Tuned.learned`. on_event: gets
    each event in the calling thread. SpuLlmError, of the kind that says who failed.
    """
    if client.mode == MPC:
        raise InputError("--mode mpc tunes nothing; use plain or noir")
    if client.secrets is None:
        raise InputError("give --secrets DIR, where what is tuned is kept")
    server, directory, where = client.server(), client.model.absolute(), client.secrets.absolute()
    config, params = client.loaded()
    files = [path.absolute() for path in texts]
    asked = options.settings(client, config, params, files)
    secrets = begun(where, asked, config, params, on_event)
    request = options.request(secrets)
    request.check(config)

    def heard(said: dict[str, Any], relay: Relay) -> None:
        if (event := event_of(said, relay)) is not None:
            on_event(event)

    outcome, _ = run_as_client(
        server,
        TUNE,
        request,
        TuneInputs(str(directory), str(where), [str(path) for path in files]),
        heard,
        tokenizer=Tokenizer.load(directory),
        reads=[*files_of(directory), *files],
        writes=[where],
    )
    result = outcome.result
    return Tuned(where, result["rounds"], result["loss"], result["learned"])


def begun(
    where: Path, asked: Settings, config: ModelConfig, params: Params, on_event: OnEvent
) -> ClientSecrets:
    """Return the secrets of this tuning in the directory, or begin a tuning there. InputError where
    another one was begun.
    """
    with held(where):
        if not (where / SECRETS).exists():
            on_event(Stage("drawing the codebook"))
            begin(asked, config, params).save(where)
        secrets = ClientSecrets.load(where, config)
    secrets.settings.check_same(asked)
    return secrets
