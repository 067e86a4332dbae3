"""The demo: 300 orders placed, 60 of them rolled back, the rest delivered to a receiver having a bad day.

Started by ``run.py demo`` with DATABASE_URL naming a database server. The demo works in a database of its
own there, ``outbox_demo``, dropped and made anew at each run. This room owns the play, on what ``stage`` makes: the
receiver and the worker are processes that end with the demo. What is counted, and what it should come to, is in
``demo_figures``.

Exit codes: 0 every figure is right, 1 a figure is wrong or a process failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import django

from stage import beside, certify, free_port, make_database, process, say, settle_environment, tail

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
    sqlite = server_url.startswith("sqlite:")
    url = f"sqlite:///{directory / DATABASE}.sqlite3" if sqlite else beside(server_url, DATABASE)
    settle_environment(url, "example_project.settings", directory, port)
    os.environ["WAREHOUSE_TROUBLE"] = "1"
    django.setup()
    from django.core.management import call_command

    from demo_figures import DemoFigures, place_orders, requeue_quarantined, watch  # they import models

    began = time.monotonic()
    say("a fresh database, migrated")
    if not sqlite:
        make_database(server_url, DATABASE)
    call_command("migrate", verbosity=0)

    pair = certify(directory)

    say(f"the receiver, over TLS, on https://localhost:{port}")
    with process(uvicorn(port, pair), directory / "receiver.log") as receiver:
        wait_until_it_answers(receiver, port, directory)
        figures = DemoFigures()
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


def uvicorn(port: int, pair: Path) -> list[str]:
    served = ["-m", "uvicorn", "example_project.asgi:application", "--host", "127.0.0.1", "--port", str(port)]
    tls = ["--ssl-certfile", str(pair), "--ssl-keyfile", str(pair)]
    return [*served, *tls, "--lifespan", "off", "--no-access-log", "--log-level", "warning"]


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


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
