"""Write the text of `--help`: all options, or, for a topic, the meaning of every setting.

Hydra's own help writes nested options as groups (`planner/manual: zero`), which the command line
does not accept; here, every option and setting is shown as users write it.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

from sbp_core.errors import ConfigError, nearest
from sbp_core.plugins import PluginEntry
from sbp_launch.settings.catalog import Catalog
from sbp_launch.settings.config import GROUPS, Application, ComposedConfig
from sbp_launch.settings.known_keys import (
    SettingRow,
    callbacks_of,
    known_settings,
    setting_rows,
    settings_of,
)

#: The width of a help text that is not printed on a terminal, in columns.
_WIDTH = 100

#: The width of an option, and of a setting with its value, in columns.
_OPTION, _SETTING = 24, 34

#: The useful flags of Hydra.
_FLAGS = {
    "--help, -h [TOPIC]": "this page, or the settings of a group, an option, or one setting",
    "--cfg, -c job": "show the whole config that the command line makes, and run nothing",
    "--multirun, -m": "one job for each value: trainer.steps=50,100",
    "--config-dir, -cd FOLDER": "options of your own, as FOLDER/GROUP/NAME.yaml",
    "--config-name, -cn NAME": "another primary config",
    "--info, -i searchpath": "the folders that are searched for options",
    "--shell-completion, -sc": "completion in a shell: see --hydra-help",
    "--hydra-help": "all flags of Hydra",
}


def split_topics(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without the words right after `--help`, and these words.

    >>> split_topics(["planner=osdp", "--help", "trainer", "-m"])
    (['planner=osdp', '--help', '-m'], ['trainer'])
    """
    kept: list[str] = []
    topics: list[str] = []
    behind = False
    for text in arguments:
        is_flag = text.startswith("-")
        behind = text in ("--help", "-h") or (behind and not is_flag)
        (topics if behind and not is_flag else kept).append(text)
    return kept, topics


def overrides_of(topics: Sequence[str], catalog: Catalog) -> list[str]:
    """Return the overrides among topics: `planner=osdp`, or `osdp` for short."""
    found = []
    for topic in topics:
        owners = [group for group in catalog.groups() if topic in catalog.options(group)]
        if "=" in topic:
            found.append(topic)
        elif topic not in catalog.groups() and len(owners) == 1:
            found.append(f"{owners[0]}={topic}")
    return found


def render_help(app: Application[Any], composed: ComposedConfig, catalog: Catalog) -> str:
    """Return the help of an app: groups, options, flags."""
    width = _columns()
    lines = [f"{app.name}: {app.about}", ""]
    usage = ("[GROUP=OPTION ...] [KEY=VALUE ...] [FLAG ...]", *app.usage)
    heads = ("usage: ", *[" " * 7] * len(app.usage))
    lines += [f"{head}{app.name} {one}" for head, one in zip(heads, usage, strict=True)]
    groups = app.groups or (*GROUPS, *(one for one in catalog.groups() if one not in GROUPS))
    shown = "trainer" if "trainer" in groups else groups[-1]
    example = f"{app.name} --help {shown}"
    lines += ["", f"Options of each group (* is chosen; `{example}` explains its settings):"]
    for group in groups:
        lines.append(f"  {group}")
        chosen = composed.files.get(group, "")
        for option in catalog.options(group):
            mark = "*" if chosen and catalog.file(f"{group}/{option}") == chosen else " "
            told = catalog.summary(group, option)
            start = f"    {mark} {option:<{_OPTION}} "
            lines.append(f"{start}{_shorten(told, width - len(start))}".rstrip())
    own = [key for key in composed.values if key not in groups]
    if own:
        lines += ["", f"Settings of its own (`{own[0]}=VALUE` changes one):"]
        for row in _rows(app, composed, catalog, ""):
            lines += _lines(row, width)
    lines += ["", "Settings (`KEY=VALUE` changes one):"] if groups else []
    topics = {
        "trainer": "every setting of the chosen option, with its value",
        "planner=osdp": "every setting of another option",
        "trainer.steps": "one setting, and what it takes",
    }
    if app.groups:
        topics = {shown: "every setting of the chosen option"}
    for topic, what in topics.items():
        lines.append(f"  {app.name + ' --help ' + topic:<40} {what}"[:width])
    lines += ["", "Flags:"]
    lines += [f"  {flag:<{_OPTION + 4}} {what}"[:width] for flag, what in _FLAGS.items()]
    if catalog.registry.problems:
        lines += ["", "Plugins with problems:"]
        lines += [f"  {one}" for one in catalog.registry.problems]
    return "\n".join(lines) + "\n"


def _lines(row: SettingRow, width: int, *, whole: bool = False) -> Iterator[str]:
    """Yield the lines of a setting; `whole` adds the values that it accepts."""
    text = f"  {row.key}:" if row.is_heading else f"  {row.key}={plain(row.value)}"
    nested: list[str] = []
    if isinstance(row.value, Mapping) and len(text) > _SETTING:
        # Too long for a line: in this form, it can be typed into a file.
        text = f"  {row.key}:"
        for name, item in row.value.items():
            flow = None if isinstance(item, Mapping | list | tuple) else False
            item_text = yaml.safe_dump({name: item}, default_flow_style=flow, width=10**6)
            nested.append(f"      {item_text.rstrip()}")
    takes = f" (takes {row.takes})" if whole and row.takes and not row.is_heading else ""
    told = textwrap.wrap(f"{row.comment}{takes}".strip(), max(24, width - _SETTING - 2))
    if len(text) > _SETTING or not told:
        yield text
    else:
        yield f"{text:<{_SETTING}}  {told.pop(0)}"
    for line in told:
        yield f"{'':<{_SETTING}}  {line}"
    yield from nested


def _shorten(text: str, width: int) -> str:
    """Return a text, shortened to fit: its first clauses, or else its first words.

    >>> _shorten("Llama over bytes, 0.9 million parameters", 30), _shorten("one two three", 11)
    ('Llama over bytes', 'one two ...')
    """
    if len(text) <= width:
        return text
    clauses = [match.start() for match in re.finditer("[,;:] ", text) if match.start() <= width]
    if clauses and clauses[-1] > width // 3:
        return text[: clauses[-1]]
    return textwrap.shorten(text, width, placeholder=" ...")


def plain(value: object) -> str:
    """Return a value as users type it on the command line.

    >>> plain([1, "a", None]), plain(1e11), plain(""), plain({"a": True})
    ('[1,a,null]', '1e+11', "''", '{a: true}')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and float(f"{value:g}") == value:
        return str(value) if len(str(value)) < 8 else f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(plain, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {plain(item)}" for name, item in value.items()) + "}"
    return "''" if value == "" else str(value)


def render_topics(
    app: Application[Any], composed: ComposedConfig, catalog: Catalog, topics: Sequence[str]
) -> str:
    """Return the help on topics: the settings of a group or an option, or one setting.

    Args:
        app: The app.
        composed: Its config, with the options that the topics name.
        catalog: The groups and options.
        topics: `trainer`, `planner=osdp`, `osdp`, `trainer.steps`, `steps`, or a callback.

    Raises:
        ConfigError: a topic is none of these; names the nearest.
    """
    width, lines = _columns(), []
    callbacks = callbacks_of(catalog.registry) if "trainer" in composed.files else []
    rows = [row for group in ("", *composed.values) for row in _rows(app, composed, catalog, group)]
    for topic in topics:
        # The topic is a group, or an option of one.
        key = topic.partition("=")[0]
        owners = [group for group in catalog.groups() if topic in catalog.options(group)]
        if key not in catalog.groups() and len(owners) == 1:
            key = owners[0]
        found = [row for row in rows if row.key == key or row.key.endswith(f".{key}")]
        below = [row for row in rows if row.key.startswith(f"{key}.")]
        if key in composed.files:
            # The heading: the chosen option, its distribution, the other options.
            option = _option(composed, catalog, key)
            owner = " ".join(catalog.owners(f"{key}/{option}"))
            lines.append(f"{key}={option}, of {owner}: {composed.files[key]}")
            lines += [f"  {line}" for line in catalog.comment_lines(f"{key}/{option}")]
            if others := [one for one in catalog.options(key) if one != option]:
                text, indent = f"other options: {', '.join(others)}", "  "
                lines += textwrap.wrap(
                    text, width - 2, initial_indent=indent, subsequent_indent=indent
                )
            lines.append("")
            lines += [line for row in below for line in _lines(row, width)] or ["  no settings"]
        elif found or below:
            for row in found or below:
                lines += _lines(row, width, whole=not below)
                lines += [line for one in below for line in _lines(one, width, whole=True)]
            if [row.key for row in found] == ["trainer.callbacks"]:
                lines += [line for one in callbacks for line in _callback(one, width)]
        elif named := [one for one in callbacks if one.name == topic]:
            lines += [line for one in named for line in _callback(one, width)]
        else:
            raise _unknown(topic, rows, catalog, composed)
        lines.append("")
    return "\n".join(lines)


def _callback(entry: PluginEntry, width: int) -> Iterator[str]:
    """Yield the description of a callback, and its settings."""
    yield f"callback {entry.name}, of {entry.distribution}: {entry.summary}"
    for one in settings_of(entry):
        yield from _lines(one, width, whole=True)


def _rows(
    app: Application[Any], composed: ComposedConfig, catalog: Catalog, group: str
) -> Iterator[SettingRow]:
    """Yield the settings of a group, or, for `""`, of the app itself."""
    if not group:
        comments = catalog.comments(app.config_name)
        for key, value in composed.values.items():
            if key not in composed.files:
                yield SettingRow(key=key, value=value, comment=comments.get(key, ""))
        return
    values = composed.values[group]
    if group in composed.files and isinstance(values, Mapping):
        config = catalog.config(group, values.get("name"))
        comments = catalog.comments(f"{group}/{_option(composed, catalog, group)}")
        own = {name: value for name, value in values.items() if name != "name"}
        rows = setting_rows(own, config, comments, group)
        yield from (row for row in rows if row.comment or not row.is_heading)


def _option(composed: ComposedConfig, catalog: Catalog, group: str) -> str:
    """Return the chosen option of a group, as users write it."""
    file = composed.files[group]
    return next(one for one in catalog.options(group) if catalog.file(f"{group}/{one}") == file)


def _unknown(
    topic: str, rows: Sequence[SettingRow], catalog: Catalog, composed: ComposedConfig
) -> ConfigError:
    groups = [group for group in GROUPS if group in composed.files]
    # Options that have this setting, if no chosen option does.
    settings = known_settings(composed, catalog.registry)
    takers = (one for one in settings if topic in (one.key, one.leaf))
    others: dict[str, None] = {}
    for choice in (choice for setting in takers for choice in setting.options):
        group, _, name = choice.partition("=")
        names = [one for one in catalog.options(group) if f"{one}/".startswith(f"{name}/")]
        others |= dict.fromkeys(f"{group}={one}" for one in names[:1])
    options = [f"{group}={one}" for group in groups for one in catalog.options(group)]
    leaves = {row.key.rpartition(".")[2] for row in rows}
    near = nearest(topic, [*composed.files, *(row.key for row in rows), *options, *leaves])
    if others:
        return ConfigError(
            f"--help {topic}: no chosen option has this setting",
            where="the command line",
            accepted="a setting of a chosen option, or of an option that is named",
            todo=f"try --help {' or --help '.join(others)}",
        )
    return ConfigError(
        f"--help {topic}: there is no such group, option or setting",
        where="the command line",
        accepted=f"one of the groups {', '.join(groups)}; GROUP=OPTION; a key",
        todo=f"did you mean --help {near}?" if near else "--help alone lists the options",
    )


def _columns() -> int:
    """Return the width of the terminal in columns."""
    columns = shutil.get_terminal_size((_WIDTH, 24)).columns
    return max(60, columns) if sys.stdout.isatty() else _WIDTH
