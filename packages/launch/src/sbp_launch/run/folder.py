"""The folder of a run: a new one, one that can be written, none that an earlier run has filled."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from sbp_core.errors import ConfigError, RunError

#: What a run leaves; a folder that has one of them is used. `config.yaml`, `environment.json` and
#: logs are no such files: a run that is refused may have written them.
RUN_FILES = (
    "checkpoints",
    "strategy.yaml",
    "strategy.json",
    "plan.json",
    "plan.txt",
    "memory.txt",
    "metrics.jsonl",
    "metrics.csv",
    "tensorboard",
    "trace.json",
    "result.json",
)

#: The folder of what each process of a run writes, in the run folder.
LOGS = "logs"

#: Bytes that a run needs before it begins: its config.
_FIRST_BYTES = 2**16


def make_folder(wanted: Path) -> Path:
    """Make a folder that no other run has, though it be started in the same second.

    Args:
        wanted: Its name; `wanted_2`, `wanted_3` ... if that is taken.

    Raises:
        ConfigError: it cannot be made, or nothing can be written there.
    """
    for number in count(2):
        folder = wanted if number == 2 else wanted.with_name(f"{wanted.name}_{number - 1}")
        with _refusing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            _try_to_write(folder)
        return folder
    raise AssertionError("count never ends")


def take_folder(folder: Path, *, overwrite: bool) -> None:
    """Make sure that there is a folder in which a run can be kept.

    Raises:
        ConfigError: it cannot be made or written, or holds an earlier run.
    """
    with _refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _try_to_write(folder)
    check_unused(folder, overwrite=overwrite)


def check_unused(folder: Path, *, overwrite: bool) -> None:
    """Check that a folder holds no earlier run, or that its files may be replaced.

    Raises:
        ConfigError: it does, and they may not.
    """
    found = [name for name in RUN_FILES if _is_left(folder / name)]
    if found and not overwrite:
        raise ConfigError(
            f"the run folder {folder} holds an earlier run: {', '.join(found)}",
            accepted="a folder without a run",
            todo="leave out hydra.run.dir for a new folder, name another one, go on where it "
            "stopped: trainer.resume=auto, or replace what is there: trainer.overwrite=true",
        )


def _is_left(path: Path) -> bool:
    """Whether a run has left a file, or something in a folder that is not hidden."""
    if path.is_dir():
        return any(not inside.name.startswith(".") for inside in path.iterdir())
    return path.exists()


def as_typed(folder: Path) -> str:
    """Return a folder as one types it from here."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def going_on(folder: Path) -> str:
    """Return the command that goes on from a run's newest checkpoint."""
    return f"sbp-train resume={as_typed(folder)}"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say of what cannot be written in the `with` block that it belongs to a run folder.

    Raises:
        RunError: something cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be written: {error.strerror or error}",
            where=str(error.filename or ""),
            todo="make room, or name a folder elsewhere: hydra.run.dir=FOLDER",
        ) from error


def _try_to_write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_FIRST_BYTES))


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        named = f" ({error.filename})" if isinstance(error.filename, str) else ""
        in_the_way = [parent for parent in (folder, *folder.parents) if parent.is_file()]
        what = f"{in_the_way[0]} is a file" if in_the_way else f"{error.strerror or error}{named}"
        raise ConfigError(
            f"the run folder {folder} cannot be made or written: {what}",
            where=f"hydra.run.dir={folder}",
            accepted="a folder that is there or can be made, with room in it",
            todo="name another one: hydra.run.dir=FOLDER",
        ) from error
