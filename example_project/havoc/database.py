"""Taking the database away and bringing it back: our own cluster, or the connections to one that was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
from psycopg.sql import SQL, Identifier, Literal

import private_postgres
from stage import beside


class OwnCluster:
    """A PostgreSQL of the run's own, stopped as by a power cut."""

    how = "its own PostgreSQL is stopped (immediate mode) and started again"

    def __init__(self, server: private_postgres.Server) -> None:
        self._server = server
        self.server_url = server.url("postgres")
        self.url = beside(self.server_url, "outbox_chaos")

    def stop(self) -> None:
        self._server.stop("immediate")

    def start(self) -> None:
        self._server.start(lambda line: None)


class GivenServer:
    """A database on a server that others use: its connections are ended, and no new ones allowed for a while."""

    how = "its connections are ended (pg_terminate_backend) and refused for a while: the server is not ours to stop"

    def __init__(self, server_url: str) -> None:
        self.server_url = server_url
        self._name = (server_url.rpartition("/")[2].partition("?")[0] or "outbox") + "_chaos"
        self.url = beside(server_url, self._name)

    def stop(self) -> None:
        self._allow(False)

    def start(self) -> None:
        self._allow(True)

    def drop(self) -> None:
        with psycopg.connect(self.server_url, autocommit=True) as connection:
            connection.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(self._name)))

    def _allow(self, allowed: bool) -> None:
        with psycopg.connect(self.server_url, autocommit=True) as connection:
            rule = SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
            connection.execute(rule.format(Identifier(self._name), Literal(allowed)))
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [self._name]
            )


Database = OwnCluster | GivenServer


@contextmanager
def database(given: str | None, port: int, announce: Callable[[str], None]) -> Iterator[Database]:
    """Find the database to play with; it is removed in the end. Our own cluster listens on ``port``."""
    if given:
        server = GivenServer(given)
        try:
            yield server
        finally:
            server.drop()
    else:
        with private_postgres.own(announce, port) as cluster:
            yield OwnCluster(cluster)
