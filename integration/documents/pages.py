"""The list of pages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

_PATTERNS = ("*.md", "docs/**/*.md", "packages/*/*.md", "integration/*/*.md")


def documents() -> list[str]:
    """Return all documents by their paths below the repository."""
    found = (path for pattern in _PATTERNS for path in sorted(ROOT.glob(pattern)))
    return [str(path.relative_to(ROOT)) for path in found]


def pages() -> list[str]:
    """Return the documents with a fenced block."""
    return [name for name in documents() if "```" in (ROOT / name).read_text("utf-8")]
