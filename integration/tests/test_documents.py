"""Every command, example and file of the documents works, and prints what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

import documents.page
from documents.blocks import commands, read
from documents.compare import masked, missing
from documents.page import Report, run_page
from documents.pages import ROOT, pages
from forked import run_command

#: Pages that take 10 to 35 s each: the session `docs` runs them, too.
_LONG = {
    "docs/how-to/checkpoints.md",
    "docs/how-to/choose-a-planner.md",
    "docs/how-to/debug-a-hang.md",
    "docs/how-to/fit-into-memory.md",
    "docs/how-to/kinds-of-training.md",
    "docs/how-to/launch-on-slurm.md",
    "docs/how-to/parallelize.md",
    "docs/how-to/reading-a-plan.md",
    "docs/how-to/tune-the-speed.md",
    "packages/launch/README.md",
    "packages/models/README.md",
    "packages/planner/README.md",
}


def _marked() -> list[object]:
    """Return all pages, the long ones for the exhaustive session."""
    assert {*pages()} >= _LONG
    return [
        pytest.param(page, marks=pytest.mark.exhaustive) if page in _LONG else page
        for page in pages()
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a page is many commands
@pytest.mark.parametrize("page", _marked())
def test_what_a_page_shows_is_what_happens(page: str) -> None:
    code, printed = run_command(["documents", page, "--times"], ROOT / "integration")

    assert code == 0, printed


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Report:
    """Run a page of that text in a folder."""
    page = folder / "page.md"
    page.write_text(text, "utf-8")
    monkeypatch.chdir(folder)
    return run_page(page, "page.md")


def test_a_line_that_is_not_printed_is_named_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "```console\n$ echo 'all-gather 3 MB'\nall-reduce 4 MB\n```\n"

    report = run(tmp_path, monkeypatch, text)

    (fault,) = report.faults
    assert fault.startswith("page.md:3: $ echo")
    assert "does not print (in this place): all-reduce 4 MB" in fault
    assert "nearest line of the output: all-gather 3 MB" in fault


def test_a_command_that_fails_is_shown_with_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(tmp_path, monkeypatch, "```console\n$ echo no; false | cat\n```\n")

    (fault,) = report.faults
    assert fault == "page.md:2: $ echo no; false | cat\n  exit code 1:\n  no"


@pytest.mark.parametrize("command", ["sbp-train trainer.steps=100000", "sleep 60"])
def test_a_command_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(documents.page, "DEADLINE_S", 1)

    report = run(tmp_path, monkeypatch, f"```console\n$ {command}\n```\n")

    assert report.faults == [f"page.md:2: $ {command}\n  takes more than 1 s"]


def test_blocks_use_what_those_above_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """\
<!-- first: mkdir folder -->
```console
$ echo 5 > folder/number
```
```python
from pathlib import Path
number = int(Path("folder/number").read_text())
```
```python
>>> number + 1
6
```
<!-- saved as: made/own.py -->
```python
>>> def one():
...     return 1
```
```console
$ python -c 'from made.own import one; print(one(), "is it")' \\
    # in another process
1 is it
```
"""

    report = run(tmp_path, monkeypatch, text)

    assert not report.faults


def test_what_is_not_run_is_listed_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "<!-- not run: needs a GPU -->\n```console\n$ exit 3\n```\n"
        "<!-- not run exit 4: takes an hour -->\n```console\n$ exit 4\n$ true\n```\n"
    )

    report = run(tmp_path, monkeypatch, text)

    assert not report.faults
    assert report.not_run == ["page.md:3: needs a GPU", "page.md:7: $ exit 4: takes an hour"]
    assert report.num_run == 1


def test_the_longest_beginning_gives_a_command_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """\
<!-- run echo with: all -->
<!-- run echo x with: some -->
```console
$ echo y
y all
$ echo x
x some
```
"""

    assert not run(tmp_path, monkeypatch, text).faults


def test_text_below_a_command_may_be_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "```console\n$ printf 'a\\nb\\n'\n```\n\n<!-- output -->\n```\nb\na\n```\n"

    (fault,) = run(tmp_path, monkeypatch, text).faults

    assert "does not print (in this place): a" in fault


@pytest.mark.parametrize(
    "text",
    [
        "```toml\na = \n```\n",
        "```yaml\na: [\n```\n",
        "```python\nraise ValueError\n```\n",
        "```python\n>>> 1\n2\n\n```\n",
        "```sh\nls\n```\n",
        "```console\nls\n```\n",
        "<!-- not rum: why -->\n```console\n$ ls\n```\n",
    ],
)
def test_what_does_not_work_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    assert len(run(tmp_path, monkeypatch, text).faults) == 1


@pytest.mark.parametrize(
    ("line", "other", "same"),
    [
        ("a step took 275 ms (median of 11-300)", "a step took 1.2 s (median of 3-12)", True),
        ("loss 2.6170  7,222 tokens/s", "loss 12.1   982 tokens/s", True),
        (
            "deviation: 4.77e-07 (1.03e-07 relative)",
            "deviation: 0.00e+00 (0.00e+00 relative)",
            True,
        ),
        ("= 41.0 MB activations + 278.5 kB other", "= 4.0 kB activations + 1 GB other", True),
        ("float32[4096, 1024] 33.6 MB", "float32[5, 3] 2 kB", True),
        ("────────", "─────────────", True),
        ("in runs/2026-11-23_14-41-31 x=1", "in runs/2027-01-03_00-00-01 x=2", True),
        ("weight (S(0), B)", "weight (S(1), B)", False),
        ("float32[5]", "float64[5]", False),
        ("3 all-gather", "3 all-reduce", False),
        ("blocks.* x4", "blocks.* x2", False),
    ],
)
def test_only_figures_and_spaces_may_differ(line: str, other: str, same: bool) -> None:
    assert (masked(line) == masked(other)) is same


def test_lines_are_searched_in_order() -> None:
    assert missing(["a 1", "...", "c 3"], ["a 9", "b 9", "c 9"]) is None
    assert missing(["c 1", "a 1"], ["a 9", "b 9", "c 9"]) == (1, "a 9")


def test_a_command_may_have_several_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("1. x\n\n   ```console\n   $ a \\\n       b\n   out\n   ```\n", "utf-8")

    (command,) = commands(read(page)[0])

    assert (command.text.split(), command.output, command.line) == (["a", "b"], ("out",), 4)
