"""The composed config of a run as a file of its folder, which every rank reads.

So it is composed once, whatever starts the ranks, and it says afterwards what was run:

    model:
      name: gpt
      num_layers: 4
    trainer:
      steps: 300
"""

from __future__ import annotations

from pathlib import Path

import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

from sbp_core.errors import ConfigError, SbpError, suggestion
from sbp_core.serialize import Lines, read_text, read_yaml, shown
from sbp_launch.checkpoint.formats.aside import writing_aside
from sbp_launch.settings.config import GROUPS, ComposedConfig

#: Its name in the run folder.
RUN_FILE = "config.yaml"

_HEAD = "# The settings of this run, as they were composed; every rank reads them here.\n"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc] # yaml has no types
    """Writes what stands in two places twice, as readers take no references."""

    def ignore_aliases(self, data: object) -> bool:
        """See `yaml.Dumper`."""
        return True


def save_run(composed: ComposedConfig, folder: Path) -> None:
    """Write a composed config into a run folder."""
    values = {name: value for name, value in composed.values.items() if name in GROUPS}
    text = yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None
    )
    with writing_aside(folder / RUN_FILE) as file:
        file.write((_HEAD + text).encode())


def load_run(folder: Path) -> ComposedConfig:
    """Return the composed config that `save_run` wrote.

    Raises:
        ConfigError: there is none that can be read.
    """
    path = folder / RUN_FILE
    try:
        values, lines = read_yaml(read_text(path), str(path))
        _check_form(values, lines)
    except SbpError as error:
        raise error.replaced(
            ConfigError,
            what=f"the settings of the run cannot be read: {error.what}",
            todo="the run folder has to be on a disk that all hosts share: hydra.run.dir=FOLDER",
        ) from error
    files = dict.fromkeys(GROUPS, str(path))
    return ComposedConfig(values=values, files=files, overrides=())


def _check_form(values: object, lines: Lines) -> None:
    """Check that a config has groups with settings.

    Raises:
        ConfigError: it has not.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"it is {shown(values)}", where=lines.where([]), accepted="a mapping")
    for name in values:
        if name not in GROUPS:
            raise ConfigError(
                f"there is no group {shown(name)}",
                where=lines.where([str(name)]),
                accepted=", ".join(GROUPS),
                todo=suggestion(str(name), GROUPS),
            )
