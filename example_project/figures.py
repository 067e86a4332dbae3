"""A table of figures, some of which must come to an exact value."""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """One counted thing. ``wanted`` is exact, or the least when ``or_more``; None is only told."""

    name: str
    found: object
    wanted: object = None
    or_more: bool = False
    note: str = ""

    @property
    def right(self) -> bool:
        if self.wanted is None:
            return True
        return self.found >= self.wanted if self.or_more else self.found == self.wanted  # type: ignore[operator]


class Figures:
    """A table, filled as the run goes."""

    def __init__(self) -> None:
        self.rows: list[Figure] = []

    def add(
        self, name: str, found: object, wanted: object = None, *, or_more: bool = False, note: str = ""
    ) -> None:
        self.rows.append(Figure(name, found, wanted, or_more, note))

    def show(self) -> None:
        width = max(len(row.name) for row in self.rows)
        print()
        for row in self.rows:
            print(f"  {row.name:<{width}}  {row.found!s:>5}  {row.note}".rstrip())

    def verdict(self) -> int:
        """Print each figure that is wrong; return 1 when there is one, else 0."""
        wrong = [row for row in self.rows if not row.right]
        for row in wrong:
            least = "at least " if row.or_more else ""
            print(f"MISMATCH {row.name.strip()}: {row.found}, should be {least}{row.wanted}")
        print("a figure is wrong" if wrong else "every figure is right")
        return 1 if wrong else 0
