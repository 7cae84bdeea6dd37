"""The text of `--help`: groups with their options and chosen ones, settings, flags.

Hydra's own help writes nested options as groups (`planner/manual: zero`), which cannot be typed
back; here every option reads as one writes it. Prints nothing.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from omegaconf import OmegaConf

from sbp_core.plugins import PluginRegistry
from sbp_launch.catalog import Catalog
from sbp_launch.config import GROUPS, PLUGIN_GROUPS, Application, ComposedConfig


def render_help(
    app: Application[Any], composed: ComposedConfig, catalog: Catalog, parser: ArgumentParser
) -> str:
    """Return the help of an app.

    Args:
        app: The app.
        composed: Its config with the overrides of the command line.
        catalog: What one can choose from; plugins with problems are listed.
        parser: Parser of the flags.
    """
    registry = catalog.registry
    lines = [f"{app.name}: {app.about}", ""]
    lines.append(f"usage: {app.name} [GROUP=OPTION ...] [KEY=VALUE ...] [FLAG ...]")
    lines += ["", "Options of each group (* is chosen):"]
    everything = (*GROUPS, *(one for one in catalog.groups() if one not in GROUPS))
    for group in app.groups or everything:
        lines.append(f"  {group}")
        chosen = composed.files.get(group, "")
        for option in catalog.options(group):
            mark = "*" if chosen and catalog.file(f"{group}/{option}") == chosen else " "
            told = _summary(registry, group, option) or catalog.headline(f"{group}/{option}")
            lines.append(f"    {mark} {option:<24} {told}".rstrip())
    comments = catalog.comments(app.config_name)
    example = f"{next(iter(comments))}=4" if comments else "trainer.steps=50"
    lines += ["", f"Settings (KEY=VALUE changes one, `{example}`):"]
    for key, value in composed.values.items():
        line, *more = OmegaConf.to_yaml(OmegaConf.create({key: value})).splitlines()
        comment = f"  # {comments[key]}" if key in comments else ""
        lines += [f"  {line:<24}{comment}".rstrip(), *(f"  {line}" for line in more)]
    lines += ["", "Flags:"]
    for action in parser._actions:
        if action.option_strings:
            words = " ".join(str(action.help).split()).partition(": Bash")[0]
            lines.append(f"  {', '.join(action.option_strings):<26} {words}")
    if registry.problems:
        lines += ["", "Plugins with problems:", *(f"  {one}" for one in registry.problems)]
    return "\n".join(lines) + "\n"


def _summary(registry: PluginRegistry, group: str, option: str) -> str:
    """Return the summary of the plugin that an option is named after, or `""`."""
    plugins = registry.entries if group in PLUGIN_GROUPS else ()
    return next((one.summary for one in plugins if (one.kind, one.name) == (group, option)), "")
