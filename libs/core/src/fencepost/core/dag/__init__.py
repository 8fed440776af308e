"""
The dag family: nodes, acquisitions, the barrier, releases and the verdict of DAGs.

Rule 1: acquisitions and the `closed` barrier share one sequence; an intent after it is refused.
Rule 2: the verdict is a pure function of this state, and never a latch.
Rule 3: what a sandbox is, only its own shard says; this family believes its messages and time.
"""
