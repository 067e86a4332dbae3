"""Sealing: what comes back, what does not open, what nobody may read."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notification_outbox.envelope import (
    Binding,
    Content,
    Keyring,
    LookupKey,
    open_sealed,
    seal,
)
from notification_outbox.exceptions import ConfigurationError, Tampered, UnknownKey

KEYRING = Keyring({"new": b"n" * 32, "old": b"o" * 32})
BINDING = Binding(
    publisher="default",
    notification_type="order.paid",
    destination="hooks.acme.com",
    destination_key=uuid.uuid4(),
    caller_scope_id="shop",
    account_id=None,
    signing_scope_id=None,
    idempotency_key="order-7",
    ordering_key="",
    dedup_id=uuid.uuid4(),
    encryption_key_id="new",
)
CONTENT = Content(b'{"a":1}', "application/json", (("X-Shop", "zoe"),), "https://hooks.acme.com/secret")
LOOKUP = LookupKey(b"a lookup secret that never rotates")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(
    body=st.binary(min_size=1, max_size=500),
    content_type=TEXT,
    headers=st.lists(st.tuples(TEXT, TEXT), max_size=4),
    destination=TEXT,
    account_id=st.none() | TEXT,
)
def test_what_was_sealed_comes_back_byte_for_byte(
    body: bytes, content_type: str, headers: list[tuple[str, str]], destination: str, account_id: str | None
) -> None:
    """open(seal(x)) == x for any content and binding."""
    content = Content(body, content_type, tuple(headers), destination)
    binding = BINDING._replace(account_id=account_id)
    assert open_sealed(seal(content, binding, KEYRING), binding, KEYRING) == content


@given(st.data())
def test_any_flipped_bit_of_the_sealed_bytes_is_noticed(data: st.DataObject) -> None:
    """One changed bit anywhere makes the row tampered, or of a version nobody knows."""
    sealed = bytearray(seal(CONTENT, BINDING, KEYRING))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(UnknownKey if place == 0 else Tampered):
        open_sealed(bytes(sealed), BINDING, KEYRING)


@pytest.mark.parametrize("cut", [0, 1, 10, 17, 30])
def test_truncated_bytes_are_tampered(cut: int) -> None:
    """Too short to be an envelope is tampered, never another error."""
    with pytest.raises(Tampered):
        open_sealed(seal(CONTENT, BINDING, KEYRING)[:cut], BINDING, KEYRING)


@pytest.mark.parametrize("name", Binding._fields)
def test_every_bound_column_is_authenticated(name: str) -> None:
    """Changing any clear column of the binding closes the row; another known key's id does too."""
    sealed = seal(CONTENT, BINDING, KEYRING)
    other = uuid.uuid4() if isinstance(getattr(BINDING, name), uuid.UUID) else "old"
    with pytest.raises(Tampered):
        open_sealed(sealed, BINDING._replace(**{name: other}), KEYRING)


def test_no_account_and_the_text_null_are_not_the_same() -> None:
    """The associated data has one spelling for each binding."""
    named = BINDING._replace(account_id="null")
    assert named.associated_data() != BINDING.associated_data()


def test_an_unknown_key_is_named_and_is_not_tampering() -> None:
    """A row under a key this process lacks may become readable with the next deploy."""
    sealed = seal(CONTENT, BINDING, KEYRING)
    with pytest.raises(UnknownKey) as caught:
        open_sealed(sealed, BINDING, Keyring({"old": b"o" * 32}))
    assert caught.value.key_id == "new"


def test_the_first_key_seals_and_all_open() -> None:
    """After a rotation rows of both keys open."""
    before = BINDING._replace(encryption_key_id="old")
    assert KEYRING.current_id == "new"
    assert open_sealed(seal(CONTENT, before, KEYRING), before, KEYRING) == CONTENT


def test_two_seals_of_the_same_content_share_nothing() -> None:
    """A fresh salt gives every row its own key and nonce."""
    first, second = (seal(CONTENT, BINDING, KEYRING) for _ in range(2))
    assert first[1:17] != second[1:17]
    assert first[17:] != second[17:]


def test_keys_derived_from_secrets_have_stable_ids_and_rotate() -> None:
    """With SECRET_KEY moved to the fallbacks, rows sealed before still open under their key's id."""
    before = Keyring.from_secrets(["first secret"])
    after = Keyring.from_secrets(["second secret", "first secret"])
    binding = BINDING._replace(encryption_key_id=before.current_id)
    assert open_sealed(seal(CONTENT, binding, before), binding, after) == CONTENT
    assert after.current_id != before.current_id


def test_a_keyring_needs_a_key() -> None:
    """No key at all is a configuration error."""
    with pytest.raises(ConfigurationError):
        Keyring({})


@given(st.lists(TEXT, min_size=6, max_size=6), st.lists(TEXT, min_size=6, max_size=6))
def test_a_dedup_id_stands_for_exactly_one_binding(mine: list[str], theirs: list[str]) -> None:
    """Equal parts give the equal id, any other part another."""
    names = (
        "caller_scope_id",
        "account_id",
        "publisher",
        "destination",
        "notification_type",
        "idempotency_key",
    )
    first = LOOKUP.dedup_id(**dict(zip(names, mine, strict=True)))  # type: ignore[arg-type]
    second = LOOKUP.dedup_id(**dict(zip(names, theirs, strict=True)))  # type: ignore[arg-type]
    assert (first == second) == (mine == theirs)


def test_names_cannot_be_guessed_without_the_lookup_key() -> None:
    """Another secret gives other names for the same destination and content."""
    other = LookupKey(b"another lookup secret")
    assert LOOKUP.destination_key("a", "topic") != other.destination_key("a", "topic")
    assert LOOKUP.destination_key("a", "topic") != LOOKUP.destination_key("b", "topic")
    assert LOOKUP.content_mac(b"x", "t", ()) != other.content_mac(b"x", "t", ())


def test_the_content_mac_tells_payload_from_headers() -> None:
    """Its first half changes with the payload alone, its second with content type and headers alone."""
    mac = LOOKUP.content_mac(b"x", "t", (("A", "1"),))
    other_payload = LOOKUP.content_mac(b"y", "t", (("A", "1"),))
    other_header = LOOKUP.content_mac(b"x", "t", (("A", "2"),))
    assert (mac[:16] == other_payload[:16], mac[16:] == other_payload[16:]) == (False, True)
    assert (mac[:16] == other_header[:16], mac[16:] == other_header[16:]) == (True, False)


@pytest.mark.parametrize("value", [KEYRING, LOOKUP, BINDING, CONTENT], ids=lambda value: type(value).__name__)
def test_reprs_show_no_content(value: object) -> None:
    """Nothing secret is one log line away."""
    for secret in ("nnnn", "oooo", "secret", "zoe", "acme", "order-7"):
        assert secret not in repr(value)
