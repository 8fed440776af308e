"""Which contents a call's arguments name."""

import pytest
from fencepost.core.limits import CONTENT_BYTES_MAX
from fencepost.sandbox_gateway import blobs

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (b'{"content": "x"}', []),
        (b'{"content_ref": {"$blob": "%s", "size": 3}}' % A.encode(), [A]),
        (b'[{"x": {"$blob": "%s", "size": 3}}, {"$blob": "%s", "size": 1}]'
         % (A.encode(), B.encode()), [B, A]),
        (b'[{"$blob": "%s", "size": 3}, {"$blob": "%s", "size": 3}]'
         % (A.encode(), A.encode()), [A]),
        (b'{"$blob": "../../etc", "size": 3}', []),
        (b'{"$blob": "%s", "size": true}' % A.encode(), []),
        (b'{"$blob": "%s", "size": %d}' % (A.encode(), CONTENT_BYTES_MAX + 1), []),
        (b'{"$blob": ', []),
    ],
)  # fmt: skip
def test_digests_that_are_named_are_found(args: bytes, found: list[str]) -> None:
    assert blobs.named_in(args) == found
