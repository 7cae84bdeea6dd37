"""Rooms: the modules that declare what they offer, found in the source text of the packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Module:
    """A module of one of the packages, as text.

    Args:
        name: Its dotted name.
        path: Its file.
    """

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.path.read_text("utf-8"))

    @cached_property
    def offers(self) -> tuple[str, ...] | None:
        """The names in its `__all__`; None if it declares none."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
            ):
                return tuple(ast.literal_eval(node.value))
        return None

    @cached_property
    def docstring(self) -> str:
        """Its docstring, or nothing."""
        return ast.get_docstring(self.tree) or ""

    @property
    def summary(self) -> str:
        """The first sentence of its docstring."""
        return first_line(self.docstring)

    @cached_property
    def definitions(self) -> Mapping[str, ast.stmt]:
        """What is defined at its top level, by name."""
        found: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if not _is_overload(node):
                    found.setdefault(node.name, node)
            elif isinstance(node, ast.Assign):
                found |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = node
        return found

    @cached_property
    def sources(self) -> Mapping[str, tuple[str, str]]:
        """(module, name there) for each name that it imports, even only for type checkers."""
        return {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }


@dataclass(frozen=True)
class Packages:
    """All modules of the packages below a folder.

    Args:
        root: The repository's root.
        modules: All modules by dotted name.
    """

    root: Path
    modules: Mapping[str, Module] = field(repr=False)

    @classmethod
    def below(cls, root: Path = ROOT) -> Packages:
        """Read the packages of a repository."""
        found = {}
        for source in sorted(root.glob("packages/*/src")):
            for path in sorted(source.rglob("*.py")):
                parts = path.relative_to(source).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                found[name] = Module(name, path)
        return cls(root, found)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The packages, by import name."""
        return tuple(sorted({name for name in self.modules if "." not in name}))

    @cached_property
    def rooms(self) -> Mapping[str, Module]:
        """The rooms by name: modules with `__all__` whose own name is not private."""
        return {
            name: one
            for name, one in self.modules.items()
            if one.offers is not None and not any(part[0] == "_" for part in name.split("."))
        }

    def room_of(self, module: str) -> str:
        """Return the nearest room above a module, or ""."""
        while module and module not in self.rooms:
            module = module.rpartition(".")[0]
        return module

    def definition(self, module: str, name: str) -> tuple[Module, ast.stmt] | None:
        """Return the definition of a module's name; None if it is a module, or not ours."""
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen and module in self.modules:
            seen.add((module, name))
            here = self.modules[module]
            if name in here.definitions:
                return here, here.definitions[name]
            if name not in here.sources:
                return None
            module, name = here.sources[name]
        return None


def _is_overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a definition is an overload of a function."""
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


def first_line(docstring: str) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return " ".join(docstring.partition("\n\n")[0].split())


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, without files that tools generate."""
    for path in sorted(folder.rglob("*.py")):
        if not any(part.startswith(".") or part == "build" for part in path.parts):
            yield path
