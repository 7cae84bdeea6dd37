"""The text of `--help`: groups with their options and chosen ones, settings, flags.

Hydra's own help writes nested options as groups (`planner/manual: zero`), which cannot be typed
back; here every option reads as one writes it. Prints nothing.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence

from omegaconf import OmegaConf

from sbp_core.plugins import Registry
from sbp_launch.catalog import Catalog
from sbp_launch.config import GROUPS, PLUGIN_GROUPS, Composed


def render_help(
    name: str,
    about: str,
    composed: Composed,
    catalog: Catalog,
    registry: Registry,
    parser: ArgumentParser,
    groups: Sequence[str] = (),
    config_name: str = "",
) -> str:
    """Return the help of an app.

    Args:
        name: Name of the app.
        about: What it does.
        composed: Config with the overrides of the command line.
        catalog: Groups and options.
        registry: Plugins; their summaries and problems are shown.
        parser: Parser of the flags.
        groups: The groups that it has; empty for all.
        config_name: Its primary config, whose comments explain the settings of its own.
    """
    lines = [f"{name}: {about}", "", f"usage: {name} [GROUP=OPTION ...] [KEY=VALUE ...] [FLAG ...]"]
    lines += ["", "Options of each group (* is chosen):"]
    everything = (*GROUPS, *(one for one in catalog.groups() if one not in GROUPS))
    for group in groups or everything:
        lines.append(f"  {group}")
        chosen = composed.files.get(group, "")
        for option in catalog.options(group):
            mark = "*" if chosen and catalog.file(f"{group}/{option}") == chosen else " "
            told = _summary(registry, group, option) or catalog.headline(f"{group}/{option}")
            lines.append(f"    {mark} {option:<24} {told}".rstrip())
    comments = catalog.comments(config_name) if config_name else {}
    example = f"{next(iter(comments))}=4" if comments else "trainer.steps=50"
    lines += ["", f"Settings (KEY=VALUE changes one, `{example}`):"]
    for key, value in composed.values.items():
        line, *more = OmegaConf.to_yaml(OmegaConf.create({key: value})).splitlines()
        comment = comments.get(str(key), "")
        lines += [f"  {line:<24}  # {comment}" if comment else f"  {line}"]
        lines += [f"  {line}" for line in more]
    lines += ["", "Flags:"]
    for action in parser._actions:
        if action.option_strings:
            words = " ".join(str(action.help).split()).partition(": Bash")[0]
            lines.append(f"  {', '.join(action.option_strings):<26} {words}")
    if registry.problems:
        lines += ["", "Plugins with problems:", *(f"  {one}" for one in registry.problems)]
    return "\n".join(lines) + "\n"


def _summary(registry: Registry, group: str, option: str) -> str:
    """Return the summary of the plugin that an option is named after, or `""`."""
    if group not in PLUGIN_GROUPS or option not in registry.names(group):
        return ""
    return next(
        entry.summary for entry in registry.entries if (entry.kind, entry.name) == (group, option)
    )
