"""What a mutation is, and how it is put in place."""

import __future__

import importlib
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import pytest
from fencepost.core.dag import evolve as dag_evolve
from fencepost.core.sandbox import evolve

CORE = "fencepost.core.sandbox."
DAG = "fencepost.core.dag."
RUNTIME = "fencepost.runtime."
SIMULATOR = "fencepost.simulator."


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str
    function: str
    old: str
    new: str
    seeds: int = 40
    faults: tuple[str, ...] = ()
    dags: bool = False
    checkpoints: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts the mutated function where the original one is called from."""
        module = importlib.import_module(self.module)
        owner: Any = module
        *path, name = self.function.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = inspect.getattr_static(owner, name)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} is not there once"
        source = source.replace(self.old, self.new)
        flags = __future__.annotations.compiler_flag
        code = compile(source, f"<{self.name}>", "exec", flags=flags)
        names: dict[str, Any] = {}
        exec(code, module.__dict__, names)
        mutated = names[name]
        monkeypatch.setattr(owner, name, mutated)
        for evolving in (evolve, dag_evolve):
            if isinstance(original, FunctionType) and module is evolving:
                for kind, function in list(evolving._BY_KIND.items()):
                    if function is original:
                        monkeypatch.setitem(evolving._BY_KIND, kind, mutated)
