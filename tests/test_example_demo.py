"""The demo as somebody meets it who has nothing but a checkout: one command, then the admin in a browser."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from tests.processes import ROOT, wait_until

pytestmark = pytest.mark.databases("postgresql")  # it brings a database of its own
MESSAGES = "/admin/notification_outbox/outboxmessage/"


@pytest.fixture
def demo(home: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the demo without DATABASE_URL, as the leader of a process group, which is killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "example_project" / "run.py"), "demo", *arguments],
            env={**environment, "OUTBOX_PG_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if not leaves_no_process(process):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def leaves_no_process(leader: subprocess.Popen[str]) -> bool:
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return True
    return False


def read_until(last: str, process: subprocess.Popen[str]) -> str:
    """Return what the process prints up to the line ``last``."""
    assert process.stdout
    told = ""
    for line in process.stdout:
        told += line
        if line.strip() == last:
            return told
    raise AssertionError(told)


class Visitor:
    """Somebody with cookies, and no browser."""

    def __init__(self, site: str) -> None:
        self.site = site
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._token = ""

    def get(self, path: str) -> str:
        return self._open(path, None)

    def post(self, path: str, **fields: str) -> str:
        """Send a form of the page that was seen last."""
        return self._open(
            path, urllib.parse.urlencode({**fields, "csrfmiddlewaretoken": self._token}).encode()
        )

    def _open(self, path: str, data: bytes | None) -> str:
        with self._opener.open(self.site + path, data, timeout=20) as answer:
            page: str = answer.read().decode()
        if token := re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page):
            self._token = token[1]
        return page


def test_what_the_demo_leaves_is_seen_and_requeued_in_the_admin(
    demo: Callable[..., subprocess.Popen[str]], home: Path
) -> None:
    """Its address and login are printed, its style sheets come, a requeue is delivered, and Ctrl-C ends all of it."""
    process = demo("--serve")
    told = read_until("Ctrl-C ends it", process)
    assert "every figure is right" in told
    assert "2 messages are quarantined" in told
    site, user, password = re.findall(
        r"(?:admin +(http://127\.0\.0\.1:\d+)/admin/|user +(\w+)|password +(\S+))", told
    )
    visitor = Visitor(site[0])
    visitor.get("/admin/login/")
    home_page = visitor.post("/admin/login/?next=/admin/", username=user[1], password=password[2])
    assert MESSAGES in home_page

    assert "340 messages" in visitor.get(MESSAGES)
    listed = visitor.get(f"{MESSAGES}?state=quarantined")
    assert "2 messages" in listed
    sheets = re.findall(r'href="(/static/[^"]+\.css)"', listed)
    assert "/static/notification_outbox/admin.css" in sheets
    assert all("{" in visitor.get(sheet) for sheet in sheets)

    row = re.findall(rf'href="({MESSAGES}\d+/)change/', listed)[0]
    assert "1 requeued." in visitor.post(f"{row}act/requeue/", confirmed="yes")
    wait_until(lambda: "It was delivered" in visitor.get(f"{row}change/"), "its delivery", poll=0.1)

    os.killpg(process.pid, signal.SIGINT)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, told
    wait_until(lambda: leaves_no_process(process), "every process to end")
    assert list(home.glob("*/run/data/postmaster.pid")) == []


def test_a_port_that_is_taken_is_said_before_anything_is_done(
    demo: Callable[..., subprocess.Popen[str]],
) -> None:
    """Not after the figures; and a port without an admin on it makes no sense."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = demo("--serve", "--port", port)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"--port {port}: Address already in use" in told
    process = demo("--port", port)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "only --serve shows" in told
