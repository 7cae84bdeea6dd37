"""The check that code which readers copy imports public names only.

It applies to the Python examples of all documents except changelogs, the example plugin, and the
templates of `sbp-plugins new`. If a module is imported, the names that the code uses from it count.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from api.imports import Fault
from api.public import Public
from api.rooms import Packages, python_files
from documents.blocks import Block, read

#: Files whose code readers copy; `.md` pages by their Python examples.
_PAGES = ("*.md", "docs/**/*.md", "packages/*/*.md", "integration/example-plugin/*.md")
_EXAMPLE = Path("integration", "example-plugin")
_TEMPLATES = "packages/*/src/*/plugins/templates/*.py.txt"

#: A placeholder of a template.
_WORD = re.compile(r"\$(\w+)")

#: Python that a command runs.
_COMMAND = re.compile(r"python3? -c ([\"'])(.*?)(?<!\\)\1", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Code:
    """A piece of Python code in a file, and the number of lines above it."""

    text: str
    above: int = 0


def copied_imports(packages: Packages, public: Public) -> Iterator[Fault]:
    """Yield our names in the shown code that are not public."""
    for path in _files(packages.root):
        names = _Names(packages, public, path.relative_to(packages.root))
        for code in _codes(path):
            yield from names.faults(code)


def _files(root: Path) -> Iterator[Path]:
    for pattern in _PAGES:
        yield from (one for one in sorted(root.glob(pattern)) if one.name != "CHANGELOG.md")
    yield from python_files(root / _EXAMPLE)
    yield from sorted(root.glob(_TEMPLATES))


def _codes(path: Path) -> Iterator[Code]:
    """Yield the Python code of a file, in order."""
    if path.suffix != ".md":
        yield Code(_WORD.sub(r"_\1", path.read_text("utf-8")))
        return
    for block in read(path):
        if block.language == "python":
            yield from _examples(block)
        for found in _COMMAND.finditer(block.text if block.language == "console" else ""):
            yield Code(found[2], block.line - 1 + block.text[: found.start()].count("\n"))


def _examples(block: Block) -> Iterator[Code]:
    """Yield the examples of a Python block, or the whole block if it has none."""
    examples = doctest.DocTestParser().get_examples(block.text)
    for example in examples:
        yield Code(example.source, block.line - 1 + example.lineno)
    if not examples:
        yield Code(block.text, block.line - 1)


@dataclass(slots=True)
class _Names:
    """The names that a file has imported from our packages.

    Args:
        packages: Our packages.
        public: Their public names.
        path: Path of the file, for faults.
        modules: Our modules by their names in the file.
    """

    packages: Packages
    public: Public
    path: Path
    modules: dict[str, str] = field(default_factory=dict)

    def faults(self, code: Code) -> Iterator[Fault]:
        """Yield the faults of a piece of the file; call this for earlier pieces first."""
        try:
            nodes = list(ast.walk(ast.parse(code.text)))
        except SyntaxError as error:
            yield Fault(self.path, code.above + (error.lineno or 1), f"no Python: {error.msg}")
            return
        found = [
            (node.lineno, name)
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in self._imported(node)
        ]
        found += [
            (node.lineno, name)
            for node in nodes
            if isinstance(node, ast.Attribute) and (name := self._taken(node))
        ]
        for line, name in sorted(set(found)):
            if name not in self.public.stability:
                yield Fault(self.path, code.above + line, f"{name} is not public")

    def _imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        """Yield the names that a statement imports; record its modules."""
        for alias in node.names:
            if isinstance(node, ast.Import):
                whole = alias.name
                bound = whole if alias.asname else whole.partition(".")[0]
            else:
                whole = bound = f"{node.module}.{alias.name}"
            if whole.partition(".")[0] not in self.packages.names:
                continue
            room, _, name = whole.rpartition(".")
            if whole in self.packages.modules and not self.packages.definition(room, name):
                self.modules[alias.asname or bound.rpartition(".")[2]] = bound
            else:
                yield whole

    def _taken(self, node: ast.Attribute) -> str:
        """Return the dotted name of an attribute of a module; "" for other attributes."""
        home = self._module(node.value)
        dotted = f"{home}.{node.attr}"
        is_module = dotted in self.packages.modules and not self.packages.definition(
            home, node.attr
        )
        return "" if not home or is_module or node.attr.startswith("__") else dotted

    def _module(self, node: ast.expr) -> str:
        """Return the module of ours that an expression names, or ""."""
        if isinstance(node, ast.Name):
            return self.modules.get(node.id, "")
        if isinstance(node, ast.Attribute) and (home := self._module(node.value)):
            dotted = f"{home}.{node.attr}"
            return dotted if dotted in self.packages.modules else ""
        return ""
