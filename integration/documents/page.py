"""Run a page: its commands in a shell, its Python in this process, both in the current folder."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from documents import blocks
from documents.blocks import Block, Command
from documents.compare import missing
from documents.pages import ROOT
from forked import COMMANDS, can_fork, run_forked

#: The longest time of a command of a document, in seconds.
DEADLINE_S = 240

#: Commands with which readers install the packages, which are already installed here.
_NOX = re.compile(
    r"^python3 -m nox -s train(?: --)?|^(?:python3 -m pip install nox && )?python3 -m nox -s train"
)


def _ours(text: str) -> list[str] | None:
    """Return a command of ours as module and arguments; None if unknown, or if it needs a shell."""
    try:
        name, *arguments = shlex.split(text, comments=True)
    except ValueError:
        return None
    if name not in COMMANDS or re.search(r"[|&;<>`$]", text):
        return None
    return [COMMANDS[name], *arguments]


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a page: number of runs, skipped blocks with reasons, faults, and times."""

    num_run: int = 0
    not_run: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Page:
    """A page while it is run.

    Args:
        name: Its name in messages.
        names: The globals of its Python blocks.
        printed: The output of the last command.
        last: The last command.
    """

    name: str
    report: Report = field(default_factory=Report)
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: list[str] = field(default_factory=list)
    last: str = ""

    def run(self, block: Block) -> None:
        """Run, parse or compare a block, according to its language and the comments above it."""
        if block.not_run:
            self.report.not_run.append(f"{self.name}:{block.line}: {block.not_run}")
            return
        for command in block.first:
            self._shell(command, block.line)
        if block.is_output:
            self._compare(block.text.splitlines(), block.line)
            return
        match block.language:
            case "console":
                for command in blocks.commands(block):
                    self._command(block, command)
            case "python" if ">>> " in block.text:
                self._examples(block)
            case "python":
                self._program(block)
            case "toml" | "yaml":
                self._parse(block)
            case "bash" | "sh" | "shell":
                self._fault(block.line, "commands stand in `console` blocks, each behind `$ `")

    def _fault(self, line: int, text: str) -> None:
        self.report.faults.append(f"{self.name}:{line}: {text}")

    def _command(self, block: Block, command: Command) -> None:
        text = _NOX.sub("sbp-train", command.text)
        for beginning, reason in block.without.items():
            if text.startswith(beginning):
                self.report.not_run.append(f"{self.name}:{command.line}: $ {text}: {reason}")
                return
        code, _, comment = text.partition("  #")
        fitting = [beginning for beginning in block.more if code.startswith(beginning)]
        if fitting:
            code = _with(code, block.more[max(fitting, key=len)])
        if self._shell(code + ("  #" + comment if comment else ""), command.line):
            self._compare(command.output, command.line + 1)

    def _shell(self, text: str, line: int) -> bool:
        began = time.perf_counter()
        if (command := _ours(text)) is not None and can_fork():
            # As in a shell, it finds modules and plugins in this folder.
            code, printed = run_forked(command, Path.cwd(), str(Path.cwd()), DEADLINE_S)
            if code == -signal.SIGALRM:
                return self._too_long(text, line)
            done = subprocess.CompletedProcess(command, code, printed)
            return self._ran(text, line, done, time.perf_counter() - began)
        try:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", text],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=DEADLINE_S,
                check=False,
                env=_environment(),
            )
        except subprocess.TimeoutExpired:
            return self._too_long(text, line)
        return self._ran(text, line, done, time.perf_counter() - began)

    def _too_long(self, text: str, line: int) -> bool:
        self._fault(line, f"$ {text}\n  takes more than {DEADLINE_S} s")
        return False

    def _ran(
        self, text: str, line: int, done: subprocess.CompletedProcess[str], seconds: float
    ) -> bool:
        """Record the output of a command; return whether it succeeded."""
        self.report.seconds[f"{line}: {text}"] = seconds
        self.report.num_run += 1
        self.printed, self.last = done.stdout.splitlines(), text
        if done.returncode:
            end = "\n  ".join(self.printed[-20:])
            self._fault(line, f"$ {text}\n  exit code {done.returncode}:\n  {end}")
            return False
        return True

    def _compare(self, shown: tuple[str, ...] | list[str], line: int) -> None:
        found = missing(shown, self.printed)
        if found is not None:
            index, nearest = found
            near = f"nearest line of the output: {nearest}" if nearest else "nothing is near it"
            text = f"$ {self.last}\n  does not print (in this place): {shown[index]}\n  {near}"
            self._fault(line + index, text)

    def _examples(self, block: Block) -> None:
        # A name for each block: doctest finds the lines of a function by name and number.
        name = f"{self.name}:{block.line}"
        test = doctest.DocTestParser().get_doctest(
            block.text, self.names, name, self.name, block.line - 1
        )
        test.globs = self.names  # the parser copies them
        runner = doctest.DocTestRunner(verbose=False)
        said = io.StringIO()
        runner.run(test, out=said.write, clear_globs=False)
        self.report.num_run += len(test.examples)
        if runner.failures:
            self._fault(block.line, said.getvalue())

    def _program(self, block: Block) -> None:
        said = io.StringIO()
        self.report.num_run += 1
        # Lines in tracebacks are lines of the page.
        source = "\n" * (block.line - 1) + block.text
        try:
            with contextlib.redirect_stdout(said):
                exec(compile(source, self.name, "exec"), self.names)
        except Exception:
            self._fault(block.line, traceback.format_exc())
        self.printed, self.last = said.getvalue().splitlines(), "(the Python above)"

    def _parse(self, block: Block) -> None:
        self.report.num_run += 1
        try:
            if block.language == "toml":
                tomllib.loads(block.text)
            else:
                yaml.safe_load(block.text)
        except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
            self._fault(block.line, f"is no {block.language}: {error}")


def _with(command: str, more: str) -> str:
    """Return a command with more settings, which replace settings of the same keys.

    >>> _with('sbp-train "cluster.mesh=[2]" trainer.steps=50', "trainer.steps=2 data=text")
    'sbp-train "cluster.mesh=[2]" trainer.steps=2 data=text'
    """
    keys = {text.partition("=")[0] for text in more.split() if "=" in text}
    kept = [text for text in command.split(" ") if text.strip("\"'").partition("=")[0] not in keys]
    return " ".join([*kept, more])


def _save(block: Block) -> None:
    """Write a block that is a file; of examples, write the code after the prompts."""
    examples = doctest.DocTestParser().get_examples(block.text)
    path = Path(block.saved_as)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(example.source for example in examples) or block.text, "utf-8")


def _environment() -> dict[str, str]:
    """Return the environment of commands, which can import modules in the folder of the page."""
    paths = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "ROOT": str(ROOT),
    }


def run_page(path: Path, name: str) -> Report:
    """Run all blocks of a page in the current folder, which they may write to."""
    page = _Page(name=name)
    try:
        found = blocks.read(path)
        for block in found:
            if block.saved_as:
                _save(block)
        for block in found:
            page.run(block)
    except ValueError as error:
        page.report.faults.append(f"{name}: {error}")
    return page.report
