"""A private PostgreSQL for the demo and the tests: made, started, shared, repaired and stopped here.

Standard library only. Everything lives under ``home()``, outside the checkout. The server listens on loopback
with a password, has no socket file, and trades durability for speed: what it holds is made anew by every
command.

Several commands share one server. Each holds a shared lock on ``users`` for as long as it runs, and the last
one to leave stops the server. A command that was killed leaves it running; the next one takes it over. Where
``postmaster.pid`` and the listening port disagree about whether the server lives, the port is right.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from postgres_binaries import Binaries, PrivatePostgresError, find_binaries

UNPRIVILEGED_USER = "nobody"  # PostgreSQL refuses to run as root
TUNING = "-c fsync=off -c synchronous_commit=off -c full_page_writes=off -c max_connections=200"
START_ATTEMPTS = 5


def home() -> Path:
    """Return the directory that holds everything: ``OUTBOX_PG_HOME``, or one named by uid in the temp dir."""
    if chosen := os.environ.get("OUTBOX_PG_HOME"):
        return Path(chosen).absolute()
    candidates = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]  # noqa: S108 - checked by owner
    usable = [path.resolve() for path in candidates if os.geteuid() or _anyone_may_enter(path.resolve())]
    if not usable:
        raise PrivatePostgresError("no temporary directory is open to other users; set OUTBOX_PG_HOME")
    return usable[0] / f"outbox-postgres-{os.geteuid()}"


@contextmanager
def shared(announce: Callable[[str], None] = lambda line: None) -> Iterator[Server]:
    """Use the server for the length of the block, starting it when nobody did; the last one out stops it."""
    server = Server(home(), find_binaries())
    with server.users.open("a") as users:
        with server.exclusively():
            fcntl.flock(users, fcntl.LOCK_SH)
            server.start(announce)
        server.user_fd = users.fileno()
        try:
            yield server
        finally:
            with server.exclusively(), suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                server.stop()


@contextmanager
def own(announce: Callable[[str], None], port: int) -> Iterator[Server]:
    """Make a server on ``port`` for one user, who may stop and start it; remove it in the end."""
    _own_directory(home())
    base = Path(tempfile.mkdtemp(prefix="own-", dir=home()))
    # what was committed outlives a kill of the server, though not of the machine
    server = Server(base, find_binaries(), port=port, tuning=f"{TUNING} -c synchronous_commit=on")
    try:
        server.start(announce)
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(base)


class Server:
    """One cluster under ``directory``, one per major version; without a ``port``, each start takes a free one.
    Raises ``PrivatePostgresError``.

    ``user_fd`` is the descriptor that marks a user: a child that inherits it keeps the server up even when
    its parent was killed.
    """

    def __init__(
        self, base: Path, binaries: Binaries, *, port: int | None = None, tuning: str = TUNING
    ) -> None:
        _own_directory(base)
        self.directory = base / str(binaries.major)
        _own_directory(self.directory)
        self.binaries = binaries
        self.port = port
        self.tuning = tuning
        self.user_fd = -1
        self.users = self.directory / "users"
        self.run = self.directory / "run"
        self.data = self.run / "data"
        self.password = self.run / "password"
        self.log = self.run / "log"
        self.identity: dict[str, object] = {}
        if os.geteuid() == 0:
            account = pwd.getpwnam(UNPRIVILEGED_USER)
            self.identity = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep every other starter and stopper out for the length of the block."""
        with (self.directory / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def url(self, database: str) -> str:
        return f"postgres://postgres:{self.password.read_text()}@127.0.0.1:{self._port()}/{database}"

    def start(self, announce: Callable[[str], None]) -> None:
        """Start the server unless it runs. Call it ``exclusively()``."""
        began = time.monotonic()
        if self.identity:
            self.binaries = self.binaries.copied_to(self.directory)  # the checkout may be closed to others
        if self._alive():
            return
        self._initialise()
        for attempt in range(1, START_ATTEMPTS + 1):
            options = f"-c listen_addresses=127.0.0.1 -p {self.port or _free_port()} -k '' {self.tuning}"
            started = self._run("pg_ctl", "-D", self.data, "-w", "-l", self.log, "-o", options, "start")
            if started.returncode == 0:
                break
            # After a kill -9 the dead server's children hold its shared memory for a moment longer; and
            # somebody may have taken the free port.
            if attempt == START_ATTEMPTS:
                tail = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else started.stdout
                raise PrivatePostgresError(f"the private PostgreSQL does not start:\n{tail}")
            time.sleep(0.3)
        took = time.monotonic() - began
        announce(f"private PostgreSQL {self.binaries.version} started in {took:.1f} s")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server, ending the sessions it has. Call it ``exclusively()``."""
        self._run("pg_ctl", "-D", self.data, "-m", mode, "-w", "stop")

    def _alive(self) -> bool:
        """Tell whether our server answers, and clear away what a killed one left.

        A process id alone proves nothing: it lives on as a zombie where nobody reaps, and is used again.
        A server on its way down listens no more but still has its process, so it is given a moment to go.
        """
        deadline = time.monotonic() + 5
        while self._run("pg_ctl", "-D", self.data, "status").returncode == 0:
            if self._listens():
                return True
            if time.monotonic() > deadline or self._is_zombie():
                (self.data / "postmaster.pid").unlink(missing_ok=True)
                return False
            time.sleep(0.1)
        return False

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port()), timeout=1).close()
        except (OSError, IndexError, ValueError):
            return False
        return True

    def _is_zombie(self) -> bool:
        try:
            return bool(
                re.search(r"^State:\s+Z", Path(f"/proc/{self.pid()}/status").read_text(), re.MULTILINE)
            )
        except (OSError, IndexError, ValueError):
            return False

    def pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def _port(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[3])

    def _initialise(self) -> None:
        """Make the cluster once. It appears under its name only when complete: initdb may be killed."""
        if self.data.exists():
            return
        shutil.rmtree(self.run, ignore_errors=True)
        self.run.mkdir(mode=0o700)
        self.password.touch(mode=0o600)
        self.password.write_text(secrets.token_hex(16))
        if self.identity:
            for path in (self.run, self.password):
                os.chown(path, self.identity["user"], self.identity["group"])
        unfinished = self.run / "unfinished"
        locale = ["--locale=C"]
        if self.binaries.major >= 17:
            locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        secured = ["-U", "postgres", "-A", "scram-sha-256", "--pwfile", self.password]
        made = self._run(
            "initdb", "-D", unfinished, *secured, "-E", "UTF8", *locale, "--no-sync", "--no-instructions"
        )
        if made.returncode:
            raise PrivatePostgresError(f"the private PostgreSQL cannot be made:\n{made.stdout}")
        unfinished.rename(self.data)

    def _run(self, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run one of the binaries as the unprivileged user. The server it may start keeps no pipe of ours."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        command = [str(self.binaries.bin / name), *map(str, arguments)]
        with tempfile.TemporaryFile("w+") as output:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self.directory,
                    env={**environment, "LC_ALL": "C"},  # macOS: a postmaster without LC_ALL refuses to start
                    check=False,
                    **self.identity,
                )
            except OSError as problem:
                raise PrivatePostgresError(
                    f"cannot run PostgreSQL's {name} ({problem.strerror}); "
                    f"set OUTBOX_PG_HOME to a directory where {UNPRIVILEGED_USER} may run programs"
                ) from problem
            output.seek(0)
            return subprocess.CompletedProcess(command, done.returncode, stdout=output.read())


def _own_directory(path: Path) -> None:
    """Make the directory, or accept one that is ours alone to write: its name is easy to guess."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o711, parents=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PrivatePostgresError(
            f"{path} belongs to somebody else: remove it, or set OUTBOX_PG_HOME to another directory"
        )
    path.chmod(0o711)  # whatever the umask: the unprivileged user passes through, and may not look around


def _anyone_may_enter(path: Path) -> bool:
    return path.is_dir() and all(place.stat().st_mode & stat.S_IXOTH for place in (path, *path.parents))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
