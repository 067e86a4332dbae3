"""The first tables of the warehouse."""

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Booking",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("order", models.CharField(max_length=32, unique=True)),
                ("total", models.DecimalField(decimal_places=2, max_digits=10)),
                ("booked_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name="ReceivedMessage",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("sender", models.CharField(max_length=64)),
                ("message_id", models.CharField(max_length=64)),
                ("times", models.PositiveIntegerField(default=1, help_text="how often it arrived")),
                ("first_at", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("sender", "message_id"), name="warehouse_message_once")
                ],
            },
        ),
    ]
