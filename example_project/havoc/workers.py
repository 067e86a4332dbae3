"""Worker processes that are killed and started again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from stage import start, tail

WORKER = ["manage.py", "run_outbox_worker"]
STARTING = 10  # seconds in which a worker may not know of signals yet
PATIENCE = 40  # seconds for a graceful stop; a worker gives its deliveries 30


class Crew:
    """``with Crew(size, folder, dice) as crew:`` keeps so many workers running; none outlives the block.

    ``kills`` counts those we killed, ``deserted`` those that ended otherwise, which none should.
    """

    def __init__(self, size: int, folder: Path, dice: random.Random) -> None:
        self.kills = self.deserted = 0
        self._logs = [folder / f"worker-{n}.log" for n in range(size)]
        self._dice = dice
        self._running: dict[Path, subprocess.Popen[bytes]] = {}
        self._started: dict[Path, float] = {}
        self._start_at = dict.fromkeys(self._logs, 0.0)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._running.values():
            worker.kill()
        for worker in self._running.values():
            worker.wait()

    def keep(self) -> None:
        """Start those whose time has come, and notice those that ended by themselves."""
        for log, worker in list(self._running.items()):
            if worker.poll() is not None:
                self._desert(log, worker)
        for log, moment in list(self._start_at.items()):
            if time.monotonic() >= moment:
                del self._start_at[log]
                self._running[log] = start(WORKER, log)
                self._started[log] = time.monotonic()

    def kill_one(self) -> int | None:
        """Kill one of those that run, to be started again in a moment; return its process id."""
        if not self._running:
            return None
        log = self._dice.choice(sorted(self._running))
        worker = self._running.pop(log)
        worker.kill()
        if worker.wait() != -signal.SIGKILL:
            self._desert(log, worker)
            return None
        self.kills += 1
        self._start_at[log] = time.monotonic() + self._dice.uniform(0, 2)
        return worker.pid

    def dismiss(self) -> None:
        """Have all end as an operator would; one that ends otherwise has deserted."""
        for worker in self._running.values():
            worker.terminate()
        deadline = time.monotonic() + PATIENCE
        for log, worker in list(self._running.items()):
            try:
                code = worker.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                worker.kill()
                code = worker.wait()
            starting = time.monotonic() - self._started[log] < STARTING
            if code and not (starting and code == -signal.SIGTERM):
                self._desert(log, worker)
        self._running.clear()

    def _desert(self, log: Path, worker: subprocess.Popen[bytes]) -> None:
        self._running.pop(log, None)
        self._start_at[log] = time.monotonic() + 1
        self.deserted += 1
        print(f"a worker ended with {worker.returncode}; its log:\n{tail(log)}", file=sys.stderr, flush=True)
