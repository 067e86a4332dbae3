"""Migrated databases for benches, beside the one that DATABASE_URL names, dropped in the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections


@contextmanager
def database(alias: str) -> Iterator[None]:
    """Make a database and reach it by ``alias``, which is new, or else is put back in the end."""
    default = connections.settings["default"]
    new = alias not in connections.settings
    if new:
        test = {**default["TEST"], "NAME": f"test_{default['NAME'].removeprefix('test_')}_{alias}"}
        connections.settings[alias] = {**default, "TEST": test}
    connection = connections[alias]
    name = connection.settings_dict["NAME"]
    connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
    try:
        yield
    finally:
        connection.creation.destroy_test_db(name, verbosity=0)
        if new:
            del connections[alias], connections.settings[alias]
