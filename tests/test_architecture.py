"""The map of the house: who may import whom. Imports only go down; a new room fails until it is placed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import notification_outbox

ROOT = Path(notification_outbox.__file__).parent

# from the ground up; a room may import only rooms above it in this list, and of those only what it names
MAY_IMPORT = {
    # ground: pure values
    "lifecycle": "",
    "exceptions": "lifecycle",
    "addresses": "",
    "hosts": "",
    "envelope": "exceptions",
    "reading": "exceptions",
    "drafts": "envelope exceptions reading",
    "payloads": "exceptions",
    "urls": "addresses exceptions hosts",
    "proxies": "exceptions",
    "signing": "envelope exceptions",
    "explain": "lifecycle",
    # fixtures: tables, settings and signals
    "signals": "",
    "models": "lifecycle",
    "conf": "drafts envelope exceptions hosts lifecycle payloads reading signing",
    # wall: the outside world
    "resolver": "exceptions lifecycle",
    "answers": "exceptions lifecycle",
    "wire": "",
    "connector": "answers exceptions lifecycle proxies resolver urls wire",
    "tls": "exceptions",
    "transport": "answers connector exceptions lifecycle proxies resolver tls urls wire",
    "plugged": "answers exceptions lifecycle transport urls",
    "publishers": "answers conf drafts envelope exceptions lifecycle plugged proxies reading signing tls transport"
    " urls",
    # movers: the only code that moves a message, and counts what came of it
    "transactions": "",
    "tally": "models transactions",
    "leases": "conf envelope lifecycle models tally transactions",
    # steps
    "inserts": "envelope exceptions lifecycle models",
    "outbox": "conf drafts envelope exceptions inserts lifecycle models payloads publishers",
    "delivery": "drafts envelope exceptions lifecycle payloads publishers",
    # services
    "stats": "leases lifecycle models tally",
    "health": "explain lifecycle stats",
    "pinging": "answers conf delivery drafts envelope lifecycle publishers",
    "operations": "conf envelope exceptions leases models pinging stats tally",
    "doctor": "conf stats",
    "finding": "conf drafts exceptions explain leases lifecycle models publishers stats",
    # loop
    "database": "",
    "suspects": "envelope lifecycle",
    "asking": "database",
    "telling": "database leases lifecycle signals",
    "lanes": "conf delivery envelope lifecycle publishers suspects",
    "settling": "asking database envelope leases lifecycle tally",
    "housekeeping": "conf database leases tally",
    "worker": "asking conf database housekeeping lanes leases lifecycle settling signals stats suspects tally"
    " telling",
    # doors
    "checks": "conf drafts exceptions publishers reading",
    "apps": "checks",
    "views": "conf signing",
    "admin": "conf envelope exceptions explain finding health lifecycle models operations stats",
    "management": "conf doctor exceptions explain models operations reading signing worker",
}
GROUND = (
    "lifecycle",
    "exceptions",
    "addresses",
    "hosts",
    "envelope",
    "drafts",
    "payloads",
    "reading",
    "urls",
    "proxies",
    "signing",
    "explain",
)
NOT_ROOMS = {"__init__", "migrations"}


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room not in NOT_ROOMS:
            yield room, path, ast.parse(path.read_text())


def rooms_used(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the package's own rooms that a module imports, however deep in it the import stands."""
    depth = len(path.relative_to(ROOT).parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith(ROOT.name) for alias in node.names), path
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level == depth or (not node.level and name.partition(".")[0] == ROOT.name):
                tail = name.removeprefix(ROOT.name).strip(".")
                yield from [tail.split(".")[0]] if tail else [alias.name for alias in node.names]


def foreign_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_room_is_placed_on_the_map() -> None:
    """A new file fails until somebody decides what it may know."""
    assert {room for room, _, _ in modules()} == set(MAY_IMPORT)


def test_rooms_import_only_what_the_map_allows() -> None:
    """Nothing reaches into a room that the map does not open to it."""
    for room, path, tree in modules():
        for used in rooms_used(path, tree):
            assert used == room or used in MAY_IMPORT[room].split(), f"{path.name} must not import {used}"


def test_the_map_only_goes_down() -> None:
    """Two rooms never know each other."""
    above: set[str] = set()
    for room, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= above, room
        above.add(room)


def test_the_map_names_nothing_that_is_not_used() -> None:
    """A permission nobody needs is taken back."""
    used: dict[str, set[str]] = {}
    for room, path, tree in modules():
        used.setdefault(room, set()).update(rooms_used(path, tree))
    for room, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) == used[room] - {room}, room


def test_the_ground_knows_no_settings_tables_or_sockets() -> None:
    """Pure rooms stay pure: no ORM, no settings, no I/O."""
    banned = ("django.db", "django.conf", "socket", "asyncio", "httptools", "httpx", "ssl")
    for room, path, tree in modules():
        if room in GROUND:
            for name in foreign_imports(tree):
                assert not name.startswith(banned), f"{path.name} imports {name}"


def test_only_conf_reads_django_settings() -> None:
    """Everything else takes values as arguments."""
    for room, path, tree in modules():
        if any(name.startswith("django.conf") for name in foreign_imports(tree)):
            assert room == "conf", path.name


def test_only_movers_and_enqueue_write_the_table() -> None:
    """``leases`` alone moves a message after ``inserts`` stored it, ``tally`` keeps counts: nobody else writes."""
    writes = {"update", "delete", "bulk_create", "bulk_update", "save", "create", "get_or_create", "raw"}
    for room, path, tree in modules():
        if room in ("leases", "inserts", "tally"):
            continue
        imports_models = "models" in rooms_used(path, tree)
        for node in ast.walk(tree):
            if imports_models and isinstance(node, ast.Attribute):
                assert node.attr not in writes, f"{path.name} line {node.lineno}"


@pytest.mark.parametrize("room", ["delivery", "publishers", "transport", "signing"])
def test_what_delivers_never_sees_the_table(room: str) -> None:
    """Publishers and the transport are given messages, not rows."""
    assert not {"models", "leases"} & set(MAY_IMPORT[room].split())
