"""The demo's own PostgreSQL: shared by those who use it, and never lost to a crash.

Runs in a directory of its own, so that it cannot meet the server this very test run may be using.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "example_project"
# Uses the server until its standard input ends; says where it is and what was announced.
USER = """
import sys, private_postgres
with private_postgres.shared(lambda line: print("started", flush=True)) as server:
    print(server.pid(), server.url("postgres"), flush=True)
    sys.stdin.read()
"""
pytestmark = pytest.mark.databases("postgresql")  # says nothing about other databases


class User:
    """A process that uses the private server."""

    def __init__(self, home: Path) -> None:
        environment = {**os.environ, "OUTBOX_PG_HOME": str(home), "PYTHONPATH": str(EXAMPLE)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> tuple[bool, int, str]:
        """Return whether this user started the server, the server's pid and its address."""
        assert self.process.stdout
        first = self.process.stdout.readline().split()
        started = first == ["started"]
        pid, url = self.process.stdout.readline().split() if started else first
        return started, int(pid), url

    def leave(self) -> None:
        _, errors = self.process.communicate("")
        assert self.process.returncode == 0, errors

    def die(self) -> None:
        """End as by kill -9: nothing is tidied up."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def use(home: Path) -> Iterator[Callable[[], User]]:
    """Start a user of the server; whoever is left at the end leaves, and the server stops."""
    users: list[User] = []

    def start() -> User:
        users.append(User(home))
        return users[-1]

    yield start
    for user in users:
        if user.process.poll() is None:
            user.leave()
    if any(home.glob("*/run/data/postmaster.pid")):
        last = User(home)
        last.wait()
        last.leave()


def answers(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            return connection.execute("select 1").fetchone() == (1,)
    except psycopg.OperationalError:
        return False


def test_concurrent_users_share_one_server_and_the_last_one_out_stops_it(use: Callable[[], User]) -> None:
    """Two users that start together get one server, which stays until both have left."""
    first, second = use(), use()
    (started, pid, url), (also_started, other_pid, other_url) = first.wait(), second.wait()
    assert {started, also_started} == {True, False}
    assert (pid, url) == (other_pid, other_url)
    first.leave()
    assert answers(url)
    second.leave()
    assert not answers(url)


def test_data_outlives_a_stop(use: Callable[[], User]) -> None:
    """A later user finds what an earlier one committed, under the same password."""
    user = use()
    _, _, url = user.wait()
    with psycopg.connect(url) as connection:
        connection.execute("create table kept as select 1 as one")
    user.leave()
    started, _, url = use().wait()
    assert started
    with psycopg.connect(url) as connection:
        assert connection.execute("select one from kept").fetchone() == (1,)


def test_a_killed_user_leaves_the_server_to_the_next(use: Callable[[], User]) -> None:
    """The server of a user that was killed is taken over, not started again, and stopped by the heir."""
    user = use()
    _, pid, url = user.wait()
    user.die()
    heir = use()
    assert heir.wait() == (False, pid, url)
    heir.leave()
    assert not answers(url)


def test_a_killed_server_is_started_again(use: Callable[[], User]) -> None:
    """After kill -9 of the postmaster, even while it is in use, the next user starts it again."""
    _, pid, _ = use().wait()
    os.kill(pid, signal.SIGKILL)
    started, new_pid, url = use().wait()
    assert started
    assert new_pid != pid
    assert answers(url)


def test_a_directory_of_somebody_else_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that another user made under our name is not used: the server would be theirs."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("OUTBOX_PG_HOME", str(home))
    from postgres_binaries import PrivatePostgresError
    from private_postgres import shared

    home.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PrivatePostgresError, match="somebody else"), shared():
        pass
    assert not any(home.iterdir())


def test_a_directory_that_others_may_write_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of ours that everybody may write to could hold anybody's files, so it is not used."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("OUTBOX_PG_HOME", str(home))
    from postgres_binaries import PrivatePostgresError
    from private_postgres import shared

    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(PrivatePostgresError, match="somebody else"), shared():
        pass


def test_a_server_of_ones_own_is_stopped_started_and_removed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user may pull the plug and start it again at the same address; nothing of it is left in the end."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("OUTBOX_PG_HOME", str(home))
    from private_postgres import own
    from stage import free_port

    port = free_port()
    with own(lambda line: None, port) as server:
        url = server.url("postgres")
        with psycopg.connect(url) as connection:
            connection.execute("create table kept as select 1 as one")
        server.stop("immediate")
        assert not answers(url)
        server.start(lambda line: None)
        with psycopg.connect(url) as connection:
            assert connection.execute("select one from kept").fetchone() == (1,)
    assert not answers(url)
    assert not any(home.iterdir())
