"""Benches: what the outbox costs, as ratios of things measured in the same run.

Started by ``run.py bench [NAME ...] [--json]`` with DATABASE_URL naming a PostgreSQL server; works in databases of
its own there. Each bench (a file in ``benches``) plays its contestants in turns, several rounds, and compares
medians: times of a shared machine mean little, ratios of one run a lot. ``--json`` prints one line a bench:
``{"bench", "ratios", "bars", "ok"}``.

Exit codes: 0 every bar is held, 1 one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import django

if TYPE_CHECKING:
    from benches.measuring import Result

BENCHES = ("enqueue", "throughput", "claim", "transport", "sign")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="run.py bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(BENCHES)}"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each bench")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(BENCHES):
        parser.error(f"there is no bench {', '.join(sorted(unknown))}; there is {', '.join(BENCHES)}")
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    from django.db import connection

    from benches.databases import database

    if connection.vendor != "postgresql":
        sys.exit("bench: the bars are PostgreSQL's; set DATABASE_URL to a PostgreSQL server or to nothing")
    missed = False
    with database("default"):
        for name in options.names or BENCHES:
            bench = getattr(import_module(f"benches.{name}"), f"bench_{name}")
            if not options.json:
                print(f"{name}: {bench.__doc__}", flush=True)
            result = bench()
            missed |= not result.ok
            report(name, result, as_json=options.json)
    return int(missed)


def report(name: str, result: Result, *, as_json: bool) -> None:
    ratios = {ratio: round(value, 3) for ratio, value in result.ratios.items()}
    if as_json:
        bars = {ratio: str(bar) for ratio, bar in result.bars.items()}
        print(json.dumps({"bench": name, "ratios": ratios, "bars": bars, "ok": result.ok}), flush=True)
        return
    for ratio, value in ratios.items():
        bar = result.bars.get(ratio)
        verdict = "" if bar is None else f"  {bar}  {'held' if bar.held(result.ratios[ratio]) else 'MISSED'}"
        print(f"  {ratio:<24}{value:>8.2f}{verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
