"""Safe reading of YAML, with the lines of the parts. Needs PyYAML.

Input that PyYAML would silently accept is refused: repeated keys, references, and halves of
characters. `sbp_core.strategy_yaml` uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sbp_core.errors import SbpLookupError, SbpValueError
from sbp_core.serialize.lines import Keys, Lines, in_line
from sbp_core.serialize.misfit import is_unicode, shown

#: Errors of Python that PyYAML passes on for values that it cannot make.
_OF_PYYAML = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

#: Kinds of values that are written in digits, and how many these may be.
_NUMBERS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))
_MOST_DIGITS = 100


def pyyaml() -> Any:
    """Return the module `yaml`.

    Raises:
        SbpLookupError: PyYAML is not installed.
    """
    try:
        import yaml  # type: ignore[import-untyped] # its stubs are a package of their own
    except ImportError as error:
        raise SbpLookupError(
            "strategies as YAML need PyYAML, which is not installed",
            accepted="JSON: Strategy.save and Strategy.load",
            todo="pip install 'sbp-core[yaml]'",
        ) from error
    return yaml


def read_yaml(text: str, file: str) -> tuple[Any, Lines]:
    """Return the value of a YAML text, and the lines of its parts.

    Args:
        text: The text.
        file: The file that it comes from, for messages; may be empty.

    Raises:
        SbpValueError: it is not YAML, repeats a key, or refers to parts of itself.
        SbpLookupError: PyYAML is not installed.
    """
    yaml = pyyaml()
    try:
        loader = _loader(yaml)(text)
        root = loader.get_single_node()
        value = None if root is None else loader.construct_document(root)
    except yaml.reader.ReaderError as error:
        place = in_line(file, text.count("\n", 0, error.position) + 1)
        what = f"this is no YAML: the character {chr(error.character)!a} is not allowed in it"
        raise SbpValueError(what, where=place, todo="correct that place") from error
    except yaml.MarkedYAMLError as error:
        what = error.problem or error.context or "it cannot be read"
        mark = error.problem_mark or error.context_mark
        place = f"{in_line(file, mark.line + 1)}, column {mark.column + 1}" if mark else file
        raise SbpValueError(
            f"this is no YAML: {what}", where=place, todo="correct that place"
        ) from error
    # Too deeply nested brackets also raise.
    except (yaml.YAMLError, *_OF_PYYAML) as error:
        raise SbpValueError(
            f"this is no YAML: {error}", where=file, todo="correct that place"
        ) from error
    return value, Lines(file, lambda: _yaml_lines(yaml, root))


def _yaml_lines(yaml: Any, root: Any) -> Iterator[tuple[Keys, int]]:
    """Yield the keys and the line of every part under a node of PyYAML."""
    todo: list[tuple[Keys, Any, int]] = [((), root, 1)]
    while todo:
        keys, node, line = todo.pop()
        yield keys, line
        if isinstance(node, yaml.MappingNode):
            parts = ((key.value, part, key) for key, part in node.value)
            todo += [
                ((*keys, name), part, key.start_mark.line + 1)
                for name, part, key in parts
                if isinstance(name, str)
            ]
        elif isinstance(node, yaml.SequenceNode):
            todo += [
                ((*keys, index), part, part.start_mark.line + 1)
                for index, part in enumerate(node.value)
            ]


def _loader(yaml: Any) -> Any:
    """Return a loader that refuses references and repeated keys."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML has no types
        def compose_node(self, parent: Any, index: Any) -> Any:
            # A few lines of nested references expand to a huge value.
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "a reference (*)", mark)
            return super().compose_node(parent, index)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            # Such as 1:59:59:59..., which takes quadratic time.
            if node.tag in _NUMBERS and len(node.value) > _MOST_DIGITS:
                what = f"{shown(node.value)} is too long for a number"
                raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
            try:
                found = super().construct_object(node, deep)
            # PyYAML passes on Python's errors about invalid dates and numbers.
            except _OF_PYYAML as error:
                what = f"{shown(node.value)} cannot be read: {error}"
                raise yaml.constructor.ConstructorError(
                    None, None, what, node.start_mark
                ) from error
            # "\ud800" in quotes: no message could show it, and no file hold it.
            if isinstance(found, str) and not is_unicode(found):
                what = f"{shown(found)} has half a character"
                raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
            return found

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            known = set()
            for key, _ in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
                if name in known:
                    what = f"{key.value!r} occurs twice"
                    raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
                known |= {name} if name else set()
            return super().construct_mapping(node, deep)

    return Loader
