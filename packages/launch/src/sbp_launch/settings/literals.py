"""Text that Hydra and OmegaConf are to take as it is: no interpolation, no quote is read in it."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: A text that Hydra reads as itself, and not as a number, a null or a truth value.
_PLAIN = re.compile(
    r"(?!(?:null|true|false|inf|nan)\Z)(?:[A-Za-z_/]|\.\.?/)[\w./-]*", re.IGNORECASE
)


def literal(value: object) -> object:
    """Return a value whose texts OmegaConf resolves to the texts that are given, as in `${x}`."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: literal(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [literal(part) for part in value]
    return value


def quoted(text: str) -> str:
    r"""Return a text as the value of an override, in quotes if Hydra needs them.

    >>> print(quoted("runs/it's"))
    'runs/it\'s'
    """
    if _PLAIN.fullmatch(text):
        return text
    # A backslash counts where a quote follows it, and at the end, where the closing one does.
    inner = re.sub(r"(\\*)(')", r"\1\1\\\2", str(literal(text)))
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", inner) + "'"
