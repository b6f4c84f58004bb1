"""`spu-llm split generate` and `tune` without shares: the client's commands in plain and noir."""

from __future__ import annotations

import argparse
import string
import time
from dataclasses import asdict
from pathlib import Path
from secrets import choice, token_hex
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import shipped
from spu_llm.app import split_options
from spu_llm.app.options import server_of
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import say, show, tell
from spu_llm.app.screen import Screen, Stages, learned_lines
from spu_llm.core.errors import InputError
from spu_llm.core.units import mb
from spu_llm.net.relay import Relay

if TYPE_CHECKING:
    from models.family import ModelConfig, Params
    from spu_llm.systems.split.state import ClientSecrets, Settings

PREFIX_LETTERS = 8  # the paper's most: 20 made its texts worse


def say_insecure(mode: str) -> None:
    """Say on stderr where a mode protects nothing."""
    if mode == split_options.PLAIN:
        say("--mode plain is insecure: the provider can read the text off what it gets")


class _Screen(Screen):
    """Shows the events of one text."""

    def hear(self, said: dict[str, Any], relay: Relay) -> None:
        super().hear(said, relay)
        if said["event"] == "token":
            self._doing = f"decoding, {said['tokens']} tokens"
            self._progress.update(self._doing)


def _model(options: argparse.Namespace) -> tuple[Path, ModelConfig, Params]:
    from models.hf import load_model
    from spu_llm.systems.split.records import check_front

    directory = (options.model or shipped("private")).absolute()
    split = split_options.split_of(options)
    check_front(options.mode, split)
    config, params = load_model(directory)
    split.check(config)
    return directory, config, params


def generate(options: argparse.Namespace) -> None:
    """Stream the text to stdout, progress to stderr, the result to `--json`."""
    from models.files import files_of
    from models.split import ends_digest
    from models.stops import Stops
    from models.tokenizer import Tokenizer
    from spu_llm.service.client import run_as_client
    from spu_llm.systems.split.records import GENERATE, GenerateInputs, GenerateRequest

    check_output(options.json)
    server = server_of(options)
    _check_sampling(options)
    directory, config, params = _model(options)
    split, tokenizer = split_options.split_of(options), Tokenizer.load(directory)
    Stops.of(options.stop, tokenizer)
    tuned = _tuned(options, config)
    if options.random_prefix and options.mode != split_options.NOIR:
        raise InputError("--random-prefix is of --mode noir")
    letters = string.ascii_lowercase
    prefix = "".join(choice(letters) for _ in range(PREFIX_LETTERS))
    text = (prefix if options.random_prefix else "") + options.prompt
    prompt = tokenizer.encode(text)
    request = GenerateRequest(
        options.mode,
        *split,
        ends_digest(params, split),
        options.precision,
        tuning=tuned.id if tuned is not None and tuned.lora else "",
        lora=0 if tuned is None else tuned.lora,
        round=0 if tuned is None or not tuned.lora else _round(options, config),
        prompt_tokens=(len(prompt),),
        max_new_tokens=options.max_new_tokens,
    )
    if tuned is not None and tuned.ends != request.ends:
        raise InputError("--secrets are of another model; give that one as --model")
    request.check(config)
    where = "" if options.secrets is None else str(options.secrets.absolute())
    inputs = GenerateInputs(
        [prompt],
        str(directory),
        where,
        options.temperature,
        options.top_p,
        options.stop,
        options.seed,
    )
    say_insecure(options.mode)
    screen, first = _Screen(options.prompt), 0.0

    def on_event(event: dict[str, Any], relay: Relay) -> None:
        nonlocal first
        if event["event"] == "token" and not first:
            first = time.monotonic() - options.started
        screen.hear(event, relay)

    try:
        outcome, agreed = run_as_client(
            server,
            GENERATE,
            request,
            inputs,
            on_event,
            tokenizer=tokenizer,
            reads=[
                *files_of(directory),
                *([] if options.secrets is None else [options.secrets.absolute()]),
            ],
        )
        screen.finish()
    finally:
        screen.close()
    result = _result(options, outcome, agreed, first)
    tell(*learned_lines(result["learned"]), *_figures(result))
    write_json(options.json, result)


def _check_sampling(options: argparse.Namespace) -> None:
    from models.stops import check_text
    from protocols.verification.distribution import Sampling
    from spu_llm.systems.decoding.request import check_sampling

    check_sampling(Sampling(options.temperature, top_p=options.top_p))
    check_text(options.prompt, "the prompt")


def _tuned(options: argparse.Namespace, config: ModelConfig) -> Settings | None:
    """Return what `--secrets` were tuned as; None without them. InputError when they do not fit."""
    if options.secrets is None:
        if options.mode == split_options.NOIR:
            raise InputError("--mode noir needs --secrets DIR, which spu-llm split tune makes")
        return None
    found = _load(options.secrets, config).settings
    split = split_options.split_of(options)
    if (found.mode, found.split) != (options.mode, split):
        raise InputError(
            f"--secrets were tuned with --mode {found.mode} --split {found.front},{found.back}; "
            "give the same"
        )
    return found


def _load(directory: Path, config: ModelConfig) -> ClientSecrets:
    from spu_llm.systems.split.state import ClientSecrets

    return ClientSecrets.load(directory.absolute(), config)


def _round(options: argparse.Namespace, config: ModelConfig) -> int:
    return _load(options.secrets, config).round


def _result(
    options: argparse.Namespace, outcome: Any, agreed: dict[str, Any], first: float
) -> dict[str, Any]:
    """Return the `--json` object."""
    from spu_llm.api.completion import messages, payload
    from spu_llm.core.machine import machine

    result = outcome.result
    (text,) = result["texts"]
    phases = {"offline": [], "online": ["prefill", "decode"]}
    return {
        **text,
        "drafted": 0,
        "accepted": 0,
        "seconds": {"offline": 0.0, **{name: round(s, 3) for name, s in result["seconds"].items()}},
        "first_token_seconds": round(first, 3),
        "elapsed_seconds": round(time.monotonic() - options.started, 3),
        "bytes": {k: asdict(both) for k, both in payload(result["traffic"], phases).items()},
        "messages": messages(result["traffic"], phases),
        "wire_bytes": {
            "client_to_provider": outcome.wire_sent,
            "provider_to_client": outcome.wire_received,
        },
        "learned": result["learned"],
        "machine": asdict(machine()),
        "config": {
            "stop": options.stop,
            "sampling_seed": options.seed,
            "temperature": options.temperature,
            "top_p": options.top_p,
            **agreed,
        },
    }


def _figures(result: dict[str, Any]) -> list[str]:
    tokens, steps, seconds = len(result["token_ids"]), result["steps"], result["seconds"]
    lines = [f"{tokens} tokens, ended by {result['finish_reason']}"]
    if steps and seconds["decode"]:
        lines.append(
            f"{steps / seconds['decode']:.1f} tokens/s, first token after "
            f"{result['first_token_seconds']:.1f} s, everything {result['elapsed_seconds']:.1f} s"
        )
    online = result["bytes"]["online"]
    lines.append(
        f"payload: {mb(sum(online.values()))} in {result['messages']['online']:,} messages; on the "
        f"wire {mb(sum(result['wire_bytes'].values()))}"
    )
    return lines


# ---- tuning


def tune(options: argparse.Namespace) -> None:
    """Tune: progress to stderr; in the end the directory with what was tuned to stdout."""
    from models.files import files_of
    from models.tokenizer import Tokenizer
    from spu_llm.service.client import run_as_client
    from spu_llm.systems.split.records import TUNE, TuneInputs, TuneRequest

    server = server_of(options)
    directory, config, params = _model(options)
    tokenizer = Tokenizer.load(directory)
    texts = [path.absolute() for path in options.texts]
    asked = _settings(options, config, params, tokenizer, texts)
    where = options.secrets.absolute()
    stages = Stages()
    try:
        secrets = _begun(where, asked, config, params, stages)
        request = TuneRequest(
            asked.mode,
            asked.front,
            asked.back,
            asked.ends,
            asked.precision,
            tuning=secrets.settings.id if asked.lora else "",
            lora=asked.lora,
            round=secrets.round,
            batch=asked.batch,
            length=asked.length,
            rounds=options.rounds,
            save_every=options.save_every,
            learning_rate=asked.learning_rate,
        )
        request.check(config)
        say_insecure(options.mode)

        def on_event(event: dict[str, Any], relay: Relay) -> None:
            if event["event"] == "round":
                stages.say(f"round {event['done']} of {event['rounds']}, loss {event['loss']:.3f}")
            stages.hear(event, relay)

        inputs = TuneInputs(str(directory), str(where), [str(path) for path in texts])
        outcome, _ = run_as_client(
            server,
            TUNE,
            request,
            inputs,
            on_event,
            tokenizer=tokenizer,
            reads=[*files_of(directory), *texts],
            writes=[where],
        )
    finally:
        stages.close()
    result = outcome.result
    tell(*learned_lines(result["learned"]))
    loss = "" if result["loss"] is None else f", loss {result['loss']:.3f}"
    show(f"{where}: {result['rounds']} rounds{loss}")


def _settings(
    options: argparse.Namespace,
    config: ModelConfig,
    params: Params,
    tokenizer: Any,
    texts: list[Path],
) -> Settings:
    """Return the settings that the command asks for, with a fresh id; InputError for nonsense."""
    from models.split import ends_digest
    from spu_llm.systems.split.state import Settings
    from spu_llm.systems.split.texts import digest_of, tokens_of

    plain, split = options.mode == split_options.PLAIN, split_options.split_of(options)
    mechanism = options.mechanism or ("none" if plain else "exponential")
    if plain != (mechanism == "none"):
        raise InputError(
            "--mode plain is without a codebook; leave --mechanism out"
            if plain
            else "--mechanism none protects nothing; that is --mode plain"
        )
    if plain and options.epsilon is not None:
        raise InputError("--epsilon is of a codebook, which --mode plain has none of")
    epsilon = options.epsilon
    if epsilon is None:
        epsilon = split_options.EPSILON / split_options.FEATURES * config.width
    if not 0 < epsilon < float("inf"):
        raise InputError(f"--epsilon must be above 0, found {epsilon}")
    tokens = tokens_of(texts, tokenizer)
    if len(tokens) <= options.length:
        raise InputError(
            f"--texts have {len(tokens)} tokens in all; a batch needs {options.length + 1} in a row"
        )
    return Settings(
        id=token_hex(16),
        ends=ends_digest(params, split),
        mode=options.mode,
        front=split.front,
        back=split.back,
        mechanism=mechanism,
        epsilon=0.0 if plain else epsilon,
        precision=options.precision,
        batch=options.batch,
        length=options.length,
        learning_rate=options.learning_rate,
        lora=options.lora,
        texts=digest_of(tokens),
    )


def _begun(
    where: Path, asked: Settings, config: ModelConfig, params: Params, stages: Stages
) -> ClientSecrets:
    """Return the secrets of this tuning in the directory, or begin a new tuning there."""
    from spu_llm.systems.split.beginning import begin
    from spu_llm.systems.split.state import SECRETS, ClientSecrets, held

    with held(where):
        if not (where / SECRETS).exists():
            stages.say("drawing the codebook")
            begin(asked, config, params).save(where)
        secrets = ClientSecrets.load(where, config)
    secrets.settings.check_same(asked)
    return secrets
