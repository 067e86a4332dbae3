"""The README says what is so: its settings are those of the code, its commands are those that run."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from django.core.management import get_commands

from notification_outbox import conf
from notification_outbox.exceptions import ConfigurationError
from notification_outbox.publishers import WebhookPublisher

README = (Path(__file__).parent.parent / "README.md").read_text()
SECRETS = [b"a secret key for these tests"]


def table(first: str) -> dict[str, str]:
    """Return key → default of the table whose first column is headed ``first``."""
    after = README.split(f"| {first} | default | meaning |\n|---|---|---|\n")[1]
    rows = itertools.takewhile(lambda line: line.startswith("|"), after.splitlines())
    return {cells[1].strip().strip("`"): cells[2].strip() for cells in (row.split("|") for row in rows)}


def known_keys(raw: dict[str, Any]) -> set[str]:
    """Return the keys that the code says it knows where ``raw`` has one it does not."""
    with pytest.raises(ConfigurationError) as caught:
        conf.read(raw, secrets=SECRETS)
    found = re.search(r"known keys are (.*)", str(caught.value))
    assert found
    return set(found[1].split(", "))


def test_the_settings_tables_name_every_key_and_no_other() -> None:
    """A setting is documented when it is there, and gone when it is not."""
    assert set(table("key")) == known_keys({"?": 1})
    assert set(table("alias key")) == known_keys({"PUBLISHERS": {"x": {"?": 1}}})


@pytest.mark.parametrize("key", [key for key, default in table("key").items() if default.startswith("`")])
def test_documented_defaults_are_the_codes(key: str) -> None:
    """Setting a key to its documented default changes nothing."""
    value = ast.literal_eval(table("key")[key].strip("`"))
    assert plain(conf.read({key: value}, secrets=SECRETS)) == plain(conf.read({}, secrets=SECRETS))


@pytest.mark.parametrize("key", table("alias key"))
def test_documented_defaults_of_an_alias_are_the_codes(key: str) -> None:
    """The same for the keys of a publisher."""
    value = ast.literal_eval(table("alias key")[key].strip("`"))
    said, unsaid = (
        conf.read({"PUBLISHERS": {"x": raw}}, secrets=SECRETS).publishers["x"] for raw in ({key: value}, {})
    )
    assert plain(said) == plain(unsaid)


def plain(settings: Any) -> dict[str, Any]:
    """Return what can be compared of the settings: values, not keys and classes."""
    found = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    comparable = (str, int, float, tuple, frozenset, type(None))
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, comparable) or dataclasses.is_dataclass(value) or name == "give_up_after"
    }


def test_the_webhook_options_are_those_of_the_class() -> None:
    """Names and defaults of the table are the constructor's."""
    options = table("option")
    parameters = inspect.signature(WebhookPublisher).parameters
    assert set(options) == set(parameters)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty:
            assert options[name] == "required"
        else:
            assert ast.literal_eval(options[name].strip("`")) == parameter.default


def test_every_command_is_in_the_readme() -> None:
    """What can be run is told, what is told can be run."""
    ours = {name for name, app in get_commands().items() if app == "notification_outbox"}
    assert set(re.findall(r"manage\.py (\w*outbox\w*)", README)) == ours
