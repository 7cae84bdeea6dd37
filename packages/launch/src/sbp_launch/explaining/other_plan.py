"""The other plan of `compare=`: its strategy, found and read without PyTorch."""

from __future__ import annotations

from pathlib import Path

from sbp_core import strategy_yaml
from sbp_core.errors import ConfigError, SbpError
from sbp_core.strategy import Strategy

#: What a run leaves of its plan, and what `sbp-plan out=` writes.
_NAMES = ("strategy.yaml", "strategy.json")
_ENDINGS = (".yaml", ".yml", ".json")


def strategy_of(place: str) -> Path:
    """Return the file of the strategy that `compare=` names.

    Args:
        place: A strategy file, or the folder of a run.

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
