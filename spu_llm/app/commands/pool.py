"""`spu-llm pool`: what lies in a pool directory, and where what is made from now on goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import show, show_table
from spu_llm.core.errors import InputError


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "pool",
        help="list the correlated randomness in a pool directory",
        description="Lists what was made ahead of time and is left, for each peer. May run beside "
        "a session.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="what --pool names elsewhere")
    parser.add_argument(
        "--store",
        metavar="URL",
        help="from now on keep what is made ahead in object storage, sealed: s3://BUCKET/FOLDER, "
        "file:///FOLDER or another URL that fsspec and its packages know; DIR keeps the keys, and "
        "is made if need be",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list as JSON")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=_list)


def _list(options: argparse.Namespace) -> None:
    from spu_llm.app.stock_tables import stock_json, stock_table
    from spu_llm.offline.object_store import keep_in, url_of
    from spu_llm.offline.peer_directories import party_directories
    from spu_llm.offline.stock import stocks

    check_output(options.json)
    directory = options.directory
    if options.store is not None:
        keep_in(directory, options.store)
    url = url_of(directory)
    if url is not None:
        show(f"What is made ahead from now on is kept at {url}")
    if options.store is None and not party_directories(directory):
        what = "holds no pool" if directory.is_dir() else "is not a directory"
        raise InputError(f"{directory} {what}; give the directory that --pool names")
    of_peers = stocks(directory)
    show_table(stock_table(of_peers))
    write_json(
        options.json,
        {
            "directory": str(directory),
            "store": url,
            "batches": sum(stock.batches for stock in of_peers),
            "disk_bytes": sum(stock.disk_bytes for stock in of_peers),
            "peers": [stock_json(stock) for stock in of_peers],
        },
    )
