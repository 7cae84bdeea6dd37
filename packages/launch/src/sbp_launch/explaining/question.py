"""Parse `explain=` (a question) and `compare=` (a strategy) of `sbp-plan`; needs no PyTorch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sbp_core import strategy_yaml
from sbp_core.errors import ConfigError, SbpError
from sbp_core.infer import PinValue, check_pin
from sbp_core.strategy import Strategy

_QUESTION = re.compile(r"(?P<pattern>(?:use:)?[^:\s]+)\s*(?::\s*(?P<value>.+))?", re.S)
_EXAMPLE = "explain='blocks.0.mlp.up: S(1)', or explain=blocks.0.mlp.up for all legal SBPs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question of `explain=`: what would the plan cost with other SBPs of some tensors?

    Args:
        pattern: Pattern of names, as in pins.
        value: The SBP to compare with; None for all legal SBPs.
    """

    pattern: str
    value: PinValue | None = None

    @classmethod
    def parse(cls, text: str) -> Question:
        """Parse `PATTERN: SBP`, `PATTERN: {axis: SBP}` or `PATTERN`.

        Raises:
            ConfigError: it has another form.
        """
        found = _QUESTION.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"explain={text!r} cannot be read", accepted=_EXAMPLE)
        if found["value"] is None:
            return cls(pattern=found["pattern"])
        value = found["value"].strip()
        pin: PinValue = value
        if value.startswith("{"):
            by_axis = {}
            for part in value.removeprefix("{").removesuffix("}").split(","):
                axis, colon, entry = part.partition(":")
                if not colon or not value.endswith("}"):
                    raise ConfigError(f"explain: {value!r} is not a mapping", accepted=_EXAMPLE)
                by_axis[axis.strip().strip("'\"")] = entry.strip().strip("'\"")
            pin = by_axis
        try:
            check_pin(found["pattern"], pin)
        except ConfigError as error:
            raise ConfigError(
                f"explain={text!r} cannot be read: {error.what}",
                accepted=error.accepted or _EXAMPLE,
            ) from error
        return cls(pattern=found["pattern"], value=pin)

    @property
    def text(self) -> str:
        """The question as on the command line."""
        if self.value is None:
            return self.pattern
        return f"{self.pattern}: {value_text(self.value)}"


def value_text(value: PinValue) -> str:
    """Return the value of a pin as on the command line: `S(0), B` or `{tensor: S(0)}`."""
    if isinstance(value, str):
        return value
    return "{" + ", ".join(f"{axis}: {entry}" for axis, entry in value.items()) + "}"


#: Files of the strategy in a run folder; and endings of files that `sbp-plan out=` writes.
_NAMES = ("strategy.yaml", "strategy.json")
_ENDINGS = (".yaml", ".yml", ".json")


def strategy_of(place: str) -> Path:
    """Return the strategy file that `compare=` names.

    Raises:
        ConfigError: there is none.
    """
    path = Path(place)
    if path.is_dir():
        found = [path / name for name in _NAMES if (path / name).is_file()]
        if not found:
            raise ConfigError(
                f"compare={place!r} is a folder without {' or '.join(_NAMES)}",
                accepted="the folder of a run that has planned, or a strategy file",
            )
        return found[0]
    if path.suffix not in _ENDINGS or not path.is_file():
        raise ConfigError(
            f"compare={place!r} is no strategy file" if path.exists() else f"no file {place!r}",
            accepted=f"a file {', '.join(_ENDINGS)} that out= wrote, or the folder of a run",
        )
    return path


def read_strategy(path: Path) -> Strategy:
    """Read a strategy file.

    Raises:
        ConfigError: it is not a strategy of this version.
    """
    try:
        return Strategy.load(path) if path.suffix == ".json" else strategy_yaml.load(path)
    except SbpError as error:
        raise error.replaced(ConfigError, where=(str(path), *error.where)) from error
