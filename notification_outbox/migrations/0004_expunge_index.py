"""Finds delivered messages that still hold a body, for ``RETENTION["expunge_delivered"]``."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("notification_outbox", "0003_mysql_collation")]

    operations = [
        migrations.AddIndex(
            model_name="outboxmessage",
            index=models.Index(
                condition=models.Q(("sealed__isnull", False), ("state", "delivered")),
                fields=["settled_at"],
                name="outbox_expunge",
            ),
        ),
    ]
