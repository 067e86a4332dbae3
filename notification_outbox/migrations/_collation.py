"""Collations of the MySQL family, for the migrations that make tables with text."""

from collections.abc import Callable
from typing import Any

Step = Callable[[Any, Any], None]


def compare_bytes(*models: str) -> Step:
    """Return a step after which these models' text is compared byte for byte."""

    def run(apps: Any, schema_editor: Any) -> None:
        connection = schema_editor.connection
        if connection.vendor == "mysql":
            collation = "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
            _convert(models, apps, schema_editor, collation)

    return run


def compare_as_the_database_does(*models: str) -> Step:
    """Return the step back."""

    def run(apps: Any, schema_editor: Any) -> None:
        if schema_editor.connection.vendor == "mysql":
            with schema_editor.connection.cursor() as cursor:
                cursor.execute("SELECT @@collation_database")
                (collation,) = cursor.fetchone()
            _convert(models, apps, schema_editor, collation)

    return run


def _convert(models: tuple[str, ...], apps: Any, schema_editor: Any, collation: str) -> None:
    charset = collation.partition("_")[0]
    for name in models:
        table = schema_editor.quote_name(apps.get_model("notification_outbox", name)._meta.db_table)
        schema_editor.execute(f"ALTER TABLE {table} CONVERT TO CHARACTER SET {charset} COLLATE {collation}")
