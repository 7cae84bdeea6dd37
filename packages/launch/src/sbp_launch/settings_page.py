"""Generate the page of all settings: every group, option and setting, its meaning and package.

`python -m sbp_launch.settings_page FILE` writes it from the installed option files and plugins, or
from those of the distributions after `--of`; `--check` tests whether FILE is up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

from sbp_core.plugins import PluginRegistry, discover
from sbp_core.serialize import read_text
from sbp_launch.apps.plan import PlanConfig
from sbp_launch.calibrate.calibration_config import CalibrateConfig
from sbp_launch.settings.catalog import Catalog, make_catalog
from sbp_launch.settings.config import GROUPS
from sbp_launch.settings.help import plain
from sbp_launch.settings.known_keys import (
    SettingRow,
    callbacks_of,
    setting_rows,
    settings_of,
    takes_of,
)

#: Settings of a command outside of config groups, by its primary config.
_OF_APPS: Mapping[str, type] = {"plan": PlanConfig, "calibrate": CalibrateConfig}

_HEAD = """# Settings

Every setting of `sbp-train`, `sbp-plan` and `sbp-calibrate`, generated from the option files and
the plugins by `python -m settings document` (in `integration/`); CI holds this page to it. On the
command line, `sbp-train --help trainer` prints the same for a group, `sbp-train --help
planner=osdp` for an option, `sbp-train --help trainer.steps` for one setting.

`GROUP=OPTION` chooses an option, and `KEY=VALUE` changes a setting:
`sbp-train optimizer=sgd optimizer.lr=0.05`. Some defaults
depend on the option that is chosen in another group; `null` stands for none.
"""

#: A row of a table: key, default, accepted values, meaning.
_Row = tuple[str, str, str, str]

#: A default that is the value of a setting in another group: its key; the rest is the fallback.
_SELECT = re.compile(r"\$\{oc\.select:([\w.]+),")


def page(catalog: Catalog) -> str:
    """Return the text of the page."""
    parts = [_HEAD, "| group | options |", "|---|---|"]
    for group in GROUPS:
        names = ", ".join(f"`{one}`" for one in catalog.options(group))
        parts.append(f"| [{group}](#{group}) | {names} |")
    parts.append("")
    for group in GROUPS:
        parts.append(f"## {group}\n")
        for option in catalog.options(group):
            config = f"{group}/{option}"
            text = " ".join(line.strip() for line in catalog.comment_lines(config))
            owners = " ".join(catalog.owners(config))
            parts += [f"### {group}={option}\n", f"{text} *{owners}*\n"]
            rows = list(_rows(catalog, group, option))
            if other := catalog.base(config):
                but = ", but these:" if rows else "."
                parts.append(f"Settings as in `{group}={other}`{but}\n")
            parts += _table(rows) if rows or not other else ()
    parts.append("## callbacks\n")
    # Callbacks have no option files.
    example = "`{name: early_stop, patience: 5}`"
    parts.append(f"Named in `trainer.callbacks`, alone or as {example}.\n")
    for entry in callbacks_of(catalog.registry):
        summary = f"{entry.summary[:1].upper()}{entry.summary[1:]}"
        parts += [f"### {entry.name}\n", f"{summary}. *{entry.distribution}*\n"]
        parts += _table(map(_row, settings_of(entry)))
    for app in _OF_APPS:
        parts += [f"## sbp-{app}\n", "Settings that belong to no group. *sbp-launch*\n"]
        parts += _table(_of_app(catalog, app))
    return "\n".join(parts).rstrip() + "\n"


def _row(row: SettingRow) -> _Row:
    return row.key, "" if row.is_heading else _default(row.value), row.takes, row.comment


def without_comment(catalog: Catalog) -> list[str]:
    """Return the settings without a comment in their files, as `file: key`."""
    rows = [
        (f"{group}/{option}.yaml", row)
        for group in GROUPS
        for option in catalog.options(group)
        for row in _rows(catalog, group, option)
    ]
    rows += [(f"{app}.yaml", row) for app in _OF_APPS for row in _of_app(catalog, app)]
    return [f"{file}: {row[0]}" for file, row in rows if not row[3]]


def catalog_of(registry: PluginRegistry, distributions: Collection[str]) -> Catalog:
    """Return the catalog of some distributions; of all if none is named."""
    chosen = PluginRegistry(
        entries=tuple(one for one in registry.entries if one.distribution in distributions),
        folders=tuple(one for one in registry.folders if one.distribution in distributions),
    )
    return make_catalog(chosen if distributions else registry)


def _rows(catalog: Catalog, group: str, option: str) -> Iterator[_Row]:
    """Yield key, default, accepted values, and meaning of every setting of an option."""
    values = yaml.safe_load(catalog.text(f"{group}/{option}"))
    config = catalog.config(group, catalog.values(f"{group}/{option}").get("name"))
    assert config is not None, f"{group}={option} names no plugin that is installed"
    # Other keys of the file are for Hydra and the launcher, and not settings.
    own = {field.name: values[field.name] for field in fields(config) if field.name in values}
    comments = catalog.comments(f"{group}/{option}")
    yield from map(_row, setting_rows(own, config, comments, group))


def _of_app(catalog: Catalog, app: str) -> Iterator[_Row]:
    """Yield the settings of a command outside of config groups."""
    config = _OF_APPS[app]
    assert is_dataclass(config), "settings are a dataclass"
    comments, takes = catalog.comments(app), takes_of(config)
    values = yaml.safe_load(catalog.text(app))
    for field in fields(config):
        name = field.name
        yield name, _default(values.get(name)), takes[name], comments.get(name, "")


def _default(value: object) -> str:
    """Return a default as it is typed; `???` in a file means that there is none."""
    if value == "???":
        return "to be given"
    if isinstance(value, str) and (select := _SELECT.match(value)):
        return f"that of `{select[1]}`, or `{_SELECT.sub('', value).rstrip('}')}`"
    if isinstance(value, Mapping) and len(value) > 1:
        return "see its file"
    return f"`{plain(value)}`"


def _table(rows: Iterable[_Row]) -> Iterator[str]:
    cells = [tuple(text.replace("|", "\\|") for text in row) for row in rows]
    if not cells:
        yield "No settings.\n"
        return
    yield "| setting | default | takes | meaning |"
    yield "|---|---|---|---|"
    for key, default, takes, comment in cells:
        yield f"| `{key}` | {default} | {takes} | {comment} |"
    yield ""


def main(words: list[str] | None = None) -> int:
    """Run the command; return the exit code: 1 if the page is not up to date or lacks comments."""
    parser = argparse.ArgumentParser(prog="sbp_launch.settings_page", description=__doc__)
    parser.add_argument("file", type=Path, help="the page")
    parser.add_argument("--of", nargs="+", default=(), help="distributions; all that are installed")
    parser.add_argument("--check", action="store_true", help="only check that it is up to date")
    options = parser.parse_args(words)
    catalog = catalog_of(discover(), options.of)
    if bare := without_comment(catalog):
        sys.stdout.write("these settings have no comment:\n  " + "\n  ".join(bare) + "\n")
        return 1
    text = page(catalog)
    if not options.check:
        options.file.write_text(text, "utf-8")
    elif not options.file.exists() or read_text(options.file) != text:
        sys.stdout.write(f"{options.file} is out of date: generate it again\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
