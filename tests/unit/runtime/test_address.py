"""Addresses of NATS servers: what they may look like, and that no message shows a password."""

from __future__ import annotations

import pytest
from fencepost.core.errors import RefusedError
from fencepost.runtime import address
from fencepost.runtime.access import Access


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("nats://127.0.0.1:4222", ["nats://127.0.0.1:4222"]),
        ("localhost", ["nats://localhost:4222"]),
        ("a.example:1", ["nats://a.example:1"]),
        ("nats://[::1]:4222", ["nats://[::1]:4222"]),
        ("[fe80::1]", ["nats://[fe80::1]:4222"]),
        ("tls://a", ["tls://a:4222"]),
        ("nats://a:4222,nats://b:4223", ["nats://a:4222", "nats://b:4223"]),
        (" a , tls://b/ ", ["nats://a:4222", "tls://b:4222"]),
    ],
)
def test_one_or_several_servers(text: str, urls: list[str]) -> None:
    found = address.read(text)
    assert found.urls == urls
    assert found.is_encrypted == ("tls" in text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a,,b",
        "nats://",
        "nats://a:0",
        "nats://a:65536",
        "nats://a:99999999999999999999",
        "nats://a:-1",
        "nats://a:nan",
        "nats://a:x",
        "::1",
        "nats://::1:4222",
        "nats://[::1",
        "nats://[a]:1",
        "nats://[127.0.0.1]:1",
        "nats://a b",
        "nats://a/b",
        "nats://a?b",
        "nats://a#b",
        "http://a",
        "ws://a",
        "wss://a",
        "nats://a\n",
        "nats://a\x07",
        "nats://\udcff",
        "nats://" + "a" * 254,
        "a," * 5000,
        "nats://:p@a",
        "nats://u:@a",
        "nats://@a",
        "nats://%ff@a",
        "nats://u:p@a,nats://v:p@b",
    ],
)
def test_anything_else_is_refused_with_the_field(text: str) -> None:
    with pytest.raises(RefusedError, match=r"^FENCEPOST_NATS_URL: expected ") as raised:
        address.require("FENCEPOST_NATS_URL", text)
    assert raised.value.field == "FENCEPOST_NATS_URL"
    assert raised.value.reason == "bad_address"
    str(raised.value).encode()


@pytest.mark.parametrize("value", [None, 4222, b"nats://a", ["nats://a"]])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(RefusedError, match="url: expected "):
        address.require("url", value)


def test_a_user_in_the_address_is_decoded_and_goes_before_a_file() -> None:
    by_file = Access(creds="/a.creds", ca="/ca.pem")
    found = address.read("nats://me:p%40s%2Cs@a,nats://b").whom(by_file)
    assert (found.user, found.password, found.creds, found.ca) == ("me", "p@s,s", "", "/ca.pem")
    assert address.read("nats://s3cret@a").whom(by_file).token == "s3cret"
    assert address.read("nats://a").whom(by_file) is by_file, "the control"


@pytest.mark.parametrize(
    "text",
    [
        "nats://u:s3cret@a:0",
        "nats://u:s3cret,x@a",
        "nats://u:x,s3cret@a",
        "nats://s3cret@a/b",
        "nats://u:s3cret@a,nats://b:0",
        "nats://u:s3cret@a,nats://v:s3cret@b",
    ],
)
def test_no_message_shows_a_password(text: str) -> None:
    with pytest.raises(RefusedError) as raised:
        address.require("url", text)
    assert "s3cret" not in str(raised.value)


def test_what_is_shown_has_no_password() -> None:
    found = address.read("nats://u:s3cret@a,nats://u:s3cret@b")
    assert "s3cret" not in repr(found) + found.shown + "".join(found.urls)
