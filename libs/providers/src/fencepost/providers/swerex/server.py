"""
One SWE-ReX server, as far as we need it: `execute` and `write_file` over HTTP.

What can come back is an answer of our agent (`Said`), or nothing that says anything (`Silence`). A
status, an empty object or a text that is no answer of the agent proves neither that something was
done nor that it was not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import aiohttp

_KEY_HEADER: Final = "X-API-Key"
_ANSWER_BYTES_MAX: Final = 4 << 20
_WORD_BYTES: Final = 100_000
"""Of one word of a command line, which Linux bounds at 128 KiB."""

Fault: TypeAlias = Literal["timeout", "unreachable", "refused", "unusable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """
    One entry of the pool. `base` is the folder on the server that is ours.

    An address names one server at a time: whoever starts another one there has ended the former.
    """

    name: str
    url: str
    token: str
    base: str = "/var/tmp/fencepost"  # noqa: S108 - on the server
    python: str = "python3"

    @property
    def place(self) -> str:
        """What refs and assignments call it: another address or folder is another place."""
        where = f"{self.url.rstrip('/')}\n{self.base}"
        return f"{self.name}.{hashlib.sha256(where.encode()).hexdigest()[:12]}"

    def __repr__(self) -> str:
        return f"Server({self.name!r}, {self.url!r})"  # the token stays out of logs


@dataclass(frozen=True, slots=True)
class Said:
    """What our agent on the server answered."""

    state: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing was said about the sandbox. `detail` is for people."""

    fault: Fault
    detail: str


class Calls:
    """Calls to servers, on one HTTP session."""

    def __init__(self, http: aiohttp.ClientSession, *, agent: str, timeout_s: float) -> None:
        self._http = http
        self._agent = agent
        self._digest = hashlib.sha256(agent.encode()).hexdigest()[:12]
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def agent(self, server: Server, verb: str, ask: Mapping[str, Any]) -> Said | Silence:
        """Runs one verb of the agent; puts the agent there first where it is missing."""
        answer = await self._verb(server, verb, ask)
        if isinstance(answer, Silence) and answer.fault == "unusable":
            put = await self.write_file(server, self._path(server), self._agent)
            if put is not None:
                return put
            answer = await self._verb(server, verb, ask)
        return answer

    async def write_file(self, server: Server, path: str, content: str) -> Silence | None:
        """Writes a text. None is `200 {}`, which is no receipt: look for what must be there."""
        body = await self._post(server, "write_file", {"path": path, "content": content})
        return body if isinstance(body, Silence) else None

    def _path(self, server: Server) -> str:
        return f"{server.base}/agent-{self._digest}.py"  # another version is another file

    async def _verb(self, server: Server, verb: str, ask: Mapping[str, Any]) -> Said | Silence:
        asked = json.dumps(ask)
        words = [asked[at : at + _WORD_BYTES] for at in range(0, len(asked), _WORD_BYTES)]
        command = [server.python, "-I", self._path(server), server.base, verb, *words]
        body = await self._post(server, "execute", {"command": command, "timeout": 30})
        if isinstance(body, Silence):
            return body
        try:
            line = body["stdout"].strip().rpartition("\n")[2]
            answer = json.loads(line)
            state = answer["state"]
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            said = f"exit {body.get('exit_code')}: {str(body.get('stderr'))[-300:]}"
            return Silence("unusable", said)
        if not isinstance(state, str) or not is_well_formed(state, answer):
            return Silence("unusable", f"no answer of the agent: {line[:200]}")
        return Said(state, answer)

    async def _post(
        self, server: Server, path: str, body: Mapping[str, Any]
    ) -> dict[str, Any] | Silence:
        try:
            async with self._http.post(
                f"{server.url.rstrip('/')}/{path}",
                json=body,
                headers={_KEY_HEADER: server.token},
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                if response.status in (401, 403):
                    return Silence("refused", f"HTTP {response.status}: check the token")
                if response.status != 200:
                    text = (await response.content.read(300)).decode("utf-8", "replace")
                    return Silence("unreachable", f"HTTP {response.status}: {text}")
                raw = await response.content.read(_ANSWER_BYTES_MAX + 1)
                while len(raw) <= _ANSWER_BYTES_MAX:
                    more = await response.content.read(_ANSWER_BYTES_MAX + 1)
                    if not more:
                        break
                    raw += more
        except TimeoutError:
            return Silence("timeout", "no answer within the bound")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # A `ValueError` is what the HTTP library makes of an address that is none.
            return Silence("unreachable", f"{type(error).__name__}: {error}")
        # The server reports an unknown key with 500 or, by its middleware, as text.
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            return Silence("unreachable", "the answer is not JSON")
        if not isinstance(answer, dict):
            return Silence("unreachable", "the answer is not an object")
        return answer


def is_well_formed(state: str, body: Mapping[str, Any]) -> bool:
    """
    Whether an answer has what is read of it.

    A tool runs as the agent's own user on the server, so an answer may be anything.
    """
    match state:
        case "claimed":
            return _is_claim(body.get("claim"))
        case "seen":
            claim, leaving, alive = body.get("claim"), body.get("leaving"), body.get("alive")
            return (
                (claim is None or _is_claim(claim))
                and isinstance(leaving, list)
                and all(_is_claim(one) for one in leaving)
                and isinstance(alive, bool)
            )
        case "other":
            return isinstance(body.get("instance"), str)
        case "pumped":
            return (
                type(body.get("taken")) is int
                and type(body.get("from")) is int
                and isinstance(body.get("data"), str)
            )
    return True


def _is_claim(claim: object) -> bool:
    return (
        isinstance(claim, dict)
        and isinstance(claim.get("instance"), str)
        and isinstance(claim.get("create_id"), str)
        and isinstance(claim.get("labels"), dict)
        and all(isinstance(value, str) for value in claim["labels"].values())
    )
