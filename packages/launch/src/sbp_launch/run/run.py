"""One run as a value, made once: what was chosen, the plugins that make it, where it speaks.

    program -> planned -> session -> steps -> evaluation -> summary

Each stage of `trainer` takes it, and what the stages before have made.
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
    """What every stage of a run needs.

    Args:
        config: What was chosen, checked.
        registry: The plugins.
        folder: Where it keeps what it leaves; a run that only plans leaves nothing.
        console: Where it prints; nowhere by default.
        world: This process among those of the run.
        chooses_micro_batches: Whether the planner may choose another number of them than `config`
            says.
    """

    config: RunConfig
    registry: PluginRegistry
    folder: Path = Path()
    console: Console = field(default_factory=lambda: Console(quiet=True))
    world: World = field(default_factory=World)
    chooses_micro_batches: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for the run, and writes its files."""
        return self.world.rank == 0

    def make(self, kind: str) -> Any:
        """Return what the plugin makes that a group of the config names: see `plugins.kinds`."""
        choice = getattr(self.config, kind)
        return self.registry.make(kind, choice.name, choice.settings)

    def entry(self, kind: str) -> PluginEntry:
        """Return the plugin that a group of the config names."""
        return self.registry.entry(kind, getattr(self.config, kind).name)

    def stage(self, what: str) -> AbstractContextManager[None]:
        """Print what the run is at, and the seconds of the `with` block after it."""
        return timed(self.console, what)

    def say(self, lines: Iterable[str]) -> None:
        """Print lines as they are; what does not fit goes on below, indented."""
        say(self.console, lines)

    def warn(self, text: str) -> None:
        """Print a warning, if there is one."""
        if text:
            self.console.print(f"warning: {text}")
