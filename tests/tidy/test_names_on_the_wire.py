"""Streams, buckets and subjects are spelled in one place, or two services could miss each other."""

import ast

import pytest

from tests.tidy import tree

HOME = {
    "FP_": "libs/contracts/src/fencepost/contracts/streams.py",
    "fp.v1": "libs/contracts/src/fencepost/contracts/subjects.py",
}
# The core imports nothing: it derives the subjects of public events, and decodes stored commands.
ALSO = {
    "FP_": (),
    "fp.v1": (
        "libs/core/src/fencepost/core/sandbox/effects.py",
        "libs/core/src/fencepost/core/dag/machine.py",
        # Its commands stand where the server would have stored them.
        "libs/simulator/src/fencepost/simulator/simulation.py",
    ),
}


def spelled(path: str, prefix: str) -> list[int]:
    """Lines of string literals, docstrings apart, that spell a name out."""
    module = tree.tree(path)
    documents = {
        id(node.body[0].value)
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    documents |= {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    return [
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documents
        and node.value.startswith(prefix)
    ]


@pytest.mark.parametrize("prefix", list(HOME))
def test_s091_names_of_buckets_streams_and_subjects_are_spelled_in_one_place(prefix: str) -> None:
    assert spelled(HOME[prefix], prefix), "the control: the home spells them"
    elsewhere = {
        path: lines
        for path in tree.python(*tree.PRODUCT)
        if path != HOME[prefix] and path not in ALSO[prefix] and (lines := spelled(path, prefix))
    }
    assert not elsewhere
