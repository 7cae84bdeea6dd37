"""What `explain=` and `compare=` name, read without PyTorch: a question, and another strategy."""

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
    """Why are some tensors cut as they are, and not otherwise?

    Args:
        pattern: Of names, as in pins.
        value: How they would be cut; None asks for all ways.
    """

    pattern: str
    value: PinValue | None = None

    @classmethod
    def parse(cls, text: str) -> Question:
        """Read `PATTERN: SBP`, `PATTERN: {axis: SBP}` or `PATTERN`.

        Raises:
            ConfigError: it is none of them.
        """
        found = _QUESTION.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"explain={text!r} asks for nothing", accepted=_EXAMPLE)
        if found["value"] is None:
            return cls(pattern=found["pattern"])
        value = found["value"].strip()
        pin: PinValue = value
        if value.startswith("{"):
            by_axis = {}
            for part in value.removeprefix("{").removesuffix("}").split(","):
                axis, colon, entry = part.partition(":")
                if not colon or not value.endswith("}"):
                    raise ConfigError(f"explain: {value!r} is no mapping", accepted=_EXAMPLE)
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
        """The question as one types it."""
        if self.value is None:
            return self.pattern
        return f"{self.pattern}: {value_text(self.value)}"


def value_text(value: PinValue) -> str:
    """Return the value of a pin as one types it: `S(0), B` or `{tensor: S(0)}`."""
    if isinstance(value, str):
        return value
    return "{" + ", ".join(f"{axis}: {entry}" for axis, entry in value.items()) + "}"


#: What a run leaves of its plan, and what `sbp-plan out=` writes.
_NAMES = ("strategy.yaml", "strategy.json")
_ENDINGS = (".yaml", ".yml", ".json")


def strategy_of(place: str) -> Path:
    """Return the file of the strategy that `compare=` names.

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
        ConfigError: it is none of this version.
    """
    try:
        return Strategy.load(path) if path.suffix == ".json" else strategy_yaml.load(path)
    except SbpError as error:
        raise error.replaced(ConfigError, where=(str(path), *error.where)) from error
