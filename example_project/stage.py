"""What the demo and chaos are played on: a database, a certificate, processes and their logs."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import trustme

HERE = Path(__file__).resolve().parent


def settle_environment(database_url: str, settings: str, directory: Path, port: int) -> None:
    """Say in the environment, for this process and its children, where everything is."""
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": settings,
        "DATABASE_URL": database_url,
        "WAREHOUSE_ORIGIN": f"https://localhost:{port}",
        "WAREHOUSE_CA_FILE": str(directory / "ca.pem"),
        "WAREHOUSE_ALLOW_HOSTS": f"localhost:{port}",
    }


def beside(server_url: str, name: str) -> str:
    """Return the address of database ``name`` on the same server."""
    return urlsplit(server_url)._replace(path=f"/{name}").geturl()


def make_database(server_url: str, name: str) -> None:
    """Drop the database and make it anew, over a connection to the one that was given."""
    import environ
    from django.db.utils import ConnectionHandler

    connection = ConnectionHandler({"default": environ.Env.db_url_config(server_url)})["default"]
    force = " WITH (FORCE)" if connection.vendor == "postgresql" else ""  # a killed run's sessions
    charset = "" if connection.vendor == "postgresql" else " CHARACTER SET utf8mb4"
    quoted = connection.ops.quote_name(name)
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {quoted}{force}")
        cursor.execute(f"CREATE DATABASE {quoted}{charset}")
    connection.close()


def certify(directory: Path) -> Path:
    """Make a throw-away authority, ``ca.pem``; return the file of localhost's key and certificate, ``server.pem``."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    pair = directory / "server.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(pair))
    return pair


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start Python with ``arguments``, its output added to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *arguments], cwd=HERE, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


@contextmanager
def process(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python with ``arguments`` for the length of the block, its output in ``log``."""
    child = start(arguments, log)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(20)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            child.kill()
            child.wait()


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def steady_port() -> int:
    """Return a free port that the system gives to nobody by itself while its listener is away."""
    while True:
        try:
            return free_port(random.randrange(20_000, 30_000))
        except OSError:
            continue


def free_port(wanted: int = 0) -> int:
    """Return a free port of loopback: ``wanted``, or any. Raises ``OSError`` when ``wanted`` is taken."""
    with socket.socket() as probe:
        # as servers do: what a former one left closing is no hindrance
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", wanted))
        return probe.getsockname()[1]


def say(line: str) -> None:
    print(f"- {line}", flush=True)
