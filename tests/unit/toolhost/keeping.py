"""A gateway's part in a checkpoint and a restore: a dict of chunks, and no more than that."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from tests.unit.toolhost.driver import WAIT_S, Toolhost

Store = dict[str, bytes]


def split(body: bytes) -> list[str]:
    return [body[at : at + 32].hex() for at in range(0, len(body), 32)]


def put(store: Store, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    store[name] = data
    return name


def put_page(store: Store, page: Any) -> str:
    return put(store, json.dumps(page).encode())


class Keeper:
    """Answers a toolhost's frames from a store; counts what it was sent."""

    def __init__(self, host: Toolhost, store: Store) -> None:
        self.host = host
        self.store = store
        self.chunks = 0
        self.bytes = 0
        self.offered = 0
        self.most_asked = 0

    def ask_checkpoint(self, base: str = "", checkpoint: str = "c1", **more: Any) -> str:
        return self._ask("checkpoint", checkpoint, base=base, **more)

    def ask_restore(self, manifest: str, checkpoint: str = "c1", **more: Any) -> str:
        return self._ask("restore", checkpoint, manifest=manifest, **more)

    def _ask(self, kind: str, checkpoint: str, **more: Any) -> str:
        number = f"j{next(self.host.ids)}"
        head = {"k": kind, "id": number, "checkpoint": checkpoint, "epoch": 7, "session": "A"}
        self.host.send({**head, **more})
        return number

    def answer(self, number: str) -> dict[str, Any] | None:
        """Serves one frame of this job; its last one is returned."""
        head, body = self.host.expect(lambda head: head.get("id") == number, WAIT_S)
        match head["k"]:
            case "offer":
                names = split(body)
                self.offered += len(names)
                wanted = [name for name in names if name not in self.store]
                self.host.send({"k": "want", "id": number}, bytes.fromhex("".join(wanted)))
            case "chunk":
                assert hashlib.sha256(body).hexdigest() == head["digest"]
                self.chunks += 1
                self.bytes += len(body)
                self.store[head["digest"]] = body
            case "need":
                names = split(body)
                self.most_asked = max(self.most_asked, len(names))
                for name in names:
                    self._give(number, name)
            case _:
                return head
        return None

    def _give(self, number: str, name: str) -> None:
        data = self.store.get(name)
        if data is None:
            self.host.send({"k": "chunk_failed", "id": number, "reason": "missing"})
        else:
            self.host.send({"k": "chunk", "id": number, "digest": name}, data)

    def serve(self, number: str) -> dict[str, Any]:
        while True:
            last = self.answer(number)
            if last is not None:
                return last

    def checkpoint(self, base: str = "", **more: Any) -> dict[str, Any]:
        """A checkpoint that is kept, as `checkpointed` tells it."""
        self.chunks = self.bytes = self.offered = 0
        told = self.serve(self.ask_checkpoint(base, **more))
        if told["k"] == "checkpointed":
            self.host.send({"k": "kept", "manifest": told["manifest"]})
        return told

    def restore(self, manifest: str, **more: Any) -> dict[str, Any]:
        return self.serve(self.ask_restore(manifest, **more))


def told_tree(root: Path) -> dict[bytes, Any]:
    """Everything below a folder that a checkpoint keeps, by its path in bytes."""
    found: dict[bytes, Any] = {}
    top = os.fsencode(root)
    for here, dirs, files in os.walk(top):
        for name in [*dirs, *files]:
            path = os.path.join(here, name)
            seen = os.lstat(path)
            short = path[len(top) + 1 :]
            if stat.S_ISLNK(seen.st_mode):
                found[short] = ("link", os.readlink(path))
            elif stat.S_ISDIR(seen.st_mode):
                found[short] = ("dir", stat.S_IMODE(seen.st_mode))
            else:
                with open(path, "rb") as file:
                    data = file.read()
                found[short] = ("file", stat.S_IMODE(seen.st_mode), seen.st_mtime_ns, data)
    return found
