"""The documents of this repository as pages of a site: hooks of mkdocs, see `mkdocs.yml`.

A page has the path of its document in the repository, so that links between documents do not
change. Links to other existing files are redirected to the repository's address. Dead links are not
changed, and mkdocs refuses them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repository import LINK_OR_CODE, PACKAGES, ROOT, documents

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

URLS = next(one for one in PACKAGES if one.name == "sbp-core").project["urls"]

#: Comments for the program that runs the documents.
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> None:
    """Set the address of the repository, and the order of pages."""
    config.site_url, config.repo_url, config.repo_name = URLS["Homepage"], URLS["Source"], "Source"
    config.extra_css = ["wide.css"]
    plugins = [path for path in documents() if path.startswith("integration/")]
    config.nav = [
        "README.md",
        *_contents(),
        {"Packages": [*_of_packages("README.md"), *plugins]},
        {"Changes": _of_packages("CHANGELOG.md")},
        "CONTRIBUTING.md",
    ]


def _contents() -> list[str | dict[str, list[str]]]:
    """Return the sections of docs/README.md, each with its pages in order."""
    text = (ROOT / "docs" / "README.md").read_text("utf-8")
    found: list[str | dict[str, list[str]]] = ["docs/README.md"]
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        paths = [path for path in LINK_OR_CODE.findall(body) if path and "decisions" not in path]
        listed = [f"docs/{path}" for path in paths]
        found.append({title: listed})
    decisions = [path for path in documents() if path.startswith("docs/decisions/")]
    return [*found, {"Decisions": decisions}]


def _of_packages(file: str) -> list[dict[str, str]]:
    return [{one.project["name"]: f"packages/{one.name}/{file}"} for one in PACKAGES]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Replace the pages of one folder by all documents."""
    from mkdocs.structure.files import File

    for page in files.documentation_pages():
        files.remove(page)
    for path in documents():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    # Code has 100 columns, and there are wide tables.
    files.append(File.generated(config, "wide.css", content=".md-grid {max-width: 80rem}"))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Redirect links to other files to the repository."""
    return linked(_COMMENT.sub("", markdown), page.file.src_uri, documents())


def linked(markdown: str, path: str, pages: Collection[str], root: Path = ROOT) -> str:
    """Return the text of a document with links to pages, or to files of the repository.

    Args:
        markdown: Text of the document.
        path: Path of the document, from the root of the repository.
        pages: Paths of all documents, from the root of the repository.
        root: Root of the repository.
    """

    def link(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or "://" in target:  # code, or an external link
            return found[0]
        inside = os.path.normpath(Path(path).parent / target)
        if inside in pages or inside.startswith("..") or not (root / inside).exists():
            return found[0]
        if f"{inside}/README.md" in pages:
            return found[0].replace(target, f"{target.rstrip('/')}/README.md")
        return found[0].replace(target, f"{URLS['Source']}/{inside}")

    return LINK_OR_CODE.sub(link, markdown)
