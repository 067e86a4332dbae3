"""Chaos: a few seconds of it lose nothing, it leaves nothing behind, and its judge is not to be fooled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.processes import ROOT, database_url, wait_until

EXAMPLE = ROOT / "example_project"


def chaos(*arguments: str) -> subprocess.Popen[str]:
    """Start chaos on the test's server, as the leader of a process group."""
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE / "chaos.py"), *arguments],
        env={**os.environ, "DATABASE_URL": database_url(), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def leaves_no_process(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def databases() -> set[str]:
    with psycopg.connect(database_url()) as connection:
        return {name for (name,) in connection.execute("select datname from pg_database")}


@pytest.mark.databases("postgresql")
@pytest.mark.django_db
def test_a_few_seconds_of_chaos_lose_nothing() -> None:
    """Workers die, the database goes and comes, the receiver flaps: the verdict is that every figure is right."""
    process = chaos("--minutes", "0.2", "--seed", "7", "--workers", "2")
    output, errors = process.communicate(timeout=110)
    assert process.returncode == 0, output + errors
    figures = {
        name.strip(): int(found.split()[0])
        for name, _, found in (
            line.strip().partition("  ") for line in output.splitlines() if line.startswith("  ")
        )
    }
    assert figures["committed"] == figures["delivered"] > 0
    assert min(figures[name] for name in ("rolled back", "workers killed", "database outages")) > 0
    assert leaves_no_process(process.pid)


@pytest.mark.databases("postgresql")
@pytest.mark.django_db
def test_an_interrupted_chaos_leaves_nothing_behind() -> None:
    """Ctrl-C ends it with 130; no process and no database of it stays."""
    process = chaos("--minutes", "1", "--workers", "2")
    assert process.stdout
    while "the database:" not in process.stdout.readline():
        assert process.poll() is None
    name = database_url().rpartition("/")[2] + "_chaos"
    assert name in databases()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    wait_until(lambda: leaves_no_process(process.pid), "every process to end")
    assert name not in databases()


def verdict(capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[int, str]:
    """Judge two orders that were committed and delivered and one that was rolled back, but for the changes."""
    from havoc.judge import Evidence, judge

    evidence = {
        "placed": ["1", "2", "3"],
        "confirmed": ["1", "2"],
        "committed": ["1", "2"],
        "states": {"1": "delivered", "2": "delivered"},
        "accepted": Counter({"1": 1, "2": 1}),
    }
    code = judge(Evidence(**{**evidence, **changes})).verdict()
    return code, capsys.readouterr().out


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the test import the example's modules."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return EXAMPLE


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accepted": Counter({"1": 2, "2": 1}), "answers_lost": Counter({"1": 1})},
        {"accepted": Counter({"1": 2, "2": 1}), "in_hand": Counter({"1": 1})},
        {
            "committed": ["1", "2", "3"],
            "states": dict.fromkeys("123", "delivered"),
            "accepted": Counter("123"),
        },
    ],
    ids=["once each", "sent again for want of an answer", "sent again after a kill", "confirmed to nobody"],
)
def test_the_judge_accepts_what_at_least_once_means(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every committed order delivered, and again only where the sender could not know, is right."""
    assert verdict(capsys, **changes) == (0, "every figure is right\n")


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("figure", "changes"),
    [
        ("lost", {"accepted": Counter({"1": 1})}),
        ("lost", {"states": {"1": "delivered", "2": "quarantined"}}),
        ("lost", {"states": {"1": "delivered"}}),
        ("lost", {"confirmed": ["1", "2", "3"]}),
        ("sent though rolled back", {"accepted": Counter("123")}),
        ("unexplained", {"accepted": Counter({"1": 2, "2": 1})}),
        ("unexplained", {"accepted": Counter({"1": 3, "2": 1}), "in_hand": Counter({"1": 1})}),
        ("unexplained", {"accepted": Counter({"1": 2, "2": 1}), "answers_lost": Counter({"2": 1})}),
        ("under another message id", {"renamed": ["1"]}),
        ("ended by themselves", {"deserted": 1}),
    ],
)
def test_the_judge_finds_what_must_not_be(
    figure: str, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A message lost, given up, sent without its order or sent again without need is a mismatch and exit 1."""
    code, output = verdict(capsys, **changes)
    assert code == 1
    assert f"MISMATCH {figure}:" in output
