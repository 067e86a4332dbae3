"""How one raw value of a settings dict becomes a checked one.

Pure, and knows no key by name: ``conf`` says which keys there are. A reader is a function from the raw value to
the checked one that raises ``BadValue`` saying what was expected; the value itself is never repeated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

from django.utils.module_loading import import_string

from .exceptions import ConfigurationError

T = TypeVar("T")
EMPTY: Mapping[str, Any] = MappingProxyType({})


class Section:
    """One dict of settings being read: keys are taken one by one, what is left over is unknown."""

    def __init__(self, path: str, raw: object) -> None:
        if not isinstance(raw, Mapping):
            raise ConfigurationError(f"{path}: expected a dict")
        self.path = path
        self.raw = dict(raw)
        self.known: list[str] = []

    def take(self, key: str, read: Callable[[object], T], default: T) -> T:
        self.known.append(key)
        if key not in self.raw:
            return default
        problem = None
        try:
            return read(self.raw.pop(key))
        except BadValue as bad:
            problem = str(bad)
        raise ConfigurationError(f"{self.path}['{key}']: expected {problem}")

    def close(self) -> None:
        for key in self.raw:
            raise ConfigurationError(
                f"{self.path}: unknown key {key!r}{suggestion(str(key), self.known)}; "
                f"known keys are {', '.join(sorted(self.known))}"
            )


class BadValue(Exception):
    """A value breaks its rule; the text says what was expected."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` when one of ``known`` is close to ``name``."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)\Z")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPOKEN = ((86400, "d"), (3600, "h"), (60, "min"))


def spoken(seconds: float) -> str:
    """Return a length of time as people say it: ``"0 s"``, ``"15 min"``, ``"366 d"``."""
    for unit, name in _SPOKEN:
        if seconds and seconds % unit == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def duration(low: float, high: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        seconds: float | None = None
        if isinstance(value, timedelta):
            seconds = value.total_seconds()
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= high:
            seconds = float(value)
        elif isinstance(value, str) and (match := _DURATION.match(value)):
            seconds = float(match[1]) * _UNITS[match[2]]
        if seconds is None or not low <= seconds <= high:
            raise BadValue(
                f"{spoken(low)} to {spoken(high)}, as seconds, a timedelta or text like "
                '"90s", "15m", "4h", "3d"'
            )
        return seconds

    return read


def integer(low: int, high: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadValue(f"a whole number from {low} to {high}")
        return value

    return read


def number(low: float, high: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise BadValue(f"a number from {low:g} to {high:g}")
        return float(value)

    return read


def optional(read: Callable[[object], T]) -> Callable[[object], T | None]:
    def read_optional(value: object) -> T | None:
        return None if value is None else read(value)

    return read_optional


def text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise BadValue("text that is not empty")
    return value


def choice(*choices: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in choices:
            raise BadValue(f"one of {', '.join(map(repr, choices))}")
        return str(value)

    return read


def mapping(example: str) -> Callable[[object], Mapping[str, Any]]:
    def read(value: object) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise BadValue(f"a dict such as {example}")
        return MappingProxyType(dict(value))

    return read


def texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise BadValue('a list of texts such as ["default"]')
    return tuple(map(text, value))


def dotted(expected: str) -> Callable[[object], Callable[..., Any]]:
    """Return a reader of callables and of their dotted paths."""

    def read(value: object) -> Callable[..., Any]:
        found, problem = value, expected
        if isinstance(value, str):
            try:
                found = import_string(value)
            except (ImportError, ValueError):
                found = None
            except Exception as error:
                # the module runs as it is imported, so anything may be raised
                found, problem = None, f"{expected}; importing it raised {type(error).__name__}"
        if not callable(found):
            raise BadValue(problem)
        return found

    return read


def option_seconds(option: str, value: object) -> float:
    """Return a duration of 0.1 s to an hour given to a class as ``option``. Raises ``ConfigurationError``."""
    try:
        return duration(0.1, 3600)(value)
    except BadValue as bad:
        problem = str(bad)
    raise ConfigurationError(f"option {option!r}: expected {problem}")
