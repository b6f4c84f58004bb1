"""The commands `bench` and `experiment`: measurements that live in `experiments/`.

Each runs both parties on this machine, as `demo` does, and ends with exit code 1 when a criterion
does not hold.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.net.shaping import NETWORKS


def add_commands(commands: Any) -> None:
    """Add the study commands to the parser."""
    bench = commands.add_parser("bench", help="measure the cost of parts")
    parts = bench.add_subparsers(dest="part", required=True)
    step = parts.add_parser("step", help="a decode step against its number of positions")
    step.add_argument("--positions", type=_numbers, default="1,2,4,8,16", metavar="N,N,...",
                      help="positions of a step (default: %(default)s)")  # fmt: skip
    step.add_argument("--network", type=_networks, default="local", metavar="NAME,...",
                      help="local, lan, wan: one after another (default: local)")  # fmt: skip
    step.add_argument("--repeat", type=int, default=2, metavar="N",
                      help="measured steps of each size (default: %(default)s)")  # fmt: skip
    step.add_argument("--prompt", help="default: that of demo")
    step.add_argument("--draft-model", type=Path, help="public model directory")
    step.add_argument("--plot", type=Path, metavar="FILE", help="draw seconds against positions")
    _common(step, _step)

    op = parts.add_parser("op", help="a protocol op beside SPU's own way to its result")
    op.add_argument("names", type=lambda text: text.split(","), metavar="NAME[,NAME...]",
                    help="ops, like sign,multiply, or all; an unknown name lists them")  # fmt: skip
    op.add_argument("--size", type=_numbers, metavar="N,N,...",
                    help="numbers of values, rows, ... (default: each op's own)")  # fmt: skip
    op.add_argument("--network", type=_networks, default="local", metavar="NAME,...",
                    help="local, lan, wan: one after another (default: local)")  # fmt: skip
    op.add_argument("--repeat", type=int, default=3, metavar="N",
                    help="measured runs of each size (default: %(default)s)")  # fmt: skip
    op.add_argument("--plot", type=Path, metavar="FILE", help="draw seconds and bytes against size")
    _common(op, _op)

    products = parts.add_parser("products", help="silent products with weights, by matrix")
    products.add_argument("--shapes", metavar="KxM,...",
                          help="inputs and outputs (default: those of GPT-2's of width 256, 768)")
    products.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    products.add_argument("--debug", action="store_true", help="show a traceback on errors")
    products.set_defaults(run=_products)

    verify = parts.add_parser("verify", help="secure verification beside a decoder block of SPU's")
    verify.add_argument("--vocab", type=int, default=32000, metavar="N",
                        help="tokens of the vocabulary (default: %(default)s)")  # fmt: skip
    verify.add_argument("--draft-length", type=_numbers, default="4,8", metavar="N,N,...",
                        help="drafts of a step (default: %(default)s)")  # fmt: skip
    verify.add_argument("--variants", type=_names, default="token,post,naive,race",
                        metavar="NAME,...", help="default: %(default)s")  # fmt: skip
    verify.add_argument("--from", type=_names, default="probabilities,logits", metavar="NAME,...",
                        dest="sources", help="what is shared (default: %(default)s)")  # fmt: skip
    verify.add_argument("--network", type=_networks, default="lan,wan", metavar="NAME,...",
                        help="local, lan, wan, in turn (default: %(default)s)")  # fmt: skip
    verify.add_argument("--repeat", type=int, default=3, metavar="N",
                        help="measured runs of each variant (default: %(default)s)")  # fmt: skip
    verify.add_argument("--no-block", dest="block", action="store_false",
                        help="leave the decoder block out, which takes minutes")  # fmt: skip
    verify.add_argument("--plot", type=Path, metavar="FILE", help="draw seconds as bars")
    _common(verify, _verify)

    experiment = commands.add_parser("experiment", help="reproduce a claim")
    claims = experiment.add_subparsers(dest="claim", required=True)
    logits = claims.add_parser("logits", help="secure logits against float32")
    logits.add_argument("--positions", type=int, default=200, metavar="N",
                        help="held-out positions on shares (default: %(default)s)")  # fmt: skip
    logits.add_argument("--pieces-positions", type=int, default=5000, metavar="N",
                        help="in plaintext by the same pieces (default: %(default)s)")  # fmt: skip
    _common(logits, _logits)
    transcript = claims.add_parser(
        "transcript", help="whether message sizes and counts depend on secrets"
    )
    _common(transcript, _transcript)
    cost = claims.add_parser("cost", help="a step: the stock path's against ours")
    cost.add_argument("--network", type=_networks, default="local,lan,wan", metavar="NAME,...",
                      help="local, lan, wan: one after another (default: %(default)s)")  # fmt: skip
    cost.add_argument("--steps", type=int, default=2, metavar="K",
                      help="measured steps of each kind (default: %(default)s)")  # fmt: skip
    cost.add_argument("--draft-length", type=int, default=7, metavar="G",
                      help="a step of that and one more position (default: %(default)s)")
    cost.add_argument("--prompt", help="default: that of demo")
    cost.add_argument("--draft-model", type=Path, help="public model directory")
    cost.add_argument("--plot", type=Path, metavar="FILE", help="draw seconds per step")
    _common(cost, _cost)
    completions = claims.add_parser(
        "completions", help="complete generations: ours and the stock path, all that they cost",
        description="Hours. Each run is written at once; the same command goes on where it was "
        "stopped.",
    )  # fmt: skip
    completions.add_argument("--network", type=_networks, default="local,lan", metavar="NAME,...",
                             help="local, lan, wan (default: %(default)s)")  # fmt: skip
    completions.add_argument("--prompts", type=int, metavar="N",
                             help="the first N held-out prompts (default: all)")  # fmt: skip
    completions.add_argument("--only", type=_names, metavar="NAME,...",
                             help="ours-drafted, ours-standard, stock (default: all)")  # fmt: skip
    completions.add_argument("--tokens", type=int, default=32, metavar="N",
                             help="of each completion (default: %(default)s)")  # fmt: skip
    completions.add_argument("--stock-tokens", type=int, metavar="N",
                             help="end the stock path's runs earlier; they are marked")
    completions.add_argument("--draft-model", type=Path, help="public model directory")
    completions.add_argument("--plot", type=Path, metavar="FILE", help="draw seconds per token")
    _common(completions, _completions)
    stock_options = claims.add_parser(
        "stock-options", help="bytes and messages of the stock path under SPU's own options"
    )
    _common(stock_options, _stock_options)
    latency = claims.add_parser("latency", help="latency against input length, by kind of layer")
    latency.add_argument("--positions", type=_numbers, default="1,2,4,8,16", metavar="N,N,...",
                         help="positions of a step (default: %(default)s)")  # fmt: skip
    latency.add_argument("--network", type=_networks, default="lan,wan", metavar="NAME,...",
                         help="lan, wan, after local (default: %(default)s)")  # fmt: skip
    latency.add_argument("--repeat", type=int, default=2, metavar="N",
                         help="measured steps of each size (default: %(default)s)")  # fmt: skip
    latency.add_argument("--no-stock", dest="stock", action="store_false",
                         help="leave the stock path's layers out, which take minutes")  # fmt: skip
    latency.add_argument("--prompt", help="default: that of demo")
    latency.add_argument("--draft-model", type=Path, help="public model directory")
    latency.add_argument("--plot", type=Path, metavar="FILE", help="draw all figures into a file")
    _common(latency, _latency)
    scale = claims.add_parser("scale", help="a completion by a model of GPT-2 small's shape")
    for name, count, what in (
        ("layers", 12, "blocks"), ("width", 768, "of the residual stream"),
        ("heads", 12, "of each attention"), ("vocab", 50257, "tokens of the vocabulary"),
        ("context", 1024, "positions of the model"), ("prompt-tokens", 64, "prefilled"),
        ("new-tokens", 2, "decoded one by one after that"),
        ("seed", 0, "of the random weights and prompt"),
    ):  # fmt: skip
        scale.add_argument(f"--{name}", type=int, default=count, metavar="N",
                           help=f"{what} (default: %(default)s)")  # fmt: skip
    scale.add_argument("--network", type=_networks, default="local", metavar="NAME,...",
                       help="local, lan, wan: one after another (default: %(default)s)")
    _common(scale, _scale)
    prices = claims.add_parser(
        "prices", help="what `estimate` computes with, on this machine: runs of small models"
    )
    prices.add_argument("--with", dest="more", type=_paths, default=[], metavar="FILE,...",
                        help="results of `experiment scale --network local` to fit to as well")
    _common(prices, _prices)

    exact = claims.add_parser(
        "exact", help="exact messages and bytes, and whether the documents say the same"
    )
    exact.add_argument("--write", action="store_true",
                       help="bring the documents and experiments/data/exact.json up to date")
    _common(exact, _exact)

    estimate = commands.add_parser(
        "estimate", help="what a completion would cost: a larger model, another network",
        description="Messages and online bytes are exact; material and computing are priced as "
        "`experiment prices` measured them. Only the config.json of the model is read.",
    )  # fmt: skip
    estimate.add_argument("--prompt-tokens", type=int, default=64, metavar="N",
                          help="prefilled (default: %(default)s)")  # fmt: skip
    estimate.add_argument("--new-tokens", type=int, default=32, metavar="N",
                          help="that the cache has room for (default: %(default)s)")  # fmt: skip
    estimate.add_argument("--draft-length", type=int, default=7, metavar="G",
                          help="drafts per step, 0 to 16 (default: %(default)s)")  # fmt: skip
    estimate.add_argument("--network", choices=tuple(NETWORKS), default="lan",
                          help="default: %(default)s")  # fmt: skip
    estimate.add_argument("--bandwidth", type=float, metavar="MBPS", help="in its place")
    estimate.add_argument("--delay", type=float, metavar="MS", help="one way, in its place")
    estimate.add_argument("--cores", type=int, default=2, metavar="C",
                          help="of both parties together (default: %(default)s)")  # fmt: skip
    estimate.add_argument("--steps", type=int, default=1, metavar="K",
                          help="the mean of the first K steps (default: %(default)s)")  # fmt: skip
    estimate.add_argument("--growth", action="store_true",
                          help="also with layers, width, prompt and vocabulary doubled in turn")
    _common(estimate, _estimate)


def _common(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument("--model", type=Path, help="the provider's private model directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=run)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers like 1,2,4, found {text!r}") from None


def _names(text: str) -> list[str]:
    return text.split(",")


def _paths(text: str) -> list[Path]:
    return [Path(part) for part in text.split(",")]


def _networks(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in NETWORKS]:
        raise argparse.ArgumentTypeError(
            f"unknown network {unknown[0]!r}; choose from {', '.join(NETWORKS)}"
        )
    return names


def _step(options: argparse.Namespace) -> None:
    from experiments.benchmarks import step_sweep
    from spu_llm.app.cli import DEFAULT_PROMPT, shipped, write_json

    _check_folder(options.json, "--json")
    _check_folder(options.plot, "--plot")
    results: list[dict[str, Any]] = []
    for network in options.network:
        results.append(
            step_sweep.measure(
                options.model or shipped("private"),
                options.draft_model or shipped("public"),
                options.prompt or DEFAULT_PROMPT,
                options.positions,
                options.repeat,
                network,
            )
        )
        print(step_sweep.table(results[-1]), end="\n\n", flush=True)
        # After each network: what has been measured outlives a failure of the next one.
        if options.json is not None:
            write_json(options.json, {"networks": results})
        if options.plot is not None:
            step_sweep.plot(results, options.plot)


def _op(options: argparse.Namespace) -> None:
    from experiments.benchmarks import op_bench, op_report
    from spu_llm.app.cli import shipped

    _check_folder(options.json, "--json")
    _check_folder(options.plot, "--plot")
    model = options.model or shipped("private")
    _each_network(
        options, options.network,
        lambda network: op_bench.measure(
            model, options.names, options.size, options.repeat, network
        ),
        op_report, "the criterion does not hold",
    )  # fmt: skip


def _products(options: argparse.Namespace) -> None:
    from experiments.benchmarks.products_bench import SHAPES, measure, parse, table
    from spu_llm.app.cli import write_json

    shapes = SHAPES if options.shapes is None else parse(options.shapes)
    _check_folder(options.json, "--json")
    result = measure(shapes)
    if options.json is not None:
        write_json(options.json, result)
    print(table(result))


def _verify(options: argparse.Namespace) -> None:
    from experiments.benchmarks import verify_bench, verify_report
    from spu_llm.app.cli import shipped

    _check_folder(options.json, "--json")
    _check_folder(options.plot, "--plot")
    request = verify_bench.Request(
        options.vocab,
        tuple(options.draft_length),
        tuple(options.variants),
        tuple(options.sources),
        options.repeat,
        options.block,
    )
    request.check()
    model = options.model or shipped("private")
    blocks = verify_bench.measure_blocks(model, request) if request.block else []
    _each_network(
        options, options.network,
        lambda network: verify_bench.measure(model, request, network, blocks), verify_report,
    )  # fmt: skip


def _logits(options: argparse.Namespace) -> None:
    from experiments.claims import logits
    from models.training.snippets import SHIPPED
    from spu_llm.app.cli import shipped

    _check_folder(options.json, "--json")
    held_out = SHIPPED / "held_out.jsonl"
    result = logits.measure(
        options.model or shipped("private"), held_out, options.positions, options.pieces_positions
    )
    _conclude(options, result, logits.table(result))


def _transcript(options: argparse.Namespace) -> None:
    from experiments.claims import transcript
    from spu_llm.app.cli import DEFAULT_PROMPT, shipped

    _check_folder(options.json, "--json")
    result = transcript.measure(options.model or shipped("private"), DEFAULT_PROMPT)
    _conclude(options, result, transcript.table(result))


def _cost(options: argparse.Namespace) -> None:
    from experiments.claims import cost, cost_report
    from spu_llm.app.cli import DEFAULT_PROMPT, shipped

    _check_folder(options.json, "--json")
    _check_folder(options.plot, "--plot")
    model = options.model or shipped("private")
    draft_model = options.draft_model or shipped("public")
    prompt = options.prompt or DEFAULT_PROMPT
    request = cost.Request(prompt, options.draft_length, options.steps)
    request.check(model, draft_model)
    _each_network(
        options, options.network,
        lambda network: cost.measure(model, draft_model, request, network), cost_report,
    )  # fmt: skip


def _completions(options: argparse.Namespace) -> None:
    from experiments.claims import completions, completions_report
    from spu_llm.app.cli import shipped, write_json

    _check_folder(options.json, "--json")
    _check_folder(options.plot, "--plot")
    model = options.model or shipped("private")
    draft_model = options.draft_model or shipped("public")
    systems = options.only or list(completions.SYSTEMS)
    if unknown := set(systems) - set(completions.SYSTEMS):
        raise InputError(f"--only: there is no {min(unknown)!r}; choose from "
                         f"{', '.join(completions.SYSTEMS)}")  # fmt: skip
    prompts = completions.read_prompts()
    if options.prompts is not None and not 1 <= options.prompts <= len(prompts):
        raise InputError(f"--prompts must be 1 to {len(prompts)}, found {options.prompts}")
    runs = completions.matrix(
        prompts[: options.prompts], options.network, systems, options.tokens, options.stock_tokens
    )
    completions.check(model, draft_model, runs)
    found = completions.load(options.json)
    for asked, prompt in completions.missing(runs, found):
        print(f"{asked.network}, {asked.prompt}, {asked.mode}, {asked.system}", flush=True)
        try:
            found["runs"].append(completions.measure(asked, prompt, model, draft_model))
        except SpuLlmError as exc:
            # The next run of hours may do better; this one is made when the command is given again.
            print(f"  failed: {exc}", flush=True)
            found["failed"].append({"asked": vars(asked), "error": str(exc)})
        if options.json is not None:
            write_json(options.json, found)
    if found["runs"]:
        print(completions_report.table(found), flush=True)
    if options.plot is not None and found["runs"]:
        completions_report.plot(found, options.plot)
    if left := completions.missing(runs, found):
        raise SpuLlmError(f"{len(left)} of {len(runs)} runs failed; give the command again")
    if failures := [text for record in found["runs"] for text in record["failures"]]:
        raise SpuLlmError(f"a result is wrong: {'; '.join(failures[:3])}")


def _stock_options(options: argparse.Namespace) -> None:
    from experiments.spu_baseline import options as stock_options
    from spu_llm.app.cli import shipped, write_json

    _check_folder(options.json, "--json")
    result = stock_options.measure(options.model or shipped("private"))
    print(stock_options.table(result), flush=True)
    if options.json is not None:
        write_json(options.json, result)


def _latency(options: argparse.Namespace) -> None:
    from experiments.claims import latency, latency_report
    from spu_llm.app.cli import DEFAULT_PROMPT, shipped

    _check_folder(options.json, "--json")
    _check_folder(options.plot, "--plot")
    model = options.model or shipped("private")
    draft_model = options.draft_model or shipped("public")
    prompt = options.prompt or DEFAULT_PROMPT
    latency.check(model, draft_model, prompt, options.positions, options.repeat)
    first: list[dict[str, Any]] = []

    def measure(network: str) -> dict[str, Any]:
        result = latency.measure(
            model, draft_model, prompt, options.positions, options.repeat, network,
            stock=options.stock, local=first[0] if first else None,
        )  # fmt: skip
        first.append(result)
        return result

    # What computing takes is seen where the network takes no time.
    networks = dict.fromkeys(["local", *options.network])
    _each_network(options, networks, measure, latency_report)


def _scale(options: argparse.Namespace) -> None:
    from experiments.benchmarks import scale
    from spu_llm.app.cli import shipped, write_json

    _check_folder(options.json, "--json")
    shape = scale.Shape(
        layers=options.layers, width=options.width, heads=options.heads, vocab=options.vocab,
        context=options.context, prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens, seed=options.seed,
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []

    def keep(part: dict[str, Any]) -> None:
        parts.append(part)
        if options.json is not None:
            write_json(options.json, {"networks": results, "unfinished": parts})

    for network in options.network:
        model = options.model or shipped("private")
        results.append(scale.measure(model, shape, network, keep))
        parts.clear()
        print(scale.table(results[-1]), end="\n\n", flush=True)
        if options.json is not None:
            write_json(options.json, {"networks": results})
    if failures := [text for result in results for text in result["failures"]]:
        raise SpuLlmError(f"a result is wrong: {'; '.join(failures[:3])}")


def _prices(options: argparse.Namespace) -> None:
    from experiments.cost_model import prices
    from spu_llm.app.cli import shipped, write_json

    _check_folder(options.json, "--json")
    more = [result for path in options.more for result in _results(path)]
    found = prices.measure(options.model or shipped("private"), more=more)
    write_json(options.json or prices.SHIPPED, found.asdict())
    print(f"written to {options.json or prices.SHIPPED}", flush=True)


def _results(path: Path) -> list[dict[str, Any]]:
    """What a study has written, network by network."""
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["networks"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"--with: {path} is not the JSON of a study") from None
    return found


def _exact(options: argparse.Namespace) -> None:
    from experiments.claims import exact, exact_cells
    from spu_llm.app.cli import shipped, write_json

    _check_folder(options.json, "--json")
    if options.write and options.model is not None:
        raise InputError("--write is for the shipped model's figures; leave --model out")
    found = exact.figures(options.model or shipped("private"))
    print(exact_cells.table(found), flush=True)
    for path in filter(None, [options.json, exact.FILE if options.write else None]):
        write_json(path, found)
    stale = exact_cells.documents(found, write=options.write)
    if options.write:
        stale = exact_cells.documents(found, write=False)  # what cannot be written
    elif exact_cells.stored(exact.FILE) != found:
        stale.append(f"{exact.FILE.name} has other figures")
    if stale:
        text = "; ".join(stale[:3])
        raise SpuLlmError(f"{len(stale)} stale ({exact_cells.COMMAND} mends them): {text}")


def _estimate(options: argparse.Namespace) -> None:
    from experiments.cost_model import estimate
    from spu_llm.app.cli import shipped, write_json

    _check_folder(options.json, "--json")
    asked = estimate.Options(
        options.prompt_tokens, options.new_tokens, options.draft_length, options.network,
        options.bandwidth, options.delay, options.cores, options.steps,
    )  # fmt: skip
    model = options.model or shipped("private")
    result = estimate.estimate(model, asked, growth=options.growth)
    print(estimate.table(result), flush=True)
    if options.json is not None:
        write_json(options.json, result)


def _each_network(
    options: argparse.Namespace,
    networks: Iterable[str],
    measure: Callable[[str], dict[str, Any]],
    report: Any,
    complaint: str = "a result is wrong",
) -> None:
    """Measure, print, write and draw network by network, each at once, since the next may take
    hours. SpuLlmError with `complaint` when results have failures. `report`: `table` and `plot`.
    """
    from spu_llm.app.cli import write_json

    results: list[dict[str, Any]] = []
    for network in networks:
        results.append(measure(network))
        print(report.table(results[-1]), end="\n\n", flush=True)
        if options.json is not None:
            write_json(options.json, {"networks": results})
        if options.plot is not None:
            report.plot(results, options.plot)
    if failures := [text for result in results for text in result.get("failures", ())]:
        raise SpuLlmError(f"{complaint}: {'; '.join(failures[:3])}")


def _conclude(options: argparse.Namespace, result: dict[str, Any], table: str) -> None:
    """Print and write the result; SpuLlmError when its criterion does not hold."""
    from spu_llm.app.cli import write_json

    print(table, flush=True)
    if options.json is not None:
        write_json(options.json, result)
    if result["failures"]:
        raise SpuLlmError(f"the criterion does not hold: {'; '.join(result['failures'][:3])}")


def _check_folder(file: Path | None, option: str) -> None:
    """InputError before hours of work whose result could not be written."""
    if file is not None and not file.resolve().parent.is_dir():
        raise InputError(f"{option}: {file.resolve().parent} is not a directory")
