"""What is wrong with a running outbox, each with its mend: found in the table, where checks cannot look."""

from __future__ import annotations

from dataclasses import dataclass

from . import stats
from .conf import Settings


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: a stable ``code``, what it means, what to do about it."""

    code: str
    problem: str
    mend: str


def examine(settings: Settings, *, using: str) -> list[Finding]:
    """Return what is wrong with the outbox of one database, as this process's settings see it."""
    findings = []
    for key_id, count in stats.keys(using=using).items():
        if key_id not in settings.keyring:
            findings.append(
                Finding(
                    "unknown_key",
                    f"{stats.bounded(count)} messages are sealed under the key {key_id!r}, "
                    "which is not configured here.",
                    "Add the key to ENCRYPTION_KEYS (or its secret to SECRET_KEY_FALLBACKS) of every worker; "
                    "until then these messages wait, and at the end of their time become unreadable.",
                )
            )
    for alias in stats.lanes(using=using):
        if alias not in settings.publishers:
            findings.append(
                Finding(
                    "unknown_lane",
                    f"Messages wait for the publisher {alias!r}, which is not in PUBLISHERS.",
                    "Configure the alias again, or cancel its messages.",
                )
            )
    return findings
