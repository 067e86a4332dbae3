"""Fixtures of the suite: which tests a database gets, settings for a receiver, worker processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from django.conf import settings as django_settings

from tests.processes import Outbox, Started
from tests.receiver import Receiver

# how fast a shared machine makes up examples is not what any test is about
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are about other databases or were not asked for: a skip would hide one that should
    have run.
    """
    engine = django_settings.DATABASES["default"]["ENGINE"].rpartition(".")[2]
    kept, left_out = [], []
    for item in items:
        marker = item.get_closest_marker("databases")
        fits = marker is None or engine in marker.args
        asked_for = item.get_closest_marker("scale") is None or "scale" in config.option.markexpr
        (kept if fits and asked_for else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """In CI every service is there, so a skipped test is a failure."""
    report = yield
    if report.skipped and os.environ.get("OUTBOX_CI"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


@pytest.fixture
def home() -> Iterator[Path]:
    """A place for a private PostgreSQL that an unprivileged user can reach, unlike pytest's own directories."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        yield Path(directory) / "postgres"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A real TLS receiver on loopback that answers 200."""
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def configure(settings: Any) -> Callable[..., None]:
    """Return a function that sets ``NOTIFICATION_OUTBOX`` for this test and the workers it starts."""

    def configure(**raw: Any) -> None:
        settings.NOTIFICATION_OUTBOX = raw

    return configure


@pytest.fixture
def outbox(receiver: Receiver, configure: Callable[..., None]) -> Iterator[Outbox]:
    """An outbox whose default publisher may reach the receiver, and the worker processes of this test."""
    started: list[Started] = []
    yield Outbox(receiver, configure, started)
    for process in started:
        process.close()
