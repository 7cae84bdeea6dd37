"""Which pages there are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

_PATTERNS = ("*.md", "docs/**/*.md", "packages/*/*.md", "integration/*/*.md")


def pages() -> list[str]:
    """Return all pages with a fenced block, by their paths below the repository."""
    return [
        str(path.relative_to(ROOT))
        for pattern in _PATTERNS
        for path in sorted(ROOT.glob(pattern))
        if "```" in path.read_text("utf-8")
    ]
