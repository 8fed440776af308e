-- The projection of both families. Everything here can be made again from the ledger.
-- Times are milliseconds of ledger time, sequences are the ledger's. Text is compared by bytes, so
-- that a page's order and a dump's are the same on every server.

CREATE TABLE projection_ledger (
    one         boolean PRIMARY KEY DEFAULT true CHECK (one),
    incarnation text    NOT NULL,
    shards      integer NOT NULL,
    version     integer NOT NULL
);
COMMENT ON TABLE projection_ledger IS 'which ledger this is a projection of, and by which version';

CREATE TABLE projection_position (
    family text    COLLATE "C",
    shard  integer,
    seq    bigint  NOT NULL,
    PRIMARY KEY (family, shard)
);
COMMENT ON TABLE projection_position IS 'the last batch of each shard that is in the tables below';

CREATE TABLE sandboxes (
    sandbox       text COLLATE "C" PRIMARY KEY,
    shard         integer NOT NULL,
    state         text    NOT NULL,
    provider      text    NOT NULL,
    image         text    NOT NULL,
    network       boolean NOT NULL,
    memory_mb     bigint  NOT NULL,
    processes     bigint  NOT NULL,
    rebuild       boolean NOT NULL,
    authority     text    NOT NULL,
    native_id     text    NOT NULL,
    ref_instance  text    NOT NULL,
    has_ref       boolean NOT NULL,
    creates       text    NOT NULL,
    epoch         bigint  NOT NULL,
    is_open       boolean NOT NULL,
    instance      text    NOT NULL,
    session       text    NOT NULL,
    gateway       text    NOT NULL,
    journal_seq   bigint  NOT NULL,
    is_condemned  boolean NOT NULL,
    is_releasing  boolean NOT NULL,
    is_gone       boolean NOT NULL,
    reason        text    NOT NULL,
    stop_answer   text    NOT NULL,
    steps_committed     bigint NOT NULL,
    steps_compensated   bigint NOT NULL,
    commands_refused    bigint NOT NULL,
    steps_owed          bigint NOT NULL,
    created_at_ms bigint NOT NULL,
    created_seq   bigint NOT NULL,
    changed_at_ms bigint NOT NULL,
    changed_seq   bigint NOT NULL
);

CREATE TABLE epochs (
    sandbox       text COLLATE "C",
    epoch         bigint,
    disk          text   NOT NULL,
    evidence      text   NOT NULL,
    owed          bigint NOT NULL,
    instance      text   NOT NULL,
    session       text   NOT NULL,
    gateway       text   NOT NULL,
    opened_at_ms  bigint NOT NULL,
    opened_seq    bigint NOT NULL,
    attached_at_ms bigint,
    closed_at_ms  bigint,
    closed_reason   text NOT NULL,
    closed_evidence text NOT NULL,
    PRIMARY KEY (sandbox, epoch)
);

CREATE TABLE steps (
    sandbox        text COLLATE "C",
    step           text COLLATE "C",
    shard          integer NOT NULL,
    state          text    NOT NULL,
    tool           text    NOT NULL,
    digest         text    NOT NULL,
    effect         text    NOT NULL,
    on_moved_epoch text    NOT NULL,
    attempts_max   bigint  NOT NULL,
    deadline_at_ms bigint  NOT NULL,
    attempt        text    NOT NULL,
    ordinal        bigint  NOT NULL,
    tries          bigint  NOT NULL,
    epoch          bigint  NOT NULL,
    is_cancelled   boolean NOT NULL,
    reason         text    NOT NULL,
    detail         text    NOT NULL,
    evidence       text    NOT NULL,
    outcome        text    NOT NULL,
    result         bytea,
    result_bytes   bigint  NOT NULL,
    journal_seq    bigint  NOT NULL,
    resolved_by    text    NOT NULL,
    resolved_note  text    NOT NULL,
    admitted_at_ms bigint  NOT NULL,
    admitted_seq   bigint  NOT NULL,
    ended_at_ms    bigint,
    ended_seq      bigint,
    ended_index    bigint,
    PRIMARY KEY (sandbox, step)
);
COMMENT ON COLUMN steps.result IS 'the JSON that the tool answered, byte for byte; NULL above the inline bound';

CREATE TABLE attempts (
    sandbox      text COLLATE "C",
    step         text COLLATE "C",
    admitted_seq bigint,
    ordinal      bigint,
    attempt      text   NOT NULL,
    state        text   NOT NULL,
    direction    text   NOT NULL,
    no           bigint NOT NULL,
    epoch        bigint NOT NULL,
    session      text   NOT NULL,
    of           text   NOT NULL,
    reason       text   NOT NULL,
    detail       text   NOT NULL,
    error        text   NOT NULL,
    evidence     text   NOT NULL,
    journal      text   NOT NULL,
    made_at_ms   bigint NOT NULL,
    fenced_at_ms bigint,
    ended_at_ms  bigint,
    PRIMARY KEY (sandbox, step, admitted_seq, ordinal)
);
COMMENT ON COLUMN attempts.admitted_seq IS 'of the step: an id may come again once it left the window of duplicates';

CREATE TABLE refusals (
    shard     integer,
    seq       bigint,
    index     bigint,
    kind      text   NOT NULL,
    sandbox   text   COLLATE "C" NOT NULL,
    step      text   COLLATE "C" NOT NULL,
    command   text   NOT NULL,
    attempt   text   NOT NULL,
    reason    text   NOT NULL,
    field     text   NOT NULL,
    detail    text   NOT NULL,
    direction text   NOT NULL,
    verdict   text   NOT NULL,
    epoch     bigint NOT NULL,
    session   text   NOT NULL,
    gateway   text   NOT NULL,
    at_ms     bigint NOT NULL,
    PRIMARY KEY (shard, seq, index)
);
COMMENT ON COLUMN refusals.kind IS 'command: never became anything; receipt: did not join, moved nothing';

CREATE TABLE holders (
    sandbox       text COLLATE "C",
    kind          text COLLATE "C",
    holder        text COLLATE "C",
    acquisition   text   NOT NULL,
    reason        text   NOT NULL,
    added_at_ms   bigint NOT NULL,
    added_seq     bigint NOT NULL,
    removed_at_ms bigint,
    removed_seq   bigint,
    PRIMARY KEY (sandbox, kind, holder)
);
COMMENT ON COLUMN holders.kind IS 'dag or claim';

CREATE TABLE dags (
    dag              text COLLATE "C" PRIMARY KEY,
    shard            integer NOT NULL,
    retry_of         text    NOT NULL,
    is_closed        boolean NOT NULL,
    close_reason     text    NOT NULL,
    finished         text    NOT NULL,
    released         text    COLLATE "C" NOT NULL,
    reason           text    NOT NULL,
    evidence         text    NOT NULL,
    outstanding      bigint  NOT NULL,
    verdicts         bigint  NOT NULL,
    held_ever        bigint  NOT NULL,
    gone             bigint  NOT NULL,
    abandoned        bigint  NOT NULL,
    nodes            bigint  NOT NULL,
    nodes_cancelled  bigint  NOT NULL,
    commands_refused bigint  NOT NULL,
    opened_at_ms     bigint  NOT NULL,
    opened_seq       bigint  NOT NULL,
    closed_at_ms     bigint,
    answered_at_ms   bigint,
    changed_at_ms    bigint  NOT NULL,
    changed_seq      bigint  NOT NULL
);
COMMENT ON COLUMN dags.released IS 'the last verdict that was given; empty while none was';

CREATE TABLE dag_nodes (
    dag           text COLLATE "C",
    key           bytea,
    place         bigint NOT NULL,
    node          text   NOT NULL,
    status        text   NOT NULL,
    started_at_ms bigint,
    ended_at_ms   bigint,
    PRIMARY KEY (dag, key)
);
COMMENT ON COLUMN dag_nodes.key IS 'the bytes of the name: any text is one, and no two are alike';

CREATE TABLE acquisitions (
    dag            text COLLATE "C",
    acquisition    text COLLATE "C",
    slot           text    NOT NULL,
    sandbox        text    COLLATE "C" NOT NULL,
    is_adopted     boolean NOT NULL,
    phase          text    NOT NULL,
    authority      text    NOT NULL,
    native_id      text    NOT NULL,
    instance       text    NOT NULL,
    has_ref        boolean NOT NULL,
    epoch          bigint  NOT NULL,
    reason         text    NOT NULL,
    evidence       text    NOT NULL,
    intended_at_ms bigint  NOT NULL,
    intended_seq   bigint  NOT NULL,
    since_ms       bigint  NOT NULL,
    settled_at_ms  bigint,
    settled_seq    bigint,
    PRIMARY KEY (dag, acquisition)
);

CREATE TABLE verdicts (
    dag         text COLLATE "C",
    seq         bigint,
    index       bigint,
    released    text   NOT NULL,
    reason      text   NOT NULL,
    evidence    text   NOT NULL,
    cancel      text   NOT NULL,
    outstanding bigint NOT NULL,
    cancelled   bigint NOT NULL,
    at_ms       bigint NOT NULL,
    PRIMARY KEY (dag, seq, index)
);

CREATE TABLE dag_refusals (
    shard   integer,
    seq     bigint,
    index   bigint,
    dag     text   COLLATE "C" NOT NULL,
    id      text   NOT NULL,
    command text   NOT NULL,
    reason  text   NOT NULL,
    field   text   NOT NULL,
    detail  text   NOT NULL,
    at_ms   bigint NOT NULL,
    PRIMARY KEY (shard, seq, index)
);
