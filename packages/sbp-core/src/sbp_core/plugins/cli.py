"""The command `sbp-plugins`: what is installed, from where, and whether it is healthy.

Prints; decides nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from sbp_core.plugins.discovery import discover
from sbp_core.plugins.hooks import KINDS
from sbp_core.plugins.registry import PluginEntry, PluginRegistry
from sbp_core.standard_streams import standard_streams

COLUMNS = ("kind", "name", "distribution", "version", "API", "health")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program; `sys.argv[1:]` if omitted.

    Returns:
        Exit code: 1 if there are problems and `--strict` is given, else 0.
    """
    parser = argparse.ArgumentParser(prog="sbp-plugins", description="List the plugins of sbp.")
    parser.add_argument("--kind", choices=sorted(KINDS), help="list this kind only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if anything is wrong")
    with standard_streams("sbp-plugins"):
        options = parser.parse_args(arguments)
        registry = discover()
        entries = [entry for entry in registry.entries if options.kind in (None, entry.kind)]
        text = as_json(entries, registry) if options.json else as_table(entries, registry)
        sys.stdout.write(text + "\n")
    return 1 if options.strict and registry.problems else 0


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
