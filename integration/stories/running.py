"""Run proofs, and return their outcomes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from stories.proofs import ROOT, Command, Missing, NamedTests, Proof

#: Number of lines of a failed program that are kept.
_SHOWN = 15

#: The lines about a property in the statistics of Hypothesis that pytest prints.
_STATISTICS = re.compile(r"^(tests/\S+?)(?:\[.*)?:\s*$")
_EXAMPLES = re.compile(r"(\d+) passing\b")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a proof.

    Args:
        count: Number of successful cases; a property counts its examples.
        failed: Number of failed cases.
        skipped: Number of cases that this machine cannot run.
        text: The relevant output of a failure.
    """

    count: int = 0
    failed: int = 0
    skipped: int = 0
    text: str = ""

    @property
    def says(self) -> str:
        """The word for it in the table."""
        if self.failed:
            return "failed"
        return "passed" if self.count else "skipped"


def run_proofs(
    proofs: Iterable[Proof], *, jobs: int = 1, quick: bool = False
) -> dict[Proof, Outcome]:
    """Run proofs, all proofs of one folder at once; missing or skipped proofs have no outcome.

    Args:
        proofs: The proofs.
        jobs: Number of processes of pytest.
        quick: Whether to leave out programs and the tests of the session `exhaustive`.
    """
    chosen = list(dict.fromkeys(one for one in proofs if not isinstance(one, Missing)))
    tests = [one for one in chosen if isinstance(one, NamedTests)]
    found: dict[Proof, Outcome] = {}
    for folder in dict.fromkeys(one.folder for one in tests):
        here = [one for one in tests if one.folder == folder]
        found |= _run_tests(ROOT / folder, here, jobs, quick)
    for command in () if quick else (one for one in chosen if isinstance(one, Command)):
        found[command] = _run_command(command)
    return found


def _run_tests(
    folder: Path, tests: list[NamedTests], jobs: int, quick: bool
) -> dict[Proof, Outcome]:
    """Run the tests of one folder in one call of pytest."""
    ids = list(dict.fromkeys(name for one in tests for name in one.ids))
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *ids]
        command += ["--hypothesis-show-statistics"]
        command += ["-m", "not exhaustive and not gpu"] if quick else []
        command += ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
        sys.stdout.write(f"pytest in {folder.relative_to(ROOT)}: {len(ids)} names ...\n")
        sys.stdout.flush()
        done = _run(command, folder)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    if not cases and done.returncode not in (0, 5):
        text = "\n".join(done.stdout.splitlines()[-_SHOWN:])
        return {one: Outcome(failed=1, text=text) for one in tests}
    examples = examples_of(done.stdout)
    sys.stdout.write(f"  {done.stdout.rstrip().splitlines()[-1]}\n")
    return {one: _outcome(one, cases, examples) for one in tests}


def examples_of(text: str) -> dict[str, int]:
    """Return the number of passed examples of each property, from the output of pytest."""
    found: defaultdict[str, int] = defaultdict(int)
    name = ""
    for line in text.splitlines():
        if match := _STATISTICS.match(line):
            name = match[1]
        elif name:
            found[name] += sum(map(int, _EXAMPLES.findall(line)))
    return dict(found)


def _outcome(
    tests: NamedTests, cases: Iterable[ElementTree.Element], examples: Mapping[str, int]
) -> Outcome:
    """Return the outcome of tests from the report of pytest."""
    count = failed = skipped = 0
    text, counted = "", set()
    for case in cases:
        _, file, *classes = case.get("classname", "").split(".")
        function = case.get("name", "").partition("[")[0]
        path = "::".join([f"tests/{file}.py", *classes, function])
        if not any(path == one or path.startswith(f"{one}::") for one in tests.ids):
            continue
        bad = next((one for one in case if one.tag in ("failure", "error")), None)
        if bad is not None:
            failed += 1
            told = "\n".join((bad.text or "").splitlines()[-_SHOWN:])
            text += f"{path}\n{told}\n"
        elif case.find("skipped") is not None:
            skipped += 1
        elif path not in examples:
            count += 1
        elif path not in counted:
            count += max(1, examples[path])
            counted.add(path)
    return Outcome(count, failed, skipped, text)


def _run_command(command: Command) -> Outcome:
    """Run a program; count its cases from its JSON file or its output."""
    sys.stdout.write(f"{command} ...\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "outcomes.json")
        words = {"python": sys.executable, "JSON": str(file)}
        done = _run([words.get(word, word) for word in command.words], ROOT / "integration")
        if file.exists():
            count = len(json.loads(file.read_text("utf-8")))
        elif command.counted:
            found = re.findall(command.counted, done.stdout)
            count = sum(int(number.replace(",", "")) for number in found)
        else:
            count = 1
    if done.returncode or not count:
        return Outcome(count, failed=1, text="\n".join(done.stdout.splitlines()[-_SHOWN:]))
    return Outcome(count)


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "true"}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
