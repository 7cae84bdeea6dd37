"""Build, check and tag a release of one package; push and upload nothing.

`python integration/release.py PACKAGE`, in an environment with build, twine and griffe, does all
steps or leaves no tag:

1. It checks that the working tree is clean, that the version in `pyproject.toml` has no tag and is
   higher than all tagged versions, that the changelog has a heading with version and date, and that
   the changes of the API require no higher version.
2. It builds the source distribution, and the wheel from it, into `dist/`, and twine checks them.
3. It tags the commit: `sbp-core-v0.1.0`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from difflib import get_close_matches
from pathlib import Path

from api.compare import compare
from repository import ROOT, Package, packages_below

#: A placeholder for the address of the project, which has none yet.
_NO_ADDRESS = "//example.org/"


class ReleaseError(Exception):
    """A package cannot be released; the message names the reason and the remedy."""


def find(root: Path, name: str) -> Package:
    """Return a package by the name of its folder or of its distribution.

    Raises:
        ReleaseError: there is no such package.
    """
    packages = packages_below(root)
    names = {one: package for package in packages for one in (package.name, _distribution(package))}
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(sorted(names))}"
        raise ReleaseError(f"no package is called {name!r}: {hint}")
    return names[name]


def faults(root: Path, package: Package) -> Iterator[str]:
    """Yield the obstacles to a release of a package, with remedies."""
    version, tag = str(package.project["version"]), tag_of(package)
    if changed := git(root, "status", "--porcelain").splitlines():
        yield f"{len(changed)} files are not committed, such as {changed[0][3:]}: commit them"
    if git(root, "tag", "--list", tag):
        yield f"the tag {tag} exists: raise the version in {package.name}/pyproject.toml"
    changelog = package.folder / "CHANGELOG.md"
    history = changelog.read_text("utf-8") if changelog.exists() else ""
    heading = re.search(rf"^## {re.escape(version)}(?!\S)(.*)$", history, re.MULTILINE)
    wanted = f"## {version} ({date.today()})"
    if heading is None:
        yield f"the changelog has no heading for {version}: write {wanted}"
    elif not re.fullmatch(r" \(\d{4}-\d\d-\d\d\)", heading[1]):
        yield f"the changelog says {heading[0]!r}, without a day: write {wanted}"
    for verdict in compare(root, folder=package.folder.name):
        if verdict.release and verdict.version <= verdict.released:
            yield f"{version} is no higher than what {verdict.release} released"
        if not verdict.ok:
            yield str(verdict)


def build(root: Path, package: Package) -> list[Path]:
    """Build the source distribution and the wheel of it, check them, and return them.

    Raises:
        ReleaseError: they cannot be built, or twine refuses them.
    """
    module, version = package.module, package.project["version"]
    target = root / "dist"
    run(root, sys.executable, "-m", "build", "--outdir", str(target), str(package.folder))
    built = [target / f"{module}-{version}{end}" for end in (".tar.gz", "-py3-none-any.whl")]
    run(root, sys.executable, "-m", "twine", "check", "--strict", *map(str, built))
    return built


def release(root: Path, name: str) -> str:
    """Build, check and tag a release; return the tag.

    Raises:
        ReleaseError: it cannot be released; no tag is left.
    """
    package = find(root, name)
    if found := list(faults(root, package)):
        raise ReleaseError("\n".join([f"{package.name} is not ready:", *found]))
    built = build(root, package)
    tag = tag_of(package)
    about = f"{_distribution(package)} {package.project['version']}"
    run(root, "git", "tag", "--annotate", "--message", about, tag)
    print(*(f"built {path.relative_to(root)}" for path in built), f"tagged {tag}", sep="\n")
    if any(_NO_ADDRESS in url for url in package.project.get("urls", {}).values()):
        print("warning: its project URLs lead to example.org, which stands in for an address")
    paths = " ".join(str(path.relative_to(root)) for path in built)
    print(f"nothing was pushed or uploaded; to do so:\n  git push origin {tag}")
    print(f"  python -m twine upload {paths}")
    return tag


def tag_of(package: Package) -> str:
    """Return the tag of the version of a package: `sbp-core-v0.1.0`."""
    return f"{_distribution(package)}-v{package.project['version']}"


def _distribution(package: Package) -> str:
    return str(package.project["name"])


def git(root: Path, *arguments: str) -> str:
    """Return the output of git."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run(root: Path, *command: str) -> None:
    """Run a command.

    Raises:
        ReleaseError: the command fails.
    """
    code = subprocess.run(command, cwd=root).returncode
    if code:
        raise ReleaseError(f"it ended with exit code {code}: {' '.join(command)}")


def main(words: list[str], root: Path = ROOT) -> int:
    """Run the command; return 1 if the package cannot be released."""
    try:
        if len(words) != 1:
            raise ReleaseError("name one package: nox -s release -- sbp-core")
        release(root, words[0])
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
