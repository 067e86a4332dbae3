"""Whatever is passed for whatever argument: accepted, or refused by our own errors, and nothing half done."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notification_outbox import InvalidMessage, OutboxError, enqueue
from notification_outbox.exceptions import ConfigurationError
from notification_outbox.models import OutboxMessage

ARGUMENTS = """notification_type payload to publisher idempotency_key caller_scope_id account_id signing_scope_id
ordering_key headers content_type delay available_at give_up_after on_invalid""".split()
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.decimals(),
    st.text(max_size=300),
    st.binary(max_size=300),
    st.uuids(),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(
        st.none() | st.integers() | st.text(max_size=5), st.floats() | st.text(max_size=5), max_size=3
    ),
    st.datetimes(),
    st.datetimes(timezones=st.timezones()),
    st.timedeltas(),
    st.just(object()),
    st.just("\ud800"),
    st.just("a\0b"),
    st.just("https://hooks.acme.com/\ud800"),
)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("on_invalid", ["raise", "quarantine"])
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(changes=st.dictionaries(st.sampled_from(ARGUMENTS), JUNK, max_size=4))
def test_any_argument_is_stored_or_refused_by_our_own_errors(
    on_invalid: str, changes: dict[str, Any]
) -> None:
    """A refusal inserts nothing, leaves the transaction usable and carries no other library's error."""
    call: dict[str, Any] = {"notification_type": "t", "payload": {}, "to": "https://hooks.acme.com/x"}
    call |= {"on_invalid": on_invalid} | changes
    notification_type, payload = call.pop("notification_type"), call.pop("payload")
    with transaction.atomic():
        stored = 0
        try:
            enqueue(notification_type, payload, **call)
            stored = 1
        except (InvalidMessage, ConfigurationError) as error:
            foreign = error.__context__
        else:
            foreign = None
        assert foreign is None or isinstance(foreign, OutboxError)
        assert OutboxMessage.objects.count() == stored
        transaction.set_rollback(True)
