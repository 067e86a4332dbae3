"""Counts of outcomes by the minute, written with the outcomes: what the health page shows without a scan."""

from django.db import migrations, models

from ._collation import compare_bytes


class Migration(migrations.Migration):
    atomic = False  # the collation is set where DDL cannot be rolled back; elsewhere there is one statement
    dependencies = [("notification_outbox", "0004_expunge_index")]

    operations = [
        migrations.CreateModel(
            name="OutboxStat",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("minute", models.DateTimeField()),
                ("lane", models.CharField(max_length=63)),
                ("outcome", models.CharField(max_length=32)),
                ("worker", models.CharField(blank=True, default="", max_length=32)),
                ("n", models.PositiveBigIntegerField()),
            ],
            options={
                "verbose_name": "count of outcomes",
                "verbose_name_plural": "counts of outcomes",
                "constraints": [
                    models.UniqueConstraint(
                        fields=("minute", "lane", "outcome", "worker"), name="outbox_stat_count"
                    )
                ],
            },
        ),
        migrations.RunPython(compare_bytes("OutboxStat"), migrations.RunPython.noop),
    ]
