-- The former version wrote no such columns; this one always does.

ALTER TABLE sandboxes
    ALTER COLUMN recovery        DROP DEFAULT,
    ALTER COLUMN recovering      DROP DEFAULT,
    ALTER COLUMN recovered_steps DROP DEFAULT,
    ALTER COLUMN checkpoint      DROP DEFAULT,
    ALTER COLUMN checkpoint_line DROP DEFAULT,
    ALTER COLUMN checkpoint_seq  DROP DEFAULT;
