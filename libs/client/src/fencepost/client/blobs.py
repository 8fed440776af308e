"""
Contents above the inline bound: put into the object store under their digest, sent by reference.

The sandbox checks digest and size before it uses one, so a wrong content is never written.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from fencepost.contracts import streams
from fencepost.core import limits
from fencepost.core.errors import RefusedError, RetryLaterError, UnknownError
from fencepost.core.steps import digest_of
from fencepost.runtime.link import Link
from fencepost.runtime.objects import About, Objects

CONTENT_FIELDS: Final = {
    "write_file": ("content", "content_b64", "content_ref"),
    "apply_patch": ("patch", "patch_b64", "patch_ref"),
}
"""Per tool: the field as text, the same as base64, and the reference that may stand for them."""

# Put again while there is ample time before the store lets the content go.
_FRESH: Final = timedelta(milliseconds=limits.COMMANDS_AGE_MS // 3)


async def by_reference(store: Blobs, tool: str, args: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with their content put into the store; unchanged where there is none."""
    names = CONTENT_FIELDS.get(tool)
    if names is None:
        return args
    text, encoded, reference = names
    if type(args.get(text)) is str:
        field, content = text, args[text].encode("utf-8", "surrogateescape")
    elif type(args.get(encoded)) is str:
        field = encoded
        try:
            content = base64.b64decode(args[encoded], validate=True)
        except ValueError as error:
            raise RefusedError(
                "bad_arguments", f"args.{encoded}: {error}", field=f"args.{encoded}"
            ) from error
    else:
        return args
    put = await store.put(content, field=f"args.{field}")
    return {**{key: value for key, value in args.items() if key != field}, reference: put}


class Blobs:
    """The deployment's store of contents."""

    def __init__(self, link: Link) -> None:
        self._objects = Objects(link, streams.OBJECTS_BLOBS)

    async def put(self, content: bytes, *, field: str) -> dict[str, Any]:
        """Stores a content unless it is there, and names it. `field` is for the refusal."""
        if len(content) > limits.CONTENT_BYTES_MAX:
            raise RefusedError(
                "too_large",
                f"{field}: expected at most {limits.CONTENT_BYTES_MAX} bytes, got {len(content)}",
                field=field,
                expected=f"at most {limits.CONTENT_BYTES_MAX} bytes",
            )
        digest = (
            digest_of(content)
            if len(content) < limits.MIB
            else "sha256:" + (await asyncio.to_thread(hashlib.sha256, content)).hexdigest()
        )
        try:
            if not _is_fresh(await self._objects.about(digest)):
                await self._objects.put(digest, content)
        except UnknownError as error:
            raise RetryLaterError(f"{field}: the content could not be stored: {error}") from error
        return {"$blob": digest, "size": len(content)}


def _is_fresh(about: About | None) -> bool:
    if about is None:
        return False
    try:
        stored_at = datetime.fromisoformat(about.mtime)
    except ValueError:
        return False
    return stored_at.tzinfo is not None and datetime.now(UTC) - stored_at < _FRESH
