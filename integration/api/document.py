"""The page `docs/api.md`: what every room offers, a line a name, and how stable that is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from api.rooms import Module, Packages, first_line

_HEAD = """# API

What the packages offer, generated from their source by `python -m api document` (in
`integration/`); CI holds this page to it. A *room* is a module or package that declares `__all__`.
Other packages, and programs and plugins of yours, import from rooms only. What lies behind a room
is private; `python -m api check` says who reaches behind one.

| stability | promise |
|---|---|
| stable | for users and plugin authors; what breaks them comes with a version that says so |
| provisional | for the same people, in a form still to be found: a minor version may change it |
| internal | for sbp's own packages; may change in any version |
"""

#: The order in which packages stand: each builds on those before it.
_ORDER = ("sbp_core", "sbp_aten", "sbp_torch")


def document(packages: Packages) -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *_contracts(packages), *_packages(packages)])


def file(packages: Packages) -> Path:
    """Return where the page lies."""
    return packages.root / "docs" / "api.md"


def _contracts(packages: Packages) -> Iterator[str]:
    """Yield the table of a plugin author: each kind, its hook, what `build` returns, the suite."""
    hooks = packages.modules["sbp_core.plugins.hooks"]
    kinds = ast.literal_eval(_value(hooks.definitions["KINDS"]))
    specs = hooks.definitions["HookSpecs"]
    assert isinstance(specs, ast.ClassDef), "hooks are methods of a class"
    texts = {
        node.name: first_line(ast.get_docstring(node) or "")
        for node in specs.body
        if isinstance(node, ast.FunctionDef)
    }
    yield "## For plugin authors\n"
    yield "A plugin implements hooks, each of which returns name -> `sbp_core.plugins.Factory`.\n"
    yield "| kind | hook | what its factories build |\n|---|---|---|"
    for kind, hook in kinds.items():
        yield f"| {kind} | `{hook}` | {texts[hook]} |"
    others = [name for name in texts if name not in kinds.values()]
    for name in others:
        yield f"| | `{name}` | {texts[name]} |"
    yield ""


def _value(node: ast.stmt) -> ast.expr:
    assert isinstance(node, ast.Assign | ast.AnnAssign), "a constant is assigned"
    assert node.value is not None, "a constant has a value"
    return node.value


def _packages(packages: Packages) -> Iterator[str]:
    later = [name for name in packages.names if name not in _ORDER]
    for package in (*_ORDER, *later):
        rooms = [
            room
            for name, room in packages.rooms.items()
            if name.partition(".")[0] == package and room.offers
        ]
        if not rooms:
            continue
        yield f"## {package}\n"
        for room in rooms:
            if room.stability == "internal":
                continue
            yield f"### {room.name}\n"
            yield f"{room.summary} *{room.stability or 'unknown'}*\n"
            for name in room.offers or ():
                yield _line(packages, room, name)
            yield ""
        internal = [room for room in rooms if room.stability == "internal"]
        if internal:
            yield "Internal:\n"
            for room in internal:
                yield f"- `{room.name}`: {', '.join(f'`{name}`' for name in room.offers or ())}"
            yield ""


def _line(packages: Packages, room: Module, name: str) -> str:
    """Return the line of one name: how it is called, and what it is."""
    found = packages.definition(room.name, name)
    if found is None:
        module = packages.modules.get(f"{room.name}.{name}")
        return f"- `{name}`: {module.summary if module else 'a module'}"
    where, node = found
    if isinstance(node, ast.FunctionDef):
        return f"- `{name}({_parameters(node)})`: {first_line(ast.get_docstring(node) or '')}"
    if isinstance(node, ast.ClassDef):
        return f"- `{name}`: {first_line(ast.get_docstring(node) or '')}"
    return f"- `{name}`: {_comment(where, node)}"


def _parameters(node: ast.FunctionDef) -> str:
    """Return the names of the parameters, `*` before those that are given by name only."""
    found = node.args
    names = [one.arg for one in (*found.posonlyargs, *found.args)]
    if found.vararg:
        names.append(f"*{found.vararg.arg}")
    elif found.kwonlyargs:
        names.append("*")
    names += [one.arg for one in found.kwonlyargs]
    if found.kwarg:
        names.append(f"**{found.kwarg.arg}")
    return ", ".join(names)


def _comment(module: Module, node: ast.stmt) -> str:
    """Return the comment (`#: ...`) above a constant, in one line."""
    lines = module.path.read_text("utf-8").splitlines()
    first = node.lineno - 1
    above = first
    while above > 0 and lines[above - 1].startswith("#:"):
        above -= 1
    text = " ".join(line.removeprefix("#:").strip() for line in lines[above:first])
    return text or f"`{ast.unparse(node).splitlines()[0][:80]}`"
