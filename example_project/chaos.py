"""Chaos: orders are placed and delivered while everything breaks; then it is counted whether anything was lost.

Started by ``run.py chaos [--minutes N] [--seed N] [--workers N]``. Customers place orders, some of which roll back.
Worker processes are killed (SIGKILL) at random moments and started again. The receiver answers 503 and 429, resets,
hangs longer than an attempt may take, and is down for seconds. The database goes away, sometimes for longer than
a lease: a PostgreSQL of chaos's own is stopped as by a power cut. A server that DATABASE_URL names is not ours to
stop: there chaos makes a database of its own, NAME_chaos, ends its connections (pg_terminate_backend) and has new
ones refused for a while. When the time is up all becomes well, the workers empty the outbox, and every order is
looked for. The seed decides what happens and when, the machine what it meets.

Exit codes: 0 all is right; 1 a message was lost, sent though its order rolled back, or sent again without need, or
a worker ended by itself; 69 there is no database; 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import django

from postgres_binaries import PrivatePostgresError
from stage import certify, make_database, say, settle_environment, steady_port

if TYPE_CHECKING:
    from figures import Figures

SETUP_FAILED, INTERRUPTED, TERMINATED = 69, 130, 143


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="run.py chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=positive(float), default=3.0, help="how long things break (default: 3)"
    )
    parser.add_argument("--seed", type=int, help="of the random choices (default: a new one, printed)")
    parser.add_argument("--workers", type=positive(int), default=4, help="worker processes (default: 4)")
    options = parser.parse_args(argv)
    given = os.environ.get("DATABASE_URL")
    if given and not given.startswith(("postgres://", "postgresql://")):
        parser.error("chaos breaks PostgreSQL: have DATABASE_URL name a PostgreSQL server, or nothing")
    seed = random.randrange(10**6) if options.seed is None else options.seed
    try:
        with tempfile.TemporaryDirectory(prefix="outbox-chaos-") as directory:
            table = play(given, Path(directory), options.minutes * 60, seed, options.workers)
    except PrivatePostgresError as problem:
        print(f"chaos: {problem}", file=sys.stderr)
        return SETUP_FAILED
    except KeyboardInterrupt:
        print("chaos: interrupted", file=sys.stderr)
        return INTERRUPTED
    table.show()
    return table.verdict()


def positive(kind: type) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = kind(text)
        if not 0 < value < 10_000:
            raise ValueError
        return value

    convert.__name__ = f"positive {kind.__name__}"  # argparse says it
    return convert


def play(given: str | None, directory: Path, seconds: float, seed: int, size: int) -> Figures:
    from havoc.database import database

    dice = random.Random(seed)
    say(f"seed {seed}, {seconds:.0f} s, {size} workers")
    with database(given, steady_port(), say) as place:
        port = steady_port()
        settle_environment(place.url, "example_project.chaos_settings", directory, port)
        django.setup()
        from django.core.management import call_command
        from django.db import connection

        from havoc.director import Director
        from havoc.judge import judge
        from havoc.orders import Customers
        from havoc.receiver import Receiver
        from havoc.workers import Crew

        make_database(place.server_url, connection.settings_dict["NAME"])
        call_command("migrate", verbosity=0)
        say(f"the database: {place.how}")
        customers = Customers(fork(dice))
        with (
            Receiver(certify(directory), port, fork(dice)) as receiver,
            Crew(size, directory, fork(dice)) as crew,
        ):
            director = Director(place, receiver, customers, crew, dice)
            customers.start()
            try:
                director.rage(seconds)
                director.calm()
            finally:
                customers.stop()
            say("the time is up: all is well again, and the workers empty the outbox")
            director.wait_until_empty()
            crew.dismiss()
            return judge(director.evidence())


def fork(dice: random.Random) -> random.Random:
    """Return dice for another thread: shared ones would fall as the threads do."""
    return random.Random(dice.random())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    sys.exit(main(sys.argv[1:]))
