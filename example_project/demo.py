"""The demo: 300 orders placed, 60 of them rolled back, the rest delivered to a receiver having a bad day.

Started by ``run.py demo`` with DATABASE_URL naming a database server. The demo works in a database of its
own there, ``outbox_demo``, dropped and made anew at each run. What is counted, and what it should come to, is in
``demo_figures``; what the demo is played on is made by ``stage``.

With ``--serve`` it goes on when every figure is right: more orders come in, the receiver refuses two of them, and
Django's admin shows it all, at an address on this machine and with a login that are printed and end with the demo.
What is requeued there is delivered. Ctrl-C ends it.

Exit codes: 0 every figure is right (with --serve: and Ctrl-C ended it), 1 a figure is wrong or a process failed,
2 the command line is wrong or the port is taken, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import http.client
import os
import secrets
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import django

from stage import (
    beside,
    certify,
    free_port,
    make_database,
    process,
    say,
    settle_environment,
    steady_port,
    tail,
)

DATABASE = "outbox_demo"
WORKER = ["manage.py", "run_outbox_worker", "--concurrency", "16"]
ONE_RUN = [*WORKER, "--until-empty"]
# DEBUG stays off: insecure means no more than that the style sheets are served too
ADMIN = ["manage.py", "runserver", "--noreload", "--insecure"]
PATIENCE = 120  # seconds for each step; on an ordinary machine none needs ten


class DemoFailed(Exception):
    """A process of the demo did not do its part; the text names it and quotes its output."""


def main(argv: list[str]) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="outbox-demo-") as directory:
        try:
            return play(os.environ["DATABASE_URL"], Path(directory), options.port if options.serve else None)
        except DemoFailed as problem:
            print(f"demo: {problem}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("demo: interrupted", file=sys.stderr)
            return 130


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--serve", action="store_true", help="then show it all in the admin on this machine, until Ctrl-C"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="with --serve: the admin's port (default: any)"
    )
    parser.add_argument(
        "--signer",
        choices=("rfc9421", "standard", "both"),
        default="rfc9421",
        help="how the shop signs and what the warehouse demands (default: rfc9421)",
    )
    options = parser.parse_args(argv)
    os.environ["SHOP_SIGNATURES"] = options.signer
    if not os.environ.get("DATABASE_URL"):
        parser.error("DATABASE_URL is not set: start the demo with run.py")
    if options.port and not options.serve:
        parser.error("--port is of the admin, which only --serve shows")
    try:
        free_port(options.port)
    except OverflowError:
        parser.error("--port: a number up to 65535 is needed")
    except OSError as problem:
        parser.error(f"--port {options.port}: {problem.strerror}")
    return options


def play(server_url: str, directory: Path, admin_port: int | None) -> int:
    """Play the demo, and with an ``admin_port`` (0: any) show it there until Ctrl-C; return the exit code."""
    port = steady_port()
    sqlite = server_url.startswith("sqlite:")
    url = f"sqlite:///{directory / DATABASE}.sqlite3" if sqlite else beside(server_url, DATABASE)
    settle_environment(url, "example_project.settings", directory, port)
    os.environ["WAREHOUSE_TROUBLE"] = "1"
    django.setup()
    from django.core.management import call_command

    from demo_figures import DemoFigures, place_orders, requeue_quarantined  # they import models

    began = time.monotonic()
    say("a fresh database, migrated")
    if not sqlite:
        make_database(server_url, DATABASE)
    call_command("migrate", verbosity=0)

    certify(directory)

    say(f"the receiver, over TLS, on https://localhost:{port}")
    with receiver(port, directory):
        figures = DemoFigures()
        say("the shop places orders; every fifth card is declined")
        place_orders(figures)
        say("the worker delivers: " + " ".join(ONE_RUN))
        deliver(directory)
        figures.count_first_run()
        say("the quarantined messages are requeued; the worker runs again")
        requeue_quarantined(figures)
        deliver(directory)
        figures.count_second_run()
    figures.show()
    print(f"\n{time.monotonic() - began:.1f} s in all")
    verdict = figures.verdict()
    if verdict == 0 and admin_port is not None:
        serve(directory, port, admin_port)
    return verdict


def serve(directory: Path, port: int, admin_port: int) -> None:
    """Leave something to be done, and the demo's data in the admin, until Ctrl-C."""
    from django.contrib.auth.models import User

    from demo_figures import place_more_orders, quarantined

    say("more orders; the receiver has another bad day")
    with receiver(port, directory) as warehouse:
        place_more_orders()
        deliver(directory)
        password = secrets.token_urlsafe(12)
        User.objects.create_superuser("demo", password=password)
        admin_port = admin_port or steady_port()
        with (
            process(WORKER, directory / "worker.log") as worker,
            process([*ADMIN, f"127.0.0.1:{admin_port}"], directory / "admin.log") as admin,
        ):
            wait_until_it_answers(
                "admin",
                admin,
                lambda: http.client.HTTPConnection("127.0.0.1", admin_port, timeout=5),
                directory,
            )
            try:
                say(f"{quarantined()} messages are quarantined; what is requeued is delivered")
                print(f"\n  admin     http://127.0.0.1:{admin_port}/admin/\n  user      demo")
                print(f"  password  {password}\n\nCtrl-C ends it", flush=True)
                watch_over({"receiver": warehouse, "worker": worker, "admin": admin}, directory)
            except KeyboardInterrupt:
                say("ended")


def watch_over(processes: dict[str, subprocess.Popen[bytes]], directory: Path) -> NoReturn:
    """Wait, until one of them ends by itself; each writes the log of its name."""
    while True:
        for name, child in processes.items():
            if child.poll() is not None:
                log = tail(directory / f"{name}.log")
                raise DemoFailed(f"the {name} ended with exit code {child.returncode}\n{log}")
        time.sleep(0.1)


@contextmanager
def receiver(port: int, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the warehouse over TLS; each time it begins a bad day anew."""
    pair = str(directory / "server.pem")
    served = ["-m", "uvicorn", "example_project.asgi:application", "--host", "127.0.0.1", "--port", str(port)]
    tls = ["--ssl-certfile", pair, "--ssl-keyfile", pair]
    quiet = ["--lifespan", "off", "--no-access-log", "--log-level", "warning"]
    trust = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    with process([*served, *tls, *quiet], directory / "receiver.log") as server:
        wait_until_it_answers(
            "receiver",
            server,
            lambda: http.client.HTTPSConnection("localhost", port, timeout=5, context=trust),
            directory,
        )
        yield server


def wait_until_it_answers(
    name: str,
    server: subprocess.Popen[bytes],
    connect: Callable[[], http.client.HTTPConnection],
    directory: Path,
) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < deadline:
        connection = connect()
        try:
            connection.request("GET", "/")
            connection.getresponse()
        except OSError:
            time.sleep(0.1)
        else:
            return
        finally:
            connection.close()
    raise DemoFailed(f"the {name} does not answer\n{tail(directory / f'{name}.log')}")


def deliver(directory: Path) -> None:
    """Run a worker until the outbox is empty, and show how far it is."""
    from demo_figures import watch

    log = directory / "worker.log"
    with process(ONE_RUN, log) as worker:
        watch(worker, PATIENCE)
        if worker.poll() is None:
            raise DemoFailed(f"the worker is not done after {PATIENCE} s\n{tail(log)}")
        if worker.returncode:
            raise DemoFailed(f"the worker ended with exit code {worker.returncode}\n{tail(log)}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
