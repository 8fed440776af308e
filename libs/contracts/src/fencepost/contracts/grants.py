"""
Who may say, hear and ask what: one table, from which users, permissions and accounts are made.

Rule 1: every role has an account of its own, and the streams are in another one. The server does
        not look at the reply subject of a request; within one account its answer (an
        acknowledgement, a stored message read back) would land on any subject, the ledger's
        included. Between accounts an answer can only come back into the asker's own (ADR 11).
Rule 2: a role has what a row gives it. There is no wildcard that is wider than its row.
Rule 3: no role but `operator` may create a stream, and no role at all may update, delete or purge
        the ledger.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec
from fencepost.contracts import streams, subjects

Role = Literal["operator", "mover", "planner", "gateway", "tracker", "sweeper", "client", "admin"]

ROLES: Final[tuple[Role, ...]] = get_args(Role)

ABOUT: Final[dict[Role, str]] = {
    "operator": "creates the streams and buckets, before anything else starts",
    "mover": "moves a ledger that is at rest to another number of shards (`fencepost reshard`)",
    "planner": "the service that runs sandbox shards",
    "gateway": "the service that holds sandboxes",
    "tracker": "the service that runs dag shards, projects the ledger and serves HTTP",
    "sweeper": "the service that compares providers with the ledger",
    "client": "programs that run steps and DAGs",
    "admin": "people: all that a client may, the switch of sweeping, a census, faults",
}

PEOPLE: Final[tuple[Role, ...]] = ("client", "admin")
OWNERS: Final[tuple[Role, ...]] = ("planner", "tracker")

ANSWERS: Final = "_R_.>"
"""Where the server has a request of another account answered."""
INBOXES: Final = "_INBOX.>"
API: Final = "$JS.API"


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """
    A class of subjects and who may use it.

    `stored`: a stream takes it and acknowledges; who is in `hears` hears it from the one in `says`.
    `heard`: core NATS from the one in `says` to each of `hears`.
    `asked`: a request; exactly one role is in `hears`, and answers.
    """

    subject: str
    kind: Literal["stored", "heard", "asked"]
    says: tuple[Role, ...]
    hears: tuple[Role, ...] = ()
    why: str


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What a role does with a stream through the JetStream API, and why."""

    stream: str
    roles: tuple[Role, ...]
    calls: tuple[str, ...]
    why: str


INFO: Final = "STREAM.INFO.{}"
CREATE: Final = "STREAM.CREATE.{}"
GET: Final = "STREAM.MSG.GET.{}"
DIRECT: Final = "DIRECT.GET.{}"
PURGE: Final = "STREAM.PURGE.{}"
FOLLOW: Final = ("CONSUMER.CREATE.{}", "CONSUMER.MSG.NEXT.{}.*", "CONSUMER.DELETE.{}.*")

MANY_ANSWERS: Final = ("DIRECT.GET.", "CONSUMER.MSG.NEXT.")
"""Calls that are answered by more than one message."""

_P: Final = subjects.PREFIX


def _objects(bucket: str, *, says: tuple[Role, ...], why: str) -> tuple[Said, ...]:
    """An object is chunks, and a message that leads to them."""
    return tuple(
        Said(subject=f"$O.{bucket}.{part}.*", kind="stored", says=says, why=why) for part in "CM"
    )


SAID: Final[tuple[Said, ...]] = (
    Said(
        subject=f"{_P}.ledger.sandbox.*",
        kind="stored",
        says=("planner",),
        why="batches of sandbox shards",
    ),
    Said(
        subject=f"{_P}.ledger.dag.*", kind="stored", says=("tracker",), why="batches of dag shards"
    ),
    Said(
        subject=subjects.LEDGER,
        kind="stored",
        says=("mover",),
        why="a whole history into another deployment, and the seal on the former",
    ),
    Said(subject=subjects.COMMANDS, kind="stored", says=PEOPLE, why="commands"),
    Said(
        subject=f"{_P}.cmd.{subjects.DAG_COMMAND}.*.*",
        kind="stored",
        says=("tracker",),
        why="commands that came by HTTP",
    ),
    Said(subject=subjects.FACTS, kind="stored", says=("gateway",), why="what gateways saw"),
    Said(
        subject=f"{_P}.fact.*.stray",
        kind="stored",
        says=("sweeper",),
        why="proposals: a thing that no ledger names",
    ),
    Said(
        subject=f"{_P}.fact.*.orphaned",
        kind="stored",
        says=("sweeper",),
        why="proposals: a holder that is none any more",
    ),
    Said(
        subject=f"{_P}.message.dag.*",
        kind="stored",
        says=("planner",),
        why="messages from sandbox shards to dag shards",
    ),
    Said(
        subject=f"{_P}.message.sandbox.*",
        kind="stored",
        says=("tracker",),
        why="messages from dag shards to sandbox shards",
    ),
    Said(
        subject=f"{_P}.event.step.>",
        kind="stored",
        says=("planner",),
        hears=PEOPLE,
        why="what became of steps",
    ),
    Said(
        subject=f"{_P}.event.sandbox.>",
        kind="stored",
        says=("planner",),
        hears=PEOPLE,
        why="what became of sandboxes",
    ),
    Said(
        subject=f"{_P}.event.dag.>",
        kind="stored",
        says=("tracker",),
        hears=PEOPLE,
        why="what became of DAGs",
    ),
    Said(
        subject=f"{_P}.event.sweep.*",
        kind="stored",
        says=("sweeper",),
        hears=PEOPLE,
        why="what sweeps saw",
    ),
    Said(subject=f"{_P}.release.*", kind="stored", says=("tracker",), hears=PEOPLE, why="verdicts"),
    Said(
        subject=f"$KV.{streams.BUCKET_OWNERS}.sandbox.>",
        kind="stored",
        says=("planner",),
        why="which planner runs which shard",
    ),
    Said(
        subject=f"$KV.{streams.BUCKET_OWNERS}.dag.>",
        kind="stored",
        says=("tracker",),
        why="which tracker runs which shard",
    ),
    Said(
        subject=f"$KV.{streams.BUCKET_OWNERS}.sweep.>",
        kind="stored",
        says=("sweeper",),
        why="which sweeper leads",
    ),
    Said(
        subject=f"$KV.{streams.BUCKET_LEASES}.*",
        kind="stored",
        says=("gateway",),
        why="a gateway's lease",
    ),
    Said(
        subject=f"$KV.{streams.BUCKET_META}.{streams.SWEEP_MODE}",
        kind="stored",
        says=("admin", "mover"),
        why="the switch of sweeping",
    ),
    Said(
        subject=f"$KV.{streams.BUCKET_META}.{streams.MOVING}",
        kind="stored",
        says=("mover",),
        why="that the history which it writes is not whole yet",
    ),
    Said(
        subject=f"$KV.{streams.BUCKET_META}.*",
        kind="stored",
        says=("operator",),
        why="the deployment's id and its number of shards",
    ),
    *_objects(
        streams.OBJECTS_BLOBS,
        says=(*PEOPLE, "gateway", "mover"),
        why="contents above the inline bound",
    ),
    *_objects(streams.OBJECTS_SNAPSHOTS, says=OWNERS, why="snapshots of shards' states"),
    Said(
        subject=subjects.CHUNKS,
        kind="stored",
        says=("gateway", "mover"),
        why="chunks of checkpoints",
    ),
    Said(
        subject=f"{_P}.dispatch.*",
        kind="heard",
        says=("planner",),
        hears=("gateway",),
        why="orders and fenced calls for one gateway session",
    ),
    Said(
        subject=f"{_P}.receipt.*",
        kind="heard",
        says=("gateway",),
        hears=("planner",),
        why="stamped receipts",
    ),
    Said(
        subject=f"{_P}.heartbeat.*",
        kind="heard",
        says=("gateway",),
        hears=("planner",),
        why="toolhosts that re-read their markers",
    ),
    Said(
        subject=subjects.GATEWAY_SEEN,
        kind="heard",
        says=("gateway",),
        hears=("planner", "sweeper"),
        why="a gateway session lives, and what it reaches",
    ),
    Said(
        subject=f"{_P}.now.*",
        kind="asked",
        says=PEOPLE,
        hears=("planner",),
        why="commands that are not stored",
    ),
    Said(
        subject=f"{_P}.ask.*",
        kind="asked",
        says=(*PEOPLE, "sweeper"),
        hears=("planner",),
        why="questions to a sandbox shard's owner",
    ),
    Said(
        subject=f"{_P}.askdag.*",
        kind="asked",
        says=(*PEOPLE, "sweeper"),
        hears=("tracker",),
        why="questions to a dag shard's owner",
    ),
    Said(
        subject=f"{_P}.list.*",
        kind="asked",
        says=("sweeper",),
        hears=("gateway",),
        why="what a gateway's providers list",
    ),
    Said(
        subject=f"{_P}.read.*",
        kind="asked",
        says=PEOPLE,
        hears=("gateway",),
        why="read-only tools",
    ),
    Said(
        subject=f"{_P}.fault.*",
        kind="asked",
        says=("admin",),
        hears=("gateway",),
        why="faults on demand, where a gateway allows them",
    ),
    Said(
        subject=subjects.FAULT_AHEAD,
        kind="asked",
        says=("admin",),
        hears=("gateway",),
        why="faults for a sandbox that is yet to come",
    ),
    Said(
        subject=subjects.SWEEP,
        kind="asked",
        says=("admin",),
        hears=("sweeper",),
        why="one census, now",
    ),
)

LOCAL: Final[tuple[tuple[Role, Literal["publish", "subscribe"], str, str], ...]] = (
    ("tracker", "publish", f"{_P}.askdag.*", "its HTTP API asks the replica that owns a shard"),
    ("tracker", "publish", INBOXES, "answers to its own HTTP API"),
    ("tracker", "subscribe", f"{_P}.event.dag.>", "its HTTP API waits for what became of a DAG"),
    ("tracker", "subscribe", f"{_P}.release.*", "its HTTP API waits for a verdict"),
    *(
        (role, "subscribe", f"{_P}.event.>", "all events at once, of those that come in")
        for role in PEOPLE
    ),
)
"""What stays within one account: between its users, or of what other rows bring into it."""


def stream_name(stream: streams.Stream) -> str:
    """The server's name of a stream, a bucket or an object store."""
    return {"kv": "KV_", "objects": "OBJ_"}.get(stream.kind, "") + stream.name


def every_stream(ledgers: int = 1) -> tuple[str, ...]:
    """The server's names of all that the table has, with a number of ledgers."""
    return tuple(stream_name(stream) for stream in streams.table(ledgers, ledgers=ledgers))


_META: Final = f"KV_{streams.BUCKET_META}"
_OWNERS: Final = f"KV_{streams.BUCKET_OWNERS}"
_BLOBS: Final = f"OBJ_{streams.OBJECTS_BLOBS}"
_SNAPSHOTS: Final = f"OBJ_{streams.OBJECTS_SNAPSHOTS}"

_USES: Final[tuple[Use, ...]] = (
    Use(
        stream=_META,
        roles=("planner", "gateway", "sweeper", *PEOPLE, "operator", "mover"),
        calls=(GET,),
        why="reads the number of shards, and the switch of sweeping",
    ),
    Use(stream=streams.COMMANDS, roles=OWNERS, calls=(INFO, *FOLLOW), why="reads shards' commands"),
    Use(stream=streams.FACTS, roles=("planner",), calls=(INFO, *FOLLOW), why="reads shards' facts"),
    Use(stream=streams.MESSAGES, roles=OWNERS, calls=(INFO, *FOLLOW), why="reads shards' messages"),
    *(
        Use(stream=name, roles=("mover",), calls=(GET,), why="sees that all of it was read")
        for name in (streams.COMMANDS, streams.FACTS, streams.MESSAGES)
    ),
    Use(
        stream=streams.EVENTS,
        roles=PEOPLE,
        calls=(INFO, GET, *FOLLOW),
        why="reads on where it left off",
    ),
    Use(
        stream=_OWNERS,
        roles=(*OWNERS, "sweeper"),
        calls=(DIRECT,),
        why="sees which replicas live",
    ),
    Use(stream=_BLOBS, roles=PEOPLE, calls=(GET,), why="looks whether a content is there"),
    Use(stream=_BLOBS, roles=("gateway", "mover"), calls=(GET, DIRECT), why="fetches contents"),
    Use(
        stream=_SNAPSHOTS,
        roles=OWNERS,
        calls=(GET, DIRECT, PURGE),
        why="fetches snapshots, and drops old ones",
    ),
    Use(
        stream=streams.CHECKPOINTS,
        roles=("mover",),
        calls=(GET, DIRECT),
        why="takes chunks of checkpoints along",
    ),
    Use(
        stream=streams.CHECKPOINTS,
        roles=("gateway",),
        calls=(GET, DIRECT, PURGE),
        why="fetches chunks of checkpoints, and drops those that none needs any more",
    ),
)


def uses(ledgers: int = 1) -> tuple[Use, ...]:
    """What is done with each stream, where the shards are spread over a number of ledgers."""
    every, of_ledger = every_stream(ledgers), streams.ledger_names(ledgers)
    return (
        *(
            Use(
                stream=name,
                roles=("operator",),
                calls=(CREATE, INFO),
                why="creates and compares it",
            )
            for name in every
        ),
        *(
            Use(
                stream=name,
                roles=("mover", "planner", "gateway", "sweeper"),
                calls=(INFO,),
                why="compares it with the table at the start",
            )
            for name in every
        ),
        *(
            Use(
                stream=name,
                roles=(*OWNERS, *PEOPLE, "mover"),
                calls=(INFO, GET, DIRECT),
                why="reads the history",
            )
            for name in of_ledger
        ),
        *(
            Use(stream=name, roles=("tracker",), calls=FOLLOW, why="projects the ledger")
            for name in of_ledger
        ),
        *_USES,
    )


class Grant(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """
    One thing that a role may do.

    `account` is where it is carried out: "" for within the role's own account.
    """

    verb: Literal["publish", "subscribe"]
    subject: str
    account: str = ""
    many: bool = False
    why: str = ""


def account_of(role: Role) -> str:
    """The account that a role's users are in; the operator's is the one that has the streams."""
    return HUB if role == "operator" else f"FENCEPOST_{role.upper()}"


HUB: Final = "FENCEPOST"


def of(role: Role, *, ledgers: int = 1) -> tuple[Grant, ...]:
    """All that a role may publish and subscribe to, each subject once, sorted."""
    found: dict[tuple[str, str], Grant] = {}

    def give(verb: Literal["publish", "subscribe"], subject: str, account: str, why: str) -> None:
        many = subject.startswith(tuple(f"{API}.{call}" for call in MANY_ANSWERS))
        found.setdefault(
            (verb, subject),
            Grant(verb=verb, subject=subject, account=account, many=many, why=why),
        )

    for row in SAID:
        stored = row.kind == "stored"
        if role in row.says:
            place = HUB if stored else ""
            if row.kind == "asked":
                place = account_of(row.hears[0])
            give("publish", row.subject, place, row.why)
        if role in row.hears:
            # A stream takes the message, and hands nothing on to other accounts: who hears it
            # hears whoever says it.
            asked = row.kind == "asked"
            place = "" if asked else account_of(row.says[0])
            give("subscribe", row.subject, place, row.why)
            if asked:
                give("publish", ANSWERS, "", "answers")
    for local, verb, subject, why in LOCAL:
        if local == role:
            give(verb, subject, "", why)
    for use in uses(ledgers):
        if role in use.roles:
            for call in use.calls:
                give("publish", f"{API}.{call.format(use.stream)}", HUB, use.why)
    give("subscribe", INBOXES, "", "answers to what it asks")
    return tuple(sorted(found.values()))


def publishes(role: Role, *, ledgers: int = 1) -> tuple[str, ...]:
    return tuple(grant.subject for grant in of(role, ledgers=ledgers) if grant.verb == "publish")


def subscribes(role: Role) -> tuple[str, ...]:
    return tuple(grant.subject for grant in of(role) if grant.verb == "subscribe")
