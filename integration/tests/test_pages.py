"""The site of the documents: which links lead to the repository in place of a page."""

from __future__ import annotations

from pathlib import Path

import pytest

import pages

SOURCE = pages.URLS["Source"]


@pytest.mark.parametrize(
    ("written", "linked"),
    [
        ("[a page](other.md#part)", "[a page](other.md#part)"),
        ("[its folder](../guide)", "[its folder](../guide/README.md)"),
        ("[code](../src/code.py)", f"[code]({SOURCE}/src/code.py)"),
        ("[a line](../src/code.py#L3)", f"[a line]({SOURCE}/src/code.py#L3)"),
        ("[a folder](../src/)", f"[a folder]({SOURCE}/src)"),
        ("[nothing](../src/gone.py)", "[nothing](../src/gone.py)"),
        ("[outside](../../other/file)", "[outside](../../other/file)"),
        ("[far](https://example.org/a)", "[far](https://example.org/a)"),
        ("`x[0](../src)`", "`x[0](../src)`"),
        ("```\nx[0](../src)\n```", "```\nx[0](../src)\n```"),
    ],
)
def test_only_files_that_are_no_pages_are_looked_up_in_the_repository(
    written: str, linked: str, tmp_path: Path
) -> None:
    for folder in ("docs", "guide", "src"):
        (tmp_path / folder).mkdir()
    for file in ("docs/page.md", "docs/other.md", "guide/README.md", "src/code.py"):
        (tmp_path / file).touch()
    known = ["docs/page.md", "docs/other.md", "guide/README.md"]

    assert pages.linked(written, "docs/page.md", known, tmp_path) == linked


def test_every_document_is_in_the_navigation_once() -> None:
    class Config:
        nav: list[object]

    config = Config()
    pages.on_config(config)  # type: ignore[arg-type] # as far as it is used

    assert sorted(_leaves(config.nav)) == sorted(pages.documents())


def _leaves(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [path for part in parts for path in _leaves(part)]
