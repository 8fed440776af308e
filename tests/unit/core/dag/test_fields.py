"""A DAG's malformed command names its field whole, as a sandbox's does."""

import pytest
from fencepost.core.dag.machine import DagMachine


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"do": "acquire", "slot": "s", "spec": {"imag": "x"}}', "spec.imag"),
        (b'{"do": "acquire", "slot": "s", "spec": {"memory_mb": "x"}}', "spec.memory_mb"),
        (b'{"do": "acquire"}', "slot"),
    ],
)
def test_a_nested_field_is_named_whole(body: bytes, field: str) -> None:
    (malformed,) = DagMachine().decode("commands", "fp.v1.in.0.dag.d.c1", body)
    assert malformed.field == field
