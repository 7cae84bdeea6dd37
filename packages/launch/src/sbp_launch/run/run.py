"""`Run`: the settings, plugins, folder and console of one run, in one immutable object.

    program -> planned -> session -> steps -> evaluation -> summary

Each stage of `trainer` receives it, together with the results of the stages before.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from sbp_core.plugins import PluginEntry, PluginRegistry
from sbp_launch.console import say
from sbp_launch.run.progress import timed
from sbp_launch.settings.config import RunConfig
from sbp_launch.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The input of every stage of a run.

    Args:
        config: The checked settings.
        registry: The plugins.
        folder: The run folder; a run that only plans writes nothing.
        console: The console to print to; by default nothing is printed.
        world: The rank of this process, and the number of processes.
        chooses_micro_batches: Whether the planner may choose another number of micro-batches than
            `config` has.
    """

    config: RunConfig
    registry: PluginRegistry
    folder: Path = Path()
    console: Console = field(default_factory=lambda: Console(quiet=True))
    world: World = field(default_factory=World)
    chooses_micro_batches: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process prints for the run, and writes its files."""
        return self.world.rank == 0

    def make(self, kind: str) -> Any:
        """Return the object built by the plugin that a config group names; see `plugins.kinds`."""
        choice = getattr(self.config, kind)
        return self.registry.make(kind, choice.name, choice.settings)

    def entry(self, kind: str) -> PluginEntry:
        """Return the registry entry of the plugin that a config group names."""
        return self.registry.entry(kind, getattr(self.config, kind).name)

    def stage(self, what: str) -> AbstractContextManager[None]:
        """Print the name of a stage, and the seconds that the `with` block took."""
        return timed(self.console, what)

    def say(self, lines: Iterable[str]) -> None:
        """Print lines as they are; long lines are wrapped with indentation."""
        say(self.console, lines)

    def warn(self, text: str) -> None:
        """Print a warning, unless the text is empty."""
        if text:
            self.console.print(f"warning: {text}")
