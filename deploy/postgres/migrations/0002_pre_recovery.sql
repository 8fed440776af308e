-- What a sandbox's disk still has to get back, and the newest checkpoint that it starts from.

ALTER TABLE sandboxes
    ADD COLUMN recovery         text   NOT NULL DEFAULT 'replay',
    ADD COLUMN recovering       text   NOT NULL DEFAULT '',
    ADD COLUMN recovered_steps  bigint NOT NULL DEFAULT 0,
    ADD COLUMN checkpoint       text   NOT NULL DEFAULT '',
    ADD COLUMN checkpoint_line  bigint NOT NULL DEFAULT 0,
    ADD COLUMN checkpoint_seq   bigint NOT NULL DEFAULT 0,
    ADD COLUMN checkpoint_at_ms bigint;
