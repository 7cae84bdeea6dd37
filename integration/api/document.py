"""The pages `docs/reference/api/`: an overview, a page for each reader, and the internal names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from api.contracts import contracts, kinds_of_plugins, parameters
from api.public import Public, Reader
from api.rooms import Module, Packages, first_line

#: The folder of the pages.
FOLDER = Path("docs", "reference", "api")

_MADE = "Generated from the source by `python -m api document` (in `integration/`)."

_HEAD = f"""# API

{_MADE} CI checks that these pages are up to date.

Import the names on these pages. Every other name of the packages is [internal](internal.md): it may
change in any version, and only sbp's own packages import it. `python -m api check` fails if a
document, the example plugin or a template imports an internal name.

| page | names |
|---|---|"""

_PROMISE = """
| stability | promise |
|---|---|
| stable | only a major version breaks it (below 1.0: a minor one) |
| provisional | a minor version may change it |
"""

_PLUGIN = """## Plugins

A plugin is a distribution with an entry point of group `sbp`. The entry point names a module:

```toml
[project.entry-points.sbp]
my-package = "my_package.plugin"
```

<!-- not run: it imports a package of yours -->
```python
# my_package/plugin.py is read at each start, so it imports nothing that takes long to load.
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

`sbp-plugins new planner my-planner` writes such a package; there is a template for each kind except
`tensor_library`. `sbp-plugins check my-planner` imports all of it, compares option files with
dataclasses, checks rules and callbacks, and runs the conformance suites of its kinds. To run the
same checks together with your own tests, use
`pytest -p sbp_core.testing.suites --sbp-plugin my-planner`.
`SBP_DISABLE_PLUGINS=my-planner,another` leaves plugins out, by the name of the distribution or of
the entry point.

A test module of yours subclasses the suite of the kind and supplies the methods that it asks for:

```python
from sbp_core.testing.planner import PlannerConformance


class TestMine(PlannerConformance):
    def make_planner(self):
        return build(MineConfig())
```

Each hook except `sbp_config_folders` returns name -> `Factory`. Examples:
[a whole plugin](../../../integration/example-plugin/README.md),
[rules of operators](../../explanation/notation.md),
[boxing backends](../../explanation/boxing.md).
"""

_RULES = """
The name of a plugin of kind `signature` is the operator (`build` returns a `Rule`) or the namespace
(`build` returns a `RuleSet`). A wrong setting raises `sbp_core.errors.ConfigError` in the
`__post_init__` of its config. If the setting is wrong because of another one that was chosen with
it, `check_combination` of the config raises it (`ChecksCombination`). A plugin whose
`SBP_API_VERSION` is newer than that of sbp-core is set aside and named. [Versions of the
hooks](../hooks.md) says what changed between versions, and how long each is served.
"""

_INTERNAL = f"""# Internal names

{_MADE}
These names are for sbp's own packages. They may change in any version.
[The public names](README.md) have pages of their own.

A *room* is a module or package that lists names in `__all__`. A package of sbp imports from another
one through its rooms only.
"""


def documents(packages: Packages, public: Public) -> dict[Path, str]:
    """Return the text of each page, by its path in the repository."""
    pages = {FOLDER / "README.md": _overview(packages, public)}
    for reader in public.readers:
        pages[FOLDER / f"{reader.key}.md"] = _page(packages, public, reader)
    pages[FOLDER / "internal.md"] = _internal(packages, public)
    return {path: "\n".join(lines).rstrip("\n") + "\n" for path, lines in pages.items()}


def _overview(packages: Packages, public: Public) -> Iterator[str]:
    yield _HEAD
    for reader in public.readers:
        yield f"| [{reader.title}]({reader.key}.md) | {len(reader.names)} |"
    yield "| [Internal names](internal.md) | not public |"
    yield _PROMISE
    yield _PLUGIN
    yield "| kind | hook | `build(config)` returns | suite: to supply |"
    yield "|---|---|---|---|"
    pages = {kind: reader.key for reader in public.readers for kind in reader.kinds}
    for kind, row in kinds_of_plugins(packages):
        yield f"| {f'[{kind}]({pages[kind]}.md)' if kind in pages else kind} {row}"
    yield _RULES


def _page(packages: Packages, public: Public, reader: Reader) -> Iterator[str]:
    """Yield the lines of the page of one reader."""
    yield f"# API: {reader.title[0].lower()}{reader.title[1:]}\n"
    yield f"{_MADE} [All pages](README.md).\n\n{reader.about}\n"
    rooms = sorted({name.rpartition(".")[0] for name, _ in reader.names}, key=_order)
    words = dict(reader.names)
    for room in rooms:
        yield f"## {room}\n\n{packages.rooms[room].summary}\n"
        for name in packages.rooms[room].offers or ():
            if word := words.get(f"{room}.{name}"):
                yield f"{_line(packages, packages.rooms[room], name)} *{word}*"
        yield ""
    if reader.also:
        yield "## See also\n"
        for name in reader.also:
            yield f"- `{name}`: [{public.reader_of(name).title}]({public.reader_of(name).key}.md)"
        yield ""
    if reader.kinds:
        yield from contracts(packages, reader.kinds)


def _internal(packages: Packages, public: Public) -> Iterator[str]:
    yield _INTERNAL
    for package in sorted(packages.names, key=_order):
        rooms = [room for name, room in packages.rooms.items() if name.split(".")[0] == package]
        left = {
            room: [name for name in room.offers or () if name not in public.of_room(room.name)]
            for room in rooms
        }
        if any(left.values()):
            yield f"## {package}\n"
            for room, names in left.items():
                if names:
                    yield f"- `{room.name}`: {', '.join(f'`{name}`' for name in names)}"
            yield ""
    paged = {kind for reader in public.readers for kind in reader.kinds}
    if left_over := [kind for kind, _ in kinds_of_plugins(packages) if kind and kind not in paged]:
        yield from contracts(packages, left_over)


#: The order of packages: each one builds on earlier ones.
_ORDER = ("sbp_launch", "sbp_torch", "sbp_aten", "sbp_core")


def _order(room: str) -> tuple[bool, int, str]:
    """Return the sort key of a room: first the rooms for users, then deeper ones; suites last."""
    package = room.partition(".")[0]
    place = _ORDER.index(package) if package in _ORDER else len(_ORDER)
    return ".testing" in room, place, room


def _line(packages: Packages, room: Module, name: str) -> str:
    """Return the line of one name: its signature and its description."""
    found = packages.definition(room.name, name)
    if found is None:
        module = packages.modules.get(f"{room.name}.{name}")
        return f"- `{name}`: {module.summary if module else 'a module'}"
    where, node = found
    if isinstance(node, ast.FunctionDef):
        return f"- `{name}({parameters(node)})`: {first_line(ast.get_docstring(node) or '')}"
    if isinstance(node, ast.ClassDef):
        return f"- `{name}{_fields(node)}`: {first_line(ast.get_docstring(node) or '')}"
    return f"- `{name}`: {_comment(where, node)}"


def _fields(node: ast.ClassDef) -> str:
    """Return the parameters of a class: those of `__init__`, or the fields of a dataclass."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return f"({parameters(one)})"
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "dataclass":
            names = [
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign)
                and isinstance(one.target, ast.Name)
                and not one.target.id.startswith("_")
                and "ClassVar" not in ast.unparse(one.annotation)
                and "init=False" not in ast.unparse(one)
            ]
            by_name = any(key.arg == "kw_only" for key in decorator.keywords)
            return f"({', '.join(['*'] * by_name + names)})"
    return ""


def _comment(module: Module, node: ast.stmt) -> str:
    """Return the comment (`#: ...`) above a constant, in one line."""
    lines = module.path.read_text("utf-8").splitlines()
    first = node.lineno - 1
    above = first
    while above > 0 and lines[above - 1].startswith("#:"):
        above -= 1
    text = " ".join(line.removeprefix("#:").strip() for line in lines[above:first])
    return text or f"`{ast.unparse(node).splitlines()[0][:80]}`"
