"""The command `sbp-plugins`: list the installed plugins, their distributions and their health.

`check NAME` runs the checks and suites of `sbp_core.testing.suites` under pytest, `new KIND NAME`
writes a package that passes them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from sbp_core.errors import SbpError, SbpLookupError
from sbp_core.output import standard_output
from sbp_core.plugins.discovery import discover, sources_of
from sbp_core.plugins.hooks import KINDS
from sbp_core.plugins.registry import PluginEntry, PluginRegistry
from sbp_core.plugins.template import TEMPLATES, write_template

COLUMNS = ("kind", "name", "distribution", "version", "API", "health")


@standard_output("sbp-plugins")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program; `sys.argv[1:]` if omitted.

    Returns:
        Exit code: 1 if there are problems and `--strict` is given, or a check fails; 2 if there is
        nothing to check, or a package cannot be written; else 0.
    """
    parser = argparse.ArgumentParser(
        prog="sbp-plugins", description="List the plugins of sbp, check one, or begin one."
    )
    parser.add_argument("--kind", choices=sorted(KINDS), help="list this kind only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if anything is wrong")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    checking = commands.add_parser("check", help="run all checks and suites on a plugin")
    checking.add_argument("name", metavar="NAME", help="of its distribution or entry point")
    checking.add_argument("pytest", nargs="*", help="arguments of pytest, after --: -- -k planner")
    beginning = commands.add_parser("new", help="write a package that passes the checks")
    kinds = sorted(TEMPLATES)
    beginning.add_argument("kind", metavar="KIND", choices=kinds, help=", ".join(kinds))
    beginning.add_argument("name", metavar="NAME", help="of the distribution: my-planner")
    options = parser.parse_args(arguments)
    try:
        if options.command == "check":
            return check_plugin(options.name, options.pytest)
        if options.command == "new":
            made = write_template(options.kind, options.name, Path())
            sys.stdout.write(f"wrote {made}: pip install -e {made}, sbp-plugins check {made}\n")
            return 0
    except SbpError as error:
        sys.stderr.write(f"sbp-plugins: {error}\n")
        return 2
    registry = discover()
    entries = [entry for entry in registry.entries if options.kind in (None, entry.kind)]
    text = as_json(entries, registry) if options.json else as_table(entries, registry)
    sys.stdout.write(text + "\n")
    return 1 if options.strict and registry.problems else 0


def check_plugin(name: str, arguments: Sequence[str] = ()) -> int:
    """Run the checks of a plugin and the conformance suites of its kinds under pytest.

    Args:
        name: The name of its distribution or entry point.
        arguments: More arguments of pytest.

    Returns:
        Exit code: 0 if all checks pass, 1 if not, 2 if nothing was checked.

    Raises:
        SbpLookupError: pytest is not installed, or no such plugin.
    """
    try:
        import pytest
    except ImportError as error:
        raise SbpLookupError(
            "the checks of a plugin are tests of pytest, which is not installed",
            todo="pip install pytest",
        ) from error
    sources_of(name)  # refuses an unknown name before pytest starts
    with TemporaryDirectory(prefix="sbp-plugins-") as folder:
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\nmarkers = exhaustive: takes long\n", encoding="utf-8")
        own = ["-p", "sbp_core.testing.suites", "-p", "no:cacheprovider", "--sbp-plugin", name]
        place = ["-c", str(settings), "--rootdir", folder, "-m", "not exhaustive"]
        code = int(pytest.main([*own, *place, "-q", "-ra", *arguments, folder]))
    return code if code < 2 else 2


def as_json(entries: Sequence[PluginEntry], registry: PluginRegistry) -> str:
    """Return the listing as one JSON object with `plugins` and `problems`."""
    return json.dumps(
        {
            "plugins": [
                {
                    "kind": entry.kind,
                    "name": entry.name,
                    "distribution": entry.distribution,
                    "version": entry.version,
                    "api_version": entry.api_version,
                    "health": entry.health,
                    "summary": entry.summary,
                }
                for entry in entries
            ],
            "problems": [
                {
                    "plugin": problem.plugin,
                    "distributions": list(problem.distributions),
                    "what": problem.what,
                }
                for problem in registry.problems
            ],
        },
        indent=2,
    )


def as_table(entries: Sequence[PluginEntry], registry: PluginRegistry) -> str:
    """Return the listing as an aligned table, with the problems below it."""
    rows = [
        COLUMNS,
        *(
            (
                entry.kind,
                entry.name,
                entry.distribution,
                entry.version or "-",
                "-" if entry.api_version is None else str(entry.api_version),
                entry.health,
            )
            for entry in entries
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if not entries:
        lines.append("(none)")
    if registry.problems:
        lines += ["", f"{len(registry.problems)} problem(s):"]
        lines += [f"  {problem}" for problem in registry.problems]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
