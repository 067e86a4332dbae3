#!/usr/bin/env python3
"""One command from a fresh checkout to a running demo or test suite.

Needs nothing but Python 3.11 or later on Linux or macOS. Each command first makes a virtual environment in
the checkout (.venv/<version>, reused while pyproject.toml stays the same) and, unless DATABASE_URL names a
database, starts a private PostgreSQL outside the checkout, which stops when its last user leaves.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older Python must end in this sentence, not in a traceback
    sys.exit("run.py needs Python 3.11 or later; this is " + sys.version.split()[0])

import argparse
import os
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import postgres_binaries
import private_postgres
import project_venv

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent
INTERRUPTED, SETUP_FAILED, TERMINATED = 130, 69, 143


class Command(NamedTuple):
    """What one command runs in the environment, and the name of the database it is given."""

    summary: str
    arguments: tuple[str, ...]
    database: str | None  # none: it has to do with servers itself


COMMANDS = {
    "demo": Command(
        "place orders, deliver them over TLS, check every figure; --serve shows it all in the admin",
        (str(HERE / "demo.py"),),
        "postgres",  # from where the demo makes a database of its own
    ),
    "chaos": Command(
        "kill workers, database and receiver while orders are delivered; nothing is lost",
        (str(HERE / "chaos.py"),),
        None,
    ),
    "bench": Command(
        "measure what the outbox costs, as ratios against bars",
        (str(HERE / "bench.py"),),
        "postgres",
    ),
    "test": Command(
        "run the test suite; what follows goes to pytest as it is",
        ("-m", "pytest"),
        "outbox_py{}{}".format(*sys.version_info),  # two Python versions may test at the same time
    ),
}


def main(argv: list[str]) -> int:
    options = parse(argv)
    command = COMMANDS[options.command]
    try:
        project_venv.enter(CHECKOUT, announce)
        given = os.environ.get("DATABASE_URL")
        argv = [sys.executable, *command.arguments, *options.arguments]
        if given or command.database is None:
            return run(argv, {})
        with private_postgres.shared(announce) as server:
            # The child keeps the server in use even when this process is killed.
            return run(argv, {"DATABASE_URL": server.url(command.database)}, (server.user_fd,))
    except (project_venv.InstallError, postgres_binaries.PrivatePostgresError) as problem:
        print(f"run.py: {problem}", file=sys.stderr)
        return SETUP_FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def parse(argv: list[str]) -> argparse.Namespace:
    listing = "\n".join(f"  {name:<8}{command.summary}" for name, command in COMMANDS.items())
    codes = f"""
exit codes:
  demo: 0 every figure is right, 1 a figure is wrong; bench: 0 every bar is held, 1 one is missed;
  chaos: 0 nothing was lost, 1 a message was lost, or sent wrongly; test: those of pytest
  2 the command line is wrong, {SETUP_FAILED} the set-up failed,
  {INTERRUPTED} interrupted, {TERMINATED} terminated; Ctrl-C is how demo --serve ends well (0)

environment:
  DATABASE_URL    use this database server (postgres://, mysql://, sqlite:///) instead of a private one
  OUTBOX_PG_HOME  keep the private PostgreSQL here instead of in the temporary directory"""
    parser = argparse.ArgumentParser(
        prog="run.py",
        usage="run.py COMMAND [arguments ...]",
        description=__doc__,
        epilog=f"commands:\n{listing}\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the command")
    return parser.parse_args(argv)


def run(argv: list[str], settings: dict[str, str], descriptors: tuple[int, ...] = ()) -> int:
    """Run the command in the checkout and return its exit code; it never outlives us unless we are killed."""
    child = subprocess.Popen(argv, cwd=CHECKOUT, env={**os.environ, **settings}, pass_fds=descriptors)
    try:
        code = child.wait()
    except KeyboardInterrupt:
        end(child, patience=10)  # Ctrl-C reached the child too: let it tidy up
        if child.returncode == 0:
            return 0  # it was meant to be ended so
        raise
    except SystemExit:
        end(child, patience=0)
        raise
    return code if code >= 0 else 128 - code


def end(child: subprocess.Popen[bytes], patience: float) -> None:
    try:
        child.wait(patience)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.terminate()
        try:
            child.wait(20)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            child.kill()
            child.wait()


def announce(line: str) -> None:
    print(f"run.py: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    sys.exit(main(sys.argv[1:]))
