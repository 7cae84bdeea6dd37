"""The page `docs/reference/api.md`: what every room offers, a line a name, and its stability."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from api.rooms import Module, Packages, first_line

_HEAD = """# API

What the packages offer, generated from their source by `python -m api document` (in
`integration/`); CI holds this page to it.
"""

_PLUGIN = """## For plugin authors

A plugin is a distribution with an entry point of group `sbp`, which names a module:

```toml
[project.entry-points.sbp]
my-package = "my_package.plugin"
```

<!-- not run: it imports a package of yours -->
```python
# my_package/plugin.py is read at each start, so it imports nothing heavy.
from my_package.settings import MineConfig  # a frozen dataclass, which checks itself
from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 2


@hookimpl
def sbp_planners():  # `planner=mine` makes my_package.planner.build(MineConfig(...))
    return {"mine": Factory(build="my_package.planner:build", config=MineConfig, summary="a line")}


@hookimpl
def sbp_config_folders():  # with planner/mine.yaml: `name: mine`, and the settings
    return ["pkg://my_package.conf"]
```

`sbp-plugins new planner my-planner` writes such a package, and one for each other kind
except `tensor_library`. `sbp-plugins check my-planner` imports all of it, compares
option files with dataclasses, looks at rules and callbacks, and runs the suites of its kinds;
`pytest -p sbp_core.testing.suites --sbp-plugin my-planner` does so beside your own tests.
`SBP_DISABLE_PLUGINS=my-planner,another` leaves plugins out, by their distributions or entry points.

A test module of yours subclasses the suite of the kind, and supplies the methods that it asks for:

```python
from sbp_core.testing.planner import PlannerConformance


class TestMine(PlannerConformance):
    def make_planner(self):
        return build(MineConfig())
```

All hooks but the last return name -> `Factory`. Tutorials:
[a whole plugin](../../integration/example-plugin/README.md),
[rules of operators](../explanation/notation.md), [boxing backends](../explanation/boxing.md).
"""

_CLASSES = """\
What these classes have, and those that their methods return; you write all that is not said to
have a default. A `Protocol` need not be subclassed, an `ABC` must be. The name of a plugin of kind
`signature` is the operator (`build` returns a `Rule`) or the namespace (`build` returns a
`RuleSet`). A wrong setting raises `sbp_core.errors.ConfigError` in the `__post_init__` of its
config. A combination of choices that do not fit raises it in `check_combination`
(`ChecksCombination`).
A plugin whose `SBP_API_VERSION` is newer than that of sbp-core is set aside and named. What
changed between the versions, and how long each is served: [versions of the hooks](hooks.md).
Passes run in the order in which `compile.plugins` names them, on the graph of one micro-batch.

```text"""

_ROOMS = """## How to read the rest

A *room* is a module or package that declares `__all__`. Other packages, and programs and plugins of
yours, import from rooms only. What lies behind a room is private; `python -m api check` says who
reaches behind one.

| stability | promise |
|---|---|
| stable | for users and plugin authors; only a major version breaks them (below 1.0, a minor one) |
| provisional | for the same people, in a form still to be found: a minor version may change it |
| internal | for sbp's own packages; may change in any version |
"""

#: The order in which packages stand: each builds on those before it.
_ORDER = ("sbp_core", "sbp_aten", "sbp_torch")

#: Columns of a line of code on the page.
_WIDTH = 100

#: The dotted names in a docstring of a hook, and its line about the suite.
_NAME = re.compile(r"`(\w+(?:\.\w+)*\.[A-Z]\w*)`")
_SUITE = re.compile(r"^Suite: `([\w.]+)`\.$", re.MULTILINE)


def document(packages: Packages) -> str:
    """Return the text of the page."""
    parts = [_HEAD, _PLUGIN, *_contracts(packages), _ROOMS, *_packages(packages)]
    return "\n".join(parts)


def file(packages: Packages) -> Path:
    """Return where the page lies."""
    return packages.root / "docs" / "reference" / "api.md"


def _contracts(packages: Packages) -> Iterator[str]:
    """Yield what a plugin author writes: a table of the kinds, and the classes that it names."""
    hooks = packages.modules["sbp_core.plugins.hooks"]
    kinds = ast.literal_eval(_value(hooks.definitions["KINDS"]))
    specs = hooks.definitions["HookSpecs"]
    assert isinstance(specs, ast.ClassDef), "hooks are methods of a class"
    texts = {
        node.name: ast.get_docstring(node) or ""
        for node in specs.body
        if isinstance(node, ast.FunctionDef)
    }
    yield "| kind | hook | `build(config)` returns | suite: to supply |"
    yield "|---|---|---|---|"
    for kind, hook in kinds.items():
        suite = _SUITE.search(texts[hook])
        supplied = _suite(packages, suite[1]) if suite else "none yet"
        yield f"| {kind} | `{hook}` | {first_line(texts[hook])} | {supplied} |"
    others = [name for name in texts if name not in kinds.values()]
    for name in others:
        yield f"| | `{name}` | {first_line(texts[name])} | |"
    yield f"\n{_CLASSES}"
    seen: set[str] = set()
    for kind, hook in kinds.items():
        yield f"# kind {kind}"
        yield from (*_stubs(packages, first_line(texts[hook]), seen), "")
    yield "```\n"


def _stubs(packages: Packages, text: str, seen: set[str]) -> Iterator[str]:
    """Yield the classes that a text names, and those to be written that their methods return.

    Args:
        packages: Where they are defined.
        text: Names them by their rooms.
        seen: Those that have been yielded; grows.
    """
    names = [name for name in _NAME.findall(text) if name.partition(".")[0] in packages.names]
    todo = [(_offered(packages, name), name.rpartition(".")) for name in names]
    while todo:
        node, (where, _, name) = todo.pop(0)
        if not isinstance(node, ast.ClassDef) or name in seen:
            continue
        seen.add(name)
        found = packages.definition(where, name)
        assert found is not None, "its definition has just been found"
        yield f"class {name}({', '.join(map(ast.unparse, node.bases))}):".replace("()", "")
        for one in node.body:
            if isinstance(one, ast.AnnAssign):
                yield f"    {ast.unparse(one)}"
            elif isinstance(one, ast.FunctionDef) and _is_written(node, one):
                yield _stub(one, is_default=not _is_to_write(node, one))
                todo += _returned(packages, found[0], one)
                todo += _requests(packages, found[0], one)


def _is_written(owner: ast.ClassDef, method: ast.FunctionDef) -> bool:
    """Whether plugin authors write a method; of values with fields they write none."""
    has_fields = any(isinstance(one, ast.AnnAssign) for one in owner.body)
    return _is_method(method) and (_is_abstract(owner) or not has_fields)


def _is_method(node: ast.FunctionDef) -> bool:
    """Whether plugin authors know a method: a public one, or the call of the object."""
    return node.name == "__call__" or not node.name.startswith("_")


def _stub(method: ast.FunctionDef, *, is_default: bool) -> str:
    returned = f" -> {ast.unparse(method.returns)}" if method.returns else ""
    comment = "  # has a default" if is_default else ""
    arguments = ast.unparse(method.args)
    line = f"    def {method.name}({arguments}){returned}: ...{comment}"
    if len(line) <= _WIDTH:
        return line
    return f"    def {method.name}(\n        {arguments}\n    ){returned}: ...{comment}"


def _returned(
    packages: Packages, module: Module, method: ast.FunctionDef
) -> Iterator[tuple[ast.stmt, tuple[str, str, str]]]:
    """Yield the classes that a plugin author has to write, too: those that a method returns."""
    for node in ast.walk(method.returns) if method.returns else ():
        found = packages.definition(module.name, node.id) if isinstance(node, ast.Name) else None
        if found is not None and isinstance(found[1], ast.ClassDef) and _is_abstract(found[1]):
            yield found[1], (found[0].name, ".", found[1].name)


def _requests(
    packages: Packages, module: Module, method: ast.FunctionDef
) -> Iterator[tuple[ast.stmt, tuple[str, str, str]]]:
    """Yield the values of fields that a method is given: `PlanRequest`, `TrainerState`."""
    for argument in method.args.args:
        name = argument.annotation.id if isinstance(argument.annotation, ast.Name) else ""
        if name.endswith(("Request", "State", "Context")):
            found = packages.definition(module.name, name)
            if found is not None:
                yield found[1], (found[0].name, ".", name)


def _suite(packages: Packages, name: str) -> str:
    """Return the name of a suite, and what its author supplies: its abstract methods."""
    node = _offered(packages, name)
    if isinstance(node, ast.FunctionDef):
        return f"`{name}({_parameters(node)})`"
    assert isinstance(node, ast.ClassDef), "a suite is a class or a function"
    methods = _abstract_methods(packages, name.rpartition(".")[0], node)
    fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
    settings = ", ".join(f"`{one.id}`" for one in fields if isinstance(one, ast.Name))
    may_set = f"; to set: {settings}" if settings else ""
    return f"`{name}`: {', '.join(f'`{one}`' for one in methods)}{may_set}"


def _abstract_methods(packages: Packages, module: str, node: ast.ClassDef) -> list[str]:
    """Return the names of the abstract methods of a class, or else of its bases."""
    own = [one.name for one in node.body if isinstance(one, ast.FunctionDef) and _marked(one)]
    for base in () if own else node.bases:
        found = packages.definition(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            own += _abstract_methods(packages, found[0].name, found[1])
    return list(dict.fromkeys(own))


def _offered(packages: Packages, name: str) -> ast.stmt:
    """Return the definition of a name that a room offers.

    Raises:
        LookupError: the hooks name something that no room offers.
    """
    where, _, what = name.rpartition(".")
    room = packages.rooms.get(where)
    found = packages.definition(where, what)
    if room is None or what not in (room.offers or ()) or found is None:
        raise LookupError(f"the hooks name {name}, which no room offers")
    return found[1]


def _is_abstract(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id in ("ABC", "Protocol") for base in node.bases)


def _is_to_write(owner: ast.ClassDef, method: ast.FunctionDef) -> bool:
    """Whether a subclass has to bring a method: of a protocol all, else those marked abstract."""
    is_protocol = any(isinstance(base, ast.Name) and base.id == "Protocol" for base in owner.bases)
    return is_protocol or _marked(method)


def _marked(method: ast.FunctionDef) -> bool:
    names = [one.id for one in method.decorator_list if isinstance(one, ast.Name)]
    return "abstractmethod" in names


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
    names = [one.arg for one in (*found.posonlyargs, *found.args) if one.arg != "self"]
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
