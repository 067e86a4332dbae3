"""What every bench measures with: times, medians of contestants that play in turns, ratios and their bars."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

ROUNDS = 7


class Bar(NamedTuple):
    """What a ratio is held to: ``at most`` or ``at least`` so much."""

    sense: str
    value: float

    def held(self, ratio: float) -> bool:
        return ratio <= self.value if self.sense == "at most" else ratio >= self.value

    def __str__(self) -> str:
        return f"{self.sense} {self.value:g}"


class Result(NamedTuple):
    """A bench's ratios and the bars that some of them are held to."""

    ratios: dict[str, float]
    bars: dict[str, Bar]

    @property
    def ok(self) -> bool:
        return all(bar.held(self.ratios[name]) for name, bar in self.bars.items())


def cpu(work: Callable[[], object]) -> float:
    """Return the seconds of CPU that this process spends on the work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def wall(work: Callable[[], object]) -> float:
    """Return the seconds that the work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(
    contestants: dict[str, Callable[[], object]],
    measure: Callable[[Callable[[], object]], float] = cpu,
    rounds: int = ROUNDS,
) -> dict[str, float]:
    """Let the contestants play in turns; return each one's median. The first round only warms up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, work in contestants.items():
            spent = measure(work)
            if round_:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}
