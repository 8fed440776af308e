-- What only readers need: the orders in which the API pages.

CREATE INDEX steps_by_admission ON steps (admitted_seq, sandbox, step);
CREATE INDEX steps_of_sandbox ON steps (sandbox, admitted_seq, step);
CREATE INDEX steps_by_id ON steps (step, sandbox);
CREATE INDEX steps_by_state ON steps (state, admitted_seq, sandbox, step);
CREATE INDEX refusals_of_step ON refusals (sandbox, step, seq, index);
CREATE INDEX dags_by_released ON dags (released, dag);
CREATE INDEX acquisitions_outstanding ON acquisitions (dag, intended_seq, acquisition)
    WHERE settled_seq IS NULL;
