"""The demo: 300 orders placed, 60 of them rolled back, the rest delivered to a receiver having a bad day.

Started by ``run.py demo`` with DATABASE_URL naming a database server. The demo works in a database of its
own there, ``outbox_demo``, dropped and made anew at each run. This room owns the stage: the database, a
throw-away certificate authority, the receiver and the worker as processes, all ended with the demo. What is
counted, and what it should come to, is in ``demo_figures``.

Exit codes: 0 every figure is right, 1 a figure is wrong or a process failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import django
import trustme

HERE = Path(__file__).resolve().parent
DATABASE = "outbox_demo"
WORKER = ["manage.py", "run_outbox_worker", "--until-empty", "--concurrency", "16"]
PATIENCE = 120  # seconds for each step; on an ordinary machine none needs ten


class DemoFailed(Exception):
    """A process of the demo did not do its part; the text names it and quotes its output."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="run.py demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    server_url = os.environ.get("DATABASE_URL")
    if not server_url:
        parser.error("DATABASE_URL is not set: start the demo with run.py")
    with tempfile.TemporaryDirectory(prefix="outbox-demo-") as directory:
        try:
            return play(server_url, Path(directory))
        except DemoFailed as problem:
            print(f"demo: {problem}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("demo: interrupted", file=sys.stderr)
            return 130


def play(server_url: str, directory: Path) -> int:
    port = free_port()
    settle_environment(server_url, directory, port)
    django.setup()
    from django.core.management import call_command

    from demo_figures import Figures, place_orders, requeue_quarantined, watch  # they import models

    began = time.monotonic()
    say("a fresh database, migrated")
    make_database(server_url)
    call_command("migrate", verbosity=0)

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    pair = authority.issue_cert("localhost").private_key_and_cert_chain_pem
    pair.write_to_path(str(directory / "server.pem"))

    say(f"the receiver, over TLS, on https://localhost:{port}")
    with process(uvicorn(port, directory / "server.pem"), directory / "receiver.log") as receiver:
        wait_until_it_answers(receiver, port, directory)
        figures = Figures()
        say("the shop places orders; every fifth card is declined")
        place_orders(figures)
        say("the worker delivers: " + " ".join(WORKER))
        with process(WORKER, directory / "worker.log") as worker:
            watch(worker, PATIENCE)
            check_exit(worker, directory / "worker.log")
        figures.count_first_run()
        say("the quarantined messages are requeued; the worker runs again")
        requeue_quarantined(figures)
        with process(WORKER, directory / "worker.log") as worker:
            watch(worker, PATIENCE)
            check_exit(worker, directory / "worker.log")
        figures.count_second_run()
    figures.show()
    print(f"\n{time.monotonic() - began:.1f} s in all")
    return figures.verdict()


def settle_environment(server_url: str, directory: Path, port: int) -> None:
    """Say in the environment, for this process and its children, where everything is."""
    if server_url.startswith("sqlite:"):
        url = f"sqlite:///{directory / DATABASE}.sqlite3"
    else:
        url = urlsplit(server_url)._replace(path=f"/{DATABASE}").geturl()
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "DATABASE_URL": url,
        "WAREHOUSE_ORIGIN": f"https://localhost:{port}",
        "WAREHOUSE_CA_FILE": str(directory / "ca.pem"),
        "WAREHOUSE_ALLOW_HOSTS": f"localhost:{port}",
        "WAREHOUSE_TROUBLE": "1",
    }


def make_database(server_url: str) -> None:
    """Drop the demo's database and make it anew, over a connection to the one that was given."""
    import environ
    from django.db.utils import ConnectionHandler

    connection = ConnectionHandler({"default": environ.Env.db_url_config(server_url)})["default"]
    if connection.vendor == "sqlite":
        return  # the file lies in the demo's own directory
    force = " WITH (FORCE)" if connection.vendor == "postgresql" else ""  # a killed demo's sessions
    charset = "" if connection.vendor == "postgresql" else " CHARACTER SET utf8mb4"
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {DATABASE}{force}")
        cursor.execute(f"CREATE DATABASE {DATABASE}{charset}")
    connection.close()


def uvicorn(port: int, pair: Path) -> list[str]:
    served = ["-m", "uvicorn", "example_project.asgi:application", "--host", "127.0.0.1", "--port", str(port)]
    tls = ["--ssl-certfile", str(pair), "--ssl-keyfile", str(pair)]
    return [*served, *tls, "--lifespan", "off", "--no-access-log", "--log-level", "warning"]


@contextmanager
def process(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python with ``arguments`` for the length of the block, its output in ``log``."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments], cwd=HERE, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(20)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            child.kill()
            child.wait()


def wait_until_it_answers(receiver: subprocess.Popen[bytes], port: int, directory: Path) -> None:
    trust = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    deadline = time.monotonic() + PATIENCE
    while receiver.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPSConnection("localhost", port, timeout=5, context=trust)
        try:
            connection.request("GET", "/")
            connection.getresponse()
        except OSError:
            time.sleep(0.1)
        else:
            return
        finally:
            connection.close()
    raise DemoFailed(f"the receiver does not answer\n{tail(directory / 'receiver.log')}")


def check_exit(worker: subprocess.Popen[bytes], log: Path) -> None:
    if worker.poll() is None:
        raise DemoFailed(f"the worker is not done after {PATIENCE} s\n{tail(log)}")
    if worker.returncode:
        raise DemoFailed(f"the worker ended with exit code {worker.returncode}\n{tail(log)}")


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(line: str) -> None:
    print(f"- {line}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
