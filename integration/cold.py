"""Run a command of the README as on a machine with only Python: no package, home or cache.

`python integration/cold.py train [--torch REQUIREMENT] [VERSION ...]` sets up and trains in a copy
of the sources, with the Python that runs this script and every other Python of `PYTHONS` on the
machine, or with the named versions. Other versions install PyTorch if pip finds a build for CPUs
only, or if they are named, because the default build for Linux needs gigabytes of CUDA. Otherwise
they install everything except PyTorch, and print the settings of the training.

`python integration/cold.py tests` runs the tests, in place, with the Python that runs this script.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

OWN = ".".join(map(str, sys.version_info[:2]))
PYTHONS = tuple(dict.fromkeys((OWN, "3.11", "3.12", "3.13")))

#: Prefixes of variables that a new machine does not have. XDG_CONFIG_HOME replaces the files below
#: HOME, but the system's own XDG_CONFIG_DIRS stay.
DROPPED = ("HOME", "NOX", "PYTHON", "VIRTUAL_ENV", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")


def command_of(readme: str, session: str) -> tuple[str, str]:
    """Return the README's command for a session, and the arguments for a short run."""
    pattern = rf"<!-- (?:run sbp-train with: (.*)|.*) -->\n```console\n\$ (.*nox -s {session})\n"
    found = re.search(pattern, readme)
    if found is None:
        raise ValueError(f"README.md shows no command that ends with: nox -s {session}")
    return found[2], found[1] or ""


def find_python(version: str) -> str | None:
    """Return a Python such as 3.12 that can make environments; None if PATH has none."""
    command = shutil.which(f"python{version}")
    if command is None:
        return None
    # If pyenv provides this name for all of its Pythons, this variable selects one.
    environment = {**os.environ, "PYENV_VERSION": version}
    script = "import ensurepip, sys; print(sys.executable)"
    done = subprocess.run([command, "-c", script], env=environment, capture_output=True, text=True)
    return done.stdout.strip() or None


def variables(outer: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables of a new machine whose home and caches are below a folder.

    The sources of packages are not changed: pip's variables and configuration files stay, even the
    user's file, which would be below the home.
    """
    config = Path(outer.get("XDG_CONFIG_HOME") or Path(outer["HOME"], ".config"), "pip", "pip.conf")
    return {
        "PIP_CONFIG_FILE": str(config),
        **{name: value for name, value in outer.items() if not name.startswith(DROPPED)},
        "PIP_NO_CACHE_DIR": "1",
        "HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PATH": os.pathsep.join([str(folder / "venv" / "bin"), outer["PATH"]]),
    }


@contextmanager
def new_machine(python: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """Give a temporary folder, and variables under which `python3` has no packages."""
    with tempfile.TemporaryDirectory(prefix="cold-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = variables(os.environ, folder)
        for variable in ("HOME", "XDG_CACHE_HOME"):
            Path(environment[variable]).mkdir()
        subprocess.run([python, "-m", "venv", folder / "venv"], env=environment, check=True)
        yield folder, environment


def train(python: str, torch: str, *, in_any_build: bool) -> int:
    """Set up and train in a copy of the sources; return the exit code."""
    command, settings = command_of((ROOT / "README.md").read_text("utf-8"), "train")
    with new_machine(python) as (folder, environment):
        copy = folder / "sbp"
        shutil.copytree(ROOT / "packages", copy / "packages")
        (copy / "integration").mkdir()  # the noxfile needs some of its modules
        for path in filter(Path.is_file, [*ROOT.iterdir(), *ROOT.glob("integration/*")]):
            shutil.copy(path, copy / path.relative_to(ROOT))
        probe = ["python3", "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        if not in_any_build:
            probed = subprocess.run([*probe, f"{torch}+cpu"], env=environment)
            if probed.returncode:
                print(f"no {torch} for CPUs alone: all but PyTorch", flush=True)
                environment["SBP_TORCH"], settings = "", "--help"
        line = f"{command} -- {settings}"
        print(f"$ {line}", flush=True)
        return subprocess.run(["bash", "-c", line], cwd=copy, env=environment).returncode


def run_tests() -> int:
    """Run the README's tests in place; return the exit code."""
    command, _ = command_of((ROOT / "README.md").read_text("utf-8"), "tests")
    with new_machine(sys.executable) as (_, environment):
        return subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment).returncode


def main(words: list[str]) -> int:
    """Run what the command line names; return 1 if any of it fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("session", choices=["tests", "train"])
    parser.add_argument("--torch", default="torch", help="the requirement that sessions install")
    parser.add_argument("versions", nargs="*", help="of Python, such as 3.13")
    arguments = parser.parse_intermixed_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and remove the temporary folder
    if arguments.session == "tests":
        return run_tests()
    failed = False
    for version in arguments.versions or PYTHONS:
        named = version in arguments.versions
        python = sys.executable if version == OWN else find_python(version)
        if python is None:
            print(
                f"Python {version}: {'missing' if named else 'skipped, it is missing'}", flush=True
            )
            failed |= named
            continue
        began = time.perf_counter()
        code = train(python, arguments.torch, in_any_build=named or version == OWN)
        result = f"failed with exit code {code}" if code else "passed"
        print(f"Python {version}: {result} in {time.perf_counter() - began:.0f} s", flush=True)
        failed |= code != 0
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
