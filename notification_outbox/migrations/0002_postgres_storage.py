"""How PostgreSQL keeps the table; other databases are left as they are.

``fillfactor``: claim and settle find room on the row's own page, which makes their WAL several times smaller.
``EXTERNAL``: sealed bytes do not compress, so PostgreSQL should not try. ``autovacuum``: every delivery leaves
dead tuples at the head of the claim index.
"""

from collections.abc import Callable, Sequence
from typing import Any

from django.db import migrations

TUNE = (
    "ALTER TABLE {table} SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)",
    "ALTER TABLE {table} ALTER COLUMN {sealed} SET STORAGE EXTERNAL",
)
RESTORE = (
    "ALTER TABLE {table} ALTER COLUMN {sealed} SET STORAGE EXTENDED",
    "ALTER TABLE {table} RESET (fillfactor, autovacuum_vacuum_scale_factor)",
)


def on_postgres(statements: Sequence[str]) -> Callable[[Any, Any], None]:
    def run(apps: Any, schema_editor: Any) -> None:
        if schema_editor.connection.vendor != "postgresql":
            return
        table = apps.get_model("notification_outbox", "OutboxMessage")._meta.db_table
        for statement in statements:
            schema_editor.execute(
                statement.format(
                    table=schema_editor.quote_name(table), sealed=schema_editor.quote_name("sealed")
                )
            )

    return run


class Migration(migrations.Migration):
    dependencies = [("notification_outbox", "0001_initial")]

    operations = [migrations.RunPython(on_postgres(TUNE), on_postgres(RESTORE))]
