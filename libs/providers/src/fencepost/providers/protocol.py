"""
What every runtime that holds sandboxes must answer, and in which words.

Rule 1: an answer is about one ref, instance included; the same name elsewhere is another sandbox.
Rule 2: nothing here raises for what a provider says. A fault of the way to it is `unknown`,
`timeout` or `unreachable`, and is never turned into an absence.
Rule 3: asking starts nothing: `observe`, `find` and `list` never create, resume or restart.

No runtime returns its generation with a write, so receipts come from the toolhost behind
`channel`, never from these answers.

A provider behind HTTP answers so; `tests/integration/sandbox_gateway/http_provider.py` does, and
`test_stop_faults.py` shows what becomes of each:

| it said to `stop`                             | `StopAnswer`                                   |
|-----------------------------------------------|------------------------------------------------|
| 2xx about this id and this instance           | accepted (202 too: neither one is gone)        |
| 2xx about this id and another instance        | refused_other_instance                         |
| 2xx about another id, or about none           | unreachable: nothing was said about this one   |
| 404, 410                                      | not_found                                      |
| 401, 403                                      | refused: the way in failed, never an absence   |
| 429                                           | refused, `retry_after_ms` from Retry-After     |
| 405, 501                                      | unsupported                                    |
| 3xx, 409 and every other 4xx                  | refused                                        |
| 5xx                                           | unreachable: it may have done it, or part      |
| nothing within the provider's own bound       | timeout                                        |
| no connection, or one that broke              | unreachable                                    |
| no address is configured: nothing was sent    | unconfigured                                   |

| it said to `observe`                          | `Observation`                                  |
|-----------------------------------------------|------------------------------------------------|
| 200, this id and instance, running            | present                                        |
| 200, this id and instance, on its way out     | terminating                                    |
| 200, this id and another instance             | gone: that instance never comes back           |
| 404, 410, and a create once gave this id      | gone                                           |
| anything else, and no answer                  | unknown                                        |

`find` likewise: 200 about this create id is `Created`, 404 `Absent`, anything else `Unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from fencepost.core.facts import Capabilities, Ref
from fencepost.core.steps import SandboxSpec

StopWord: TypeAlias = Literal[
    "accepted",
    "refused",
    "not_found",
    "refused_other_instance",
    "timeout",
    "unreachable",
    "unconfigured",
    "unsupported",
]
Presence: TypeAlias = Literal["present", "terminating", "gone", "unknown"]

LABEL_DEPLOYMENT = "deployment"
LABEL_DAG = "dag"
LABEL_SLOT = "slot"
LABEL_ACQUISITION = "acquisition"
LABEL_CREATE = "create_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The sandbox of this create id exists, made now or before."""

    ref: Ref
    capabilities: Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRefused:
    """Nothing was made under this create id, and nothing of it is left."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateAmbiguous:
    """Sent, and no answer: it may exist. `find`, or the same create again, settles it."""

    reason: str


CreateAnswer: TypeAlias = Created | CreateRefused | CreateAmbiguous


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """The provider was read, whole, and has nothing under this create id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """The read proves neither presence nor absence."""

    reason: str


FindAnswer: TypeAlias = Created | Absent | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAnswer:
    """
    A signal about a request, not about a sandbox: `accepted` is not `gone`.

    `instance` is the one that was acted upon or met, "" where none was. `retry_after_ms` is how
    long the provider asks not to be asked again.
    """

    answer: StopWord
    instance: str = ""
    detail: str = ""
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """`instance`: the one that was seen, which for `present` is the one that was asked about."""

    state: Presence
    instance: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    ref: Ref
    labels: Mapping[str, str]
    state: Literal["present", "terminating"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of a list. Only a list whose last page is `complete` says what is absent."""

    items: tuple[Listed, ...]
    complete: bool
    next_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """
    The provider, or whoever minds its machine, will take this instance away.

    `grace_ms` from when it was announced, 0 where nobody said how long. A notice proves nothing:
    the instance lives until it is observed gone, and may outlive its notice.
    """

    ref: Ref
    grace_ms: int = 0
    detail: str = ""


class ChannelRefusedError(Exception):
    """
    No toolhost could be started in that sandbox. `observed` is the provider's word on it.

    `ended`: that instance is over for good and its remains are still there: only a stop makes it
    gone, so that another one can be made in its place.
    """

    def __init__(self, reason: str, observed: Presence, *, ended: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.observed: Presence = observed
        self.ended = ended


class Channel(Protocol):
    """
    A duplex byte stream to one toolhost. Callbacks run on the event loop, never concurrently.

    `on_end` is called once, with a short reason, however the stream ends, `kill` included.
    """

    def start(self, on_data: Callable[[bytes], None], on_end: Callable[[str], None]) -> None: ...

    def write(self, data: bytes) -> None:
        """Never blocks and never raises: bytes for an ended stream are dropped."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes that were written and not yet taken by the other side's kernel."""

    async def drain(self) -> None:
        """Waits until little is buffered, or the stream has ended."""

    async def end(self, *, grace_s: float = 1.0) -> None:
        """Ends the toolhost and its tools: asked first, killed after `grace_s`, then waited for."""

    def last_words(self) -> str:
        """How the toolhost ended, for people: no evidence of anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderTraits:
    """How far a provider's answers reach; what the control plane may conclude from them."""

    name: str
    authority: str
    instance: Literal["native", "marker"]
    stop: Literal["sync", "async"]
    list: Literal["complete", "paged"]
    auto_resume: bool
    snapshot: bool
    settles_creates: bool
    capabilities: Capabilities = field(default_factory=Capabilities)

    def names(self, ref: Ref) -> bool:
        """Whether this ref was given by this provider, at this authority."""
        return ref.provider == self.name and ref.authority == self.authority


def stop_refusal(ref: Ref, expect_instance: str, *, is_ours: bool) -> StopAnswer | None:
    """What is wrong with a stop before anybody is asked (rule 1), or None."""
    if not is_ours:
        return StopAnswer(answer="unconfigured", detail="another authority")
    if expect_instance == "" or expect_instance != ref.instance:
        return StopAnswer(answer="refused", detail="a stop must name the ref's instance")
    return None


class Provider(Protocol):
    @property
    def traits(self) -> ProviderTraits: ...

    async def create(
        self, create_id: str, spec: SandboxSpec, labels: Mapping[str, str]
    ) -> CreateAnswer:
        """Makes, or finds again, the sandbox of `create_id`. The spec of the first call stands."""

    async def find(self, create_id: str) -> FindAnswer: ...

    async def list(self, token: str = "") -> Page:
        """Lists this deployment's sandboxes, those on their way out included."""

    async def channel(self, ref: Ref, spec: SandboxSpec) -> Channel:
        """Starts a toolhost in exactly this instance. Raises `ChannelRefusedError`."""

    async def stop(self, ref: Ref, expect_instance: str) -> StopAnswer:
        """Ends the instance and everything in it. An empty `expect_instance` is refused."""

    async def settle(self, create_id: str) -> bool:
        """
        Promises that no later create under this id makes anything.

        False where the provider cannot promise it; then only its declared horizon does.
        """

    async def observe(self, ref: Ref) -> Observation: ...

    async def notices(self, refs: Collection[Ref]) -> Sequence[Notice]:
        """
        What of these is announced to go. Asked again and again, from before there is any: cheap.

        What cannot be read is not announced: a checkpoint is missed, and nothing is concluded.
        """

    async def reclaim(self, ref: Ref) -> bool:
        """
        Takes the sandbox away as a preemption would: kill -9, disk included, telling nobody.

        Fault injection only. False where there was nothing to take.
        """
