"""Text is compared byte for byte on the MySQL family too; other databases do so by themselves.

Its usual collations take ``K1`` and ``k1`` for one key id, and ``Hooks`` and ``hooks`` for one lane.
"""

from typing import Any

from django.db import migrations

MODELS = ("OutboxMessage", "DeliveryAttempt")


def _convert(apps: Any, schema_editor: Any, collation: str) -> None:
    charset = collation.partition("_")[0]
    for name in MODELS:
        table = schema_editor.quote_name(apps.get_model("notification_outbox", name)._meta.db_table)
        schema_editor.execute(f"ALTER TABLE {table} CONVERT TO CHARACTER SET {charset} COLLATE {collation}")


def compare_bytes(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    if connection.vendor == "mysql":
        _convert(
            apps, schema_editor, "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
        )


def compare_as_the_database_does(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "mysql":
        with schema_editor.connection.cursor() as cursor:
            cursor.execute("SELECT @@collation_database")
            (collation,) = cursor.fetchone()
        _convert(apps, schema_editor, collation)


class Migration(migrations.Migration):
    atomic = False  # its only statements cannot be rolled back where they are made
    dependencies = [("notification_outbox", "0002_postgres_storage")]

    operations = [migrations.RunPython(compare_bytes, compare_as_the_database_does)]
