r"""Let names stand in quotes in overrides, as in YAML: `planner.pins={"use:batch": "S(0)"}`.

Hydra's grammar has no quotes around names, and no colon in a name, but it has `use\\:batch`. So the
commands and `compose` write each override in that way before Hydra reads it. `refusals` writes the
hints for the forms that this module does not accept.
"""

from __future__ import annotations

import re

#: A quoted text, and whether a colon after it makes it a name; or a name that begins with `use:`.
_NAMES = re.compile(
    r"""
    (?P<quote>["'])(?P<quoted>(?:[^"'\\]|\\.|(?!(?P=quote))["'])*)(?P=quote)(?P<colon>(?=\s*:))?
    | (?<=[{,\s])(?P<plain>use:[^\s"'{}\[\]:,\\]+)(?=\s*:)
    """,
    re.VERBOSE,
)

#: Characters that Hydra reads in a name only after a backslash.
_SIGNS = re.compile(r"[()\[\]{}:=, \t]")

#: Names that Hydra has no way to write: other characters, or a number, null or a boolean.
_NO_NAME = re.compile(
    r"""["'\\]|[^\x20-\x7e]|\A\s|\s\Z|\A(?:null|true|false|[+-]?(?:[\d._e+-]*|inf|nan))\Z""",
    re.IGNORECASE,
)


def with_plain_names(override: str) -> str:
    r"""Return an override in which quoted names of mappings are written as Hydra reads them.

    >>> print(with_plain_names('+planner.pins={"use:batch": "S(0)", *.bias: B}'))
    +planner.pins={use\:batch: "S(0)", *.bias: B}
    >>> print(with_plain_names("+planner.pins={use:batch: B}"))
    +planner.pins={use\:batch: B}

    Args:
        override: An override. Quoted values stay as they are.
    """

    def written(found: re.Match[str]) -> str:
        name = found["plain"] if found["plain"] is not None else found["quoted"]
        is_name = value[: found.start()].rstrip()[-1:] in ("{", ",") and (
            found["plain"] is not None or found["colon"] is not None
        )
        if not is_name or _NO_NAME.search(name):
            return found[0]
        return _SIGNS.sub(r"\\\g<0>", name)

    key, equals, value = override.partition("=")
    return f"{key}={_NAMES.sub(written, value)}" if equals else override
