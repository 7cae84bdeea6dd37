"""The contract of plugins of each kind: the hook, the classes, and the conformance suite.

The docstrings of the hooks (`sbp_core.plugins.hooks`) name the classes and the suites.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from api.rooms import Module, Packages, first_line

#: Columns of a line of code on a page.
_WIDTH = 100

#: The dotted names in a docstring of a hook, and its line about the suite.
_NAME = re.compile(r"`(\w+(?:\.\w+)*\.[A-Z]\w*)`")
_SUITE = re.compile(r"^Suite: `([\w.]+)`\.$", re.MULTILINE)

_HEAD = """## Contracts

The table names the class that a plugin of each kind returns; the classes follow, with those that
their methods return. You write each method that is not said to have a default. A `Protocol` need
not be subclassed, an `ABC` must be.
"""

_PASSES = """Passes run in the order in which `compile.plugins` names them, on the graph of one
micro-batch.
"""


def kinds_of_plugins(packages: Packages) -> Iterator[tuple[str, str]]:
    """Yield each kind, and the rest of its row: its hook, what `build` returns, its suite."""
    texts, kinds = _hooks(packages)
    for kind, hook in kinds.items():
        yield kind, _row(packages, hook, texts[hook])
    for hook in texts:
        if hook not in kinds.values():
            yield "", _row(packages, hook, texts[hook])


def _row(packages: Packages, hook: str, text: str) -> str:
    suite = _SUITE.search(text)
    supplied = _suite(packages, suite[1]) if suite else ""
    return f"| `{hook}` | {first_line(text)} | {supplied} |"


def contracts(packages: Packages, kinds: Collection[str]) -> Iterator[str]:
    """Yield the contracts of some kinds of plugins: a table, and the classes to write."""
    texts, hooks = _hooks(packages)
    yield _HEAD
    yield "| kind | hook | `build(config)` returns | suite: to supply |"
    yield "|---|---|---|---|"
    for kind in kinds:
        yield f"| {kind} {_row(packages, hooks[kind], texts[hooks[kind]])}"
    yield ""
    if "pass" in kinds:
        yield _PASSES
    yield "```text"
    seen: set[str] = set()
    for kind in kinds:
        yield f"# kind {kind}"
        yield from (*_stubs(packages, first_line(texts[hooks[kind]]), seen), "")
    yield "```\n"


def named_classes(packages: Packages, kind: str) -> Iterator[str]:
    """Yield the names that the author of a plugin imports, dotted: its classes, and its suite."""
    texts, hooks = _hooks(packages)
    text = texts[hooks[kind]]
    yield from (n for n in _NAME.findall(text) if n.partition(".")[0] in packages.names)
    if (suite := _SUITE.search(text)) and suite[1] not in _NAME.findall(text):
        yield suite[1]


def _hooks(packages: Packages) -> tuple[dict[str, str], dict[str, str]]:
    """Return the docstring of each hook, and the hook of each kind."""
    hooks = packages.modules["sbp_core.plugins.hooks"]
    specs = hooks.definitions["HookSpecs"]
    assert isinstance(specs, ast.ClassDef), "hooks are methods of a class"
    texts = {
        node.name: ast.get_docstring(node) or ""
        for node in specs.body
        if isinstance(node, ast.FunctionDef)
    }
    return texts, ast.literal_eval(_value(hooks.definitions["KINDS"]))


def _stubs(packages: Packages, text: str, seen: set[str]) -> Iterator[str]:
    """Yield the classes that a text names, and the classes that their methods return.

    Args:
        packages: The packages that define them.
        text: A text with dotted names of rooms.
        seen: The classes that were yielded, to which new ones are added.
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
    """Whether plugin authors write a method; they write none of classes with fields."""
    has_fields = any(isinstance(one, ast.AnnAssign) for one in owner.body)
    return _is_method(method) and (_is_abstract(owner) or not has_fields)


def _is_method(node: ast.FunctionDef) -> bool:
    """Whether a method is part of the contract: it is public, or `__call__`."""
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
    """Yield the classes that a method returns, which a plugin author also has to write."""
    for node in ast.walk(method.returns) if method.returns else ():
        found = packages.definition(module.name, node.id) if isinstance(node, ast.Name) else None
        if found is not None and isinstance(found[1], ast.ClassDef) and _is_abstract(found[1]):
            yield found[1], (found[0].name, ".", found[1].name)


def _requests(
    packages: Packages, module: Module, method: ast.FunctionDef
) -> Iterator[tuple[ast.stmt, tuple[str, str, str]]]:
    """Yield the dataclasses among the arguments of a method: `PlanRequest`, `TrainerState`."""
    for argument in method.args.args:
        name = argument.annotation.id if isinstance(argument.annotation, ast.Name) else ""
        if name.endswith(("Request", "State", "Context")):
            found = packages.definition(module.name, name)
            if found is not None:
                yield found[1], (found[0].name, ".", name)


def _suite(packages: Packages, name: str) -> str:
    """Return the name of a suite, and its abstract methods, which the plugin author supplies."""
    node = _offered(packages, name)
    if isinstance(node, ast.FunctionDef):
        return f"`{name}({parameters(node)})`"
    assert isinstance(node, ast.ClassDef), "a suite is a class or a function"
    methods = _abstract_methods(packages, name.rpartition(".")[0], node)
    fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
    settings = ", ".join(f"`{one.id}`" for one in fields if isinstance(one, ast.Name))
    may_set = f"; to set: {settings}" if settings else ""
    return f"`{name}`: {', '.join(f'`{one}`' for one in methods)}{may_set}"


def _abstract_methods(packages: Packages, module: str, node: ast.ClassDef) -> list[str]:
    """Return the names of the abstract methods of a class; if it has none, of its bases."""
    own = [one.name for one in node.body if isinstance(one, ast.FunctionDef) and _marked(one)]
    for base in () if own else node.bases:
        found = packages.definition(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            own += _abstract_methods(packages, found[0].name, found[1])
    return list(dict.fromkeys(own))


def _offered(packages: Packages, name: str) -> ast.stmt:
    """Return the definition of a name that a room offers.

    Raises:
        LookupError: the hooks use a name that no room offers.
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
    """Whether a subclass must define a method: any of a protocol, else an abstract one."""
    is_protocol = any(isinstance(base, ast.Name) and base.id == "Protocol" for base in owner.bases)
    return is_protocol or _marked(method)


def _marked(method: ast.FunctionDef) -> bool:
    names = [one.id for one in method.decorator_list if isinstance(one, ast.Name)]
    return "abstractmethod" in names


def _value(node: ast.stmt) -> ast.expr:
    assert isinstance(node, ast.Assign | ast.AnnAssign), "a constant is assigned"
    assert node.value is not None, "a constant has a value"
    return node.value


def parameters(node: ast.FunctionDef) -> str:
    """Return the names of the parameters, with `*` before keyword-only ones."""
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
