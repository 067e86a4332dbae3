"""Text is compared byte for byte on the MySQL family too; other databases do so by themselves.

Its usual collations take ``K1`` and ``k1`` for one key id, and ``Hooks`` and ``hooks`` for one lane.
"""

from django.db import migrations

from ._collation import compare_as_the_database_does, compare_bytes

MODELS = ("OutboxMessage", "DeliveryAttempt")


class Migration(migrations.Migration):
    atomic = False  # its only statements cannot be rolled back where they are made
    dependencies = [("notification_outbox", "0002_postgres_storage")]

    operations = [migrations.RunPython(compare_bytes(*MODELS), compare_as_the_database_does(*MODELS))]
