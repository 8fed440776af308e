"""The project's own files, as the tidy tests read them."""

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = frozenset({".git", ".venv", "__pycache__", ".fencepost", "dist", "build"})
PRODUCT = ("libs/", "services/")
TOOLING = ("bench/", "scripts/")


@functools.cache
def paths() -> tuple[str, ...]:
    """Tells every file that is or would be committed, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and listed.stdout:
        found = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    else:
        # Without git (an export, or another user's clone) the ignored folders are left out by name.
        found = [
            str(path.relative_to(ROOT))
            for path in ROOT.rglob("*")
            if path.is_file()
            and not any(
                part in NOT_OURS or part.endswith("_cache") or part.startswith(".venv")
                for part in path.relative_to(ROOT).parts
            )
        ]
    return tuple(sorted(set(found)))


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def python(*prefixes: str) -> list[str]:
    return [path for path in paths() if path.endswith(".py") and path.startswith(prefixes)]


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse(text(path), filename=path)


def module_name(path: str) -> str:
    """Tells the dotted name of a source file: what follows `src/`."""
    dotted = path.partition("/src/")[2].removesuffix(".py").replace("/", ".")
    return dotted.removesuffix(".__init__")


@functools.cache
def imported(path: str) -> frozenset[str]:
    """Tells every dotted name that a file imports, members of packages included."""
    names: set[str] = set()
    package = (
        module_name(path) if path.endswith("__init__.py") else module_name(path).rpartition(".")[0]
    )
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*above, *([node.module] if node.module else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return frozenset(names)


def dotted_references(path: str) -> list[tuple[int, str]]:
    """
    Tells every name that a file uses, with imports resolved: `(line, "datetime.datetime.now")`.

    A bare name that was not imported counts only where it is called, so that a field may be named as
    a builtin is: `(line, "print")`.
    """
    known: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id not in known:
                found.append((node.lineno, node.func.id))
        elif isinstance(node, ast.Attribute | ast.Name) and (name := _dotted(node)):
            head, dot, rest = name.partition(".")
            if dot or head in known:
                found.append((node.lineno, f"{known.get(head, head)}{dot}{rest}"))
    return found


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def functions(path: str) -> list[tuple[str, int, int]]:
    """Tells each function of a file with its first line and its length, decorators left out."""
    found: list[tuple[str, int, int]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (child.end_lineno or child.lineno) - child.lineno + 1
                found.append((name[:-1], child.lineno, length))
            walk(child, name)

    walk(tree(path), "")
    return found
