"""Split models between two parties: what both know before a session, and the programs' records.

A provider serves them only when it was started with `spu-llm split serve`, and then nothing else:
one mode, one split, of a model that both have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from models.family import ModelConfig, weight_shapes
from models.split import Split
from protocols.verification.distribution import Sampling
from spu_llm.core.errors import InputError
from spu_llm.core.ledger import Ledger
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.systems.program import Program, ProviderInputs
from spu_llm.systems.split.boundary import MAX_VALUES, Boundary
from spu_llm.systems.split.modes import CODEBOOK, LEAVE_OUT, NOIR, PERMUTATION, PLAIN

if TYPE_CHECKING:
    from spu_llm.systems.split.state import Tunings

MAX_TEXTS = 1000
MAX_ROUNDS = 10_000_000
MAX_RANK = 64
MAX_KEPT = 1 << 31  # values of a round that wait for its gradients, about: 8 GB


@dataclass(frozen=True)
class SplitServed:
    """A split model, as a provider tells the worker of a session."""

    mode: str
    """One of `MODES`."""
    front: int
    back: int
    """Blocks of the client's ends."""
    ends: str
    """The digest of their parameters (`models.split.ends_digest`)."""
    tunings: str | None = None
    """The directory with what was tuned of the middle for this client."""


def check_served(mode: str, split: Split, held: ProviderInputs, ends: str | None = None) -> None:
    """Raise InputError unless the provider serves this mode of its model, split like this; `ends`:
    and has the very ends with this digest.
    """
    asked = f"--mode {mode} --split {split.front},{split.back}"
    if (served := held.served.read(SplitServed)) is None:
        raise InputError(
            "the provider serves its whole model, no split one; it must be started with spu-llm "
            f"split serve {asked}"
        )
    if (served.mode, served.front, served.back) != (mode, *split):
        raise InputError(
            f"the provider serves --mode {served.mode} --split {served.front},{served.back}, not "
            f"{asked}"
        )
    if ends is not None and ends != served.ends:
        raise InputError(
            "the parties have models with different ends; both need the same one (--model)"
        )


def check_front(mode: str, split: Split) -> None:
    """Raise InputError for a codebook whose rows themselves would go up."""
    if mode == NOIR and split.front < 1:
        raise InputError(
            f"--mode noir --split {split.front},{split.back} has no front: the rows that go up "
            "would be the secret codebook's own; give it a block or more"
        )


@dataclass(frozen=True)
class SplitRequest:
    """mode: PLAIN or NOIR. front, back: the client's blocks. ends: digest of their parameters
    (`models.split.ends_digest`). precision: of what crosses the boundaries. tuning: the id of the
    client's tuning, where the provider has LoRA of rank `lora` > 0 for it: that after `round`
    rounds.
    """

    mode: str
    front: int
    back: int
    ends: str
    precision: str
    tuning: str
    lora: int
    round: int

    @property
    def split(self) -> Split:
        return Split(self.front, self.back)

    def boundary(self, config: ModelConfig) -> Boundary:
        """Return the boundary at this precision; InputError for a precision that is none."""
        return Boundary(config.width, self.precision)

    def check(self, config: ModelConfig) -> None:
        """Raise InputError when the request does not fit the model."""
        if self.mode not in (PLAIN, NOIR):
            raise InputError(f"there is no mode {self.mode!r} without shares")
        self.split.check(config)
        check_front(self.mode, self.split)
        self.boundary(config)
        if not 0 <= self.lora <= MAX_RANK:
            raise InputError(f"--lora must be 0 (none) to {MAX_RANK}, found {self.lora}")
        if not 0 <= self.round <= MAX_ROUNDS or (self.lora and not self.tuning):
            raise InputError("the request names no round of a tuning")

    def admit(self, held: ProviderInputs, model: ModelConfig) -> None:
        """Raise InputError unless the provider serves this, and has its half of the tuning."""
        check_served(self.mode, self.split, held, self.ends)
        served = held.served.read(SplitServed)
        assert served is not None
        if not self.lora:
            return
        if served.tunings is None:
            raise InputError(
                "the provider keeps nothing that is tuned; it must be started with --tunings DIR, "
                "or tune without --lora"
            )
        from spu_llm.systems.split.state import Tunings  # of the provider alone

        self._admit_tuning(Tunings(Path(served.tunings), self.tuning), held, model)

    def _admit_tuning(self, tunings: Tunings, held: ProviderInputs, model: ModelConfig) -> None:
        tunings.check(self.lora, self.round)


@dataclass(frozen=True)
class GenerateRequest(SplitRequest):
    """Texts one after the other. prompt_tokens: of each; max_new_tokens: at most, of each."""

    prompt_tokens: tuple[int, ...] = field(kw_only=True)
    max_new_tokens: int = field(kw_only=True)

    def check(self, config: ModelConfig) -> None:
        """Raise InputError when the request does not fit the model."""
        super().check(config)
        if not 1 <= len(self.prompt_tokens) <= MAX_TEXTS:
            raise InputError(f"a session has 1 to {MAX_TEXTS} texts")
        if self.max_new_tokens < 1:
            raise InputError(f"--max-new-tokens must be 1 or more, found {self.max_new_tokens}")
        for count in self.prompt_tokens:
            if not 1 <= count < config.context:
                raise InputError(
                    f"the prompt has {count} tokens; this model takes 1 to {config.context - 1}"
                )

    def limit(self, config: ModelConfig, prompt: int) -> int:
        """Return how many tokens a text gets at most: as asked, and within the model's context."""
        return min(self.max_new_tokens, config.context - prompt)

    def capacity(self, config: ModelConfig, prompt: int) -> int:
        """Return the rows of a text's cache: the last token needs none."""
        return prompt + self.limit(config, prompt) - 1


@dataclass(frozen=True)
class GenerateInputs:
    """The client's own: prompts as token ids; `secrets`: the directory of a tuning, "" for none;
    `seed` fixes sampling.
    """

    prompts: list[list[int]]
    model_dir: str
    secrets: str = ""
    temperature: float = 0.7
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    seed: int | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, 0, self.top_p)


@dataclass(frozen=True)
class TuneRequest(SplitRequest):
    """Rounds from `round` on to `rounds`, of `batch` texts of `length` tokens each; what was tuned
    is kept every `save_every` rounds and after the last one. learning_rate: of LoRA. leave_out:
    "codebook" or "permutation", what noir is without; "" for neither.
    """

    batch: int = field(kw_only=True)
    length: int = field(kw_only=True)
    rounds: int = field(kw_only=True)
    save_every: int = field(kw_only=True)
    learning_rate: float = field(kw_only=True)
    leave_out: str = field(default="", kw_only=True)

    def check(self, config: ModelConfig) -> None:
        """Raise InputError when the request does not fit the model."""
        super().check(config)
        if self.leave_out not in ("", *LEAVE_OUT):
            raise InputError(
                f"--leave-out must be {' or '.join(LEAVE_OUT)}, found {self.leave_out!r:.40}"
            )
        if not 1 <= self.length < config.context:
            raise InputError(
                f"--length must be 1 to {config.context - 1} for this model, found {self.length}"
            )
        tokens = min(MAX_VALUES // config.width, MAX_KEPT // _kept(config, self.length))
        most = tokens // self.length
        if not most:
            raise InputError(
                f"--length {self.length} takes more memory than a session gets; give a smaller one"
            )
        if not 1 <= self.batch <= most:
            raise InputError(f"--batch must be 1 to {most}, found {self.batch}")
        if not self.round <= self.rounds <= MAX_ROUNDS:
            raise InputError(
                f"--rounds must be {self.round}, as many as are done, to {MAX_ROUNDS}, found "
                f"{self.rounds}"
            )
        if self.save_every < 1:
            raise InputError(f"--save-every must be 1 or more, found {self.save_every}")
        if not 0 < self.learning_rate <= 1:
            raise InputError(
                f"--learning-rate must be above 0 and at most 1, found {self.learning_rate}"
            )

    def _admit_tuning(self, tunings: Tunings, held: ProviderInputs, model: ModelConfig) -> None:
        tunings.check_free()
        shapes = self.split.parts(weight_shapes(model))[1]
        tunings.check_room(shapes, self.lora, held.disk_bytes)
        if self.round or tunings.rounds():
            tunings.check(self.lora, self.round)

    def keeps(self, done: int) -> bool:
        """Return whether what was tuned is kept when `done` rounds are done."""
        return done % self.save_every == 0 or done == self.rounds


@dataclass(frozen=True)
class TuneInputs:
    """The client's own: the directories of its model and of its secrets, and files with texts."""

    model_dir: str
    secrets: str
    texts: list[str]


# ---- what each party learns

_ROWS = {
    PLAIN: "the rows that go up: the text can be read off them, token by token (insecure)",
    NOIR: "the rows that go up, under a secret codebook: what is known not to be read off them is "
    "what attacks were tried (spu-llm attack noir); rows of equal tokens are alike wherever they "
    "stand, most of all in equal beginnings of texts",
}
_GRADIENTS = {
    PLAIN: "gradients of the loss by the rows that came down: of the true labels (insecure)",
    NOIR: "gradients of the loss by the rows that came down: which labels are equal, under a "
    "secret permutation of them: a substitution cipher, at best, hides what is tuned on",
}


def declare_generation(ledger: Ledger, request: GenerateRequest) -> None:
    """Declare to the ledger what a generation tells each party."""
    ledger.declare(PROVIDER, _ROWS[request.mode])
    ledger.declare(PROVIDER, "each text's length, and when each of its tokens comes")
    ledger.declare(PROVIDER, "the most tokens that a text may get")
    _declare_tuned(ledger, request)
    _declare_client(ledger)


def declare_tuning(ledger: Ledger, request: TuneRequest) -> None:
    """Declare to the ledger what a tuning tells each party."""
    for learned, secret in ((_ROWS, CODEBOOK), (_GRADIENTS, PERMUTATION)):
        ledger.declare(PROVIDER, learned[PLAIN if request.leave_out == secret else request.mode])
    ledger.declare(
        PROVIDER,
        "how many texts of which length, how many rounds, how often what is tuned is "
        "kept, the learning rate",
    )
    _declare_tuned(ledger, request)
    _declare_client(ledger)


def _declare_tuned(ledger: Ledger, request: SplitRequest) -> None:
    if request.tuning:
        ledger.declare(
            PROVIDER,
            "of which tuning a session is, and after how many rounds: it is linked with "
            "all others of that tuning",
        )


def _declare_client(ledger: Ledger) -> None:
    ledger.declare(
        CLIENT, "what the middle makes of rows of its choice: with enough of them, the middle"
    )


def _kept(config: ModelConfig, length: int) -> int:
    """Return about how many values for each token of a text wait for gradients: in each block some
    sixteen rows, and for each head scores and their softmax.
    """
    heads = config.kv_heads * config.query_groups
    return config.layers * (16 * config.width + 2 * heads * length)


def _admit(request: SplitRequest, held: ProviderInputs, model: ModelConfig) -> None:
    request.admit(held, model)


GENERATE = Program(
    "split-generate",
    "spu_llm.systems.split.generating",
    GenerateRequest,
    GenerateInputs,
    GenerateRequest.check,
    keeps_hints=False,
    spu=None,
    admit=_admit,
)
TUNE = Program(
    "split-tune",
    "spu_llm.systems.split.serving",
    TuneRequest,
    TuneInputs,
    TuneRequest.check,
    keeps_hints=False,
    spu=None,
    admit=_admit,
)
