"""Permissions of what operators may do to messages in the admin."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("notification_outbox", "0005_outbox_stat")]

    operations = [
        migrations.AlterModelOptions(
            name="outboxmessage",
            options={
                "permissions": [
                    ("reveal_outboxmessage", "Can read the body of a message"),
                    ("requeue_outboxmessage", "Can requeue messages"),
                    ("send_now_outboxmessage", "Can send messages now"),
                    ("quarantine_outboxmessage", "Can quarantine messages"),
                    ("cancel_outboxmessage", "Can cancel messages"),
                    ("expunge_outboxmessage", "Can erase the bodies of messages"),
                ],
                "verbose_name": "message",
                "verbose_name_plural": "messages",
            },
        ),
    ]
