"""The run folder: create or check it, and write and read the composed config in it.

Every rank reads the config from `config.yaml` in the run folder. So it is composed only once,
whatever starts the ranks, and the file documents the run:

    model:
      name: gpt
      num_layers: 4
    trainer:
      steps: 300
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

from sbp_core.errors import ConfigError, RunError, SbpError, suggestion
from sbp_core.serialize import read_bytes, read_text, read_yaml, shown
from sbp_launch.checkpoint.durable_files import writing_aside
from sbp_launch.settings.config import GROUPS, ComposedConfig

#: Subfolder of a run folder for checkpoints, unless the settings name another.
CHECKPOINTS = "checkpoints"

#: Results of a run; a folder with one of them is used. `config.yaml`, `environment.json` and logs
#: are not in this list, because a run that is refused may have written them.
RUN_FILES = (
    CHECKPOINTS,
    *("strategy.yaml", "strategy.json", "plan.json", "plan.txt", "memory.txt"),
    *("metrics.jsonl", "metrics.csv", "tensorboard"),
    *("trace.json", "operators.json", "result.json"),
)

#: Files that are written before a run begins: Hydra's files, the settings, and the environment.
_FIRST_FILES = (
    *(".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"),
    *("config.yaml", "environment.json"),
)

#: Subfolder of the run folder for the logs of its processes.
LOGS = "logs"

#: Bytes that must be free before a run begins, for its config.
_FIRST_BYTES = 2**16


def make_folder(wanted: Path) -> Path:
    """Create a folder for a new run; add a number to the name if it is taken.

    Args:
        wanted: The folder; `wanted_2`, `wanted_3` ... if it exists, as for a run that was started
            in the same second.

    Raises:
        ConfigError: it cannot be created, or nothing can be written there.
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
    """Create a run folder if it does not exist, and check that a run can write there.

    Raises:
        ConfigError: it cannot be created or written, holds an earlier run, or has links or pipes
            in place of files.
    """
    with _refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _try_to_write(folder)
    check_unused(folder, overwrite=overwrite)
    # The folder may come from elsewhere, with malicious links. The folder of checkpoints may be a
    # link to another disk; writing inside of it follows no links.
    inside = [path for own in (folder, folder / LOGS, folder / ".hydra") for path in own.glob("*")]
    if pipes := [path for path in inside if path.is_fifo() and not path.is_symlink()]:
        raise ConfigError(f"{pipes[0]} is a pipe, on which a run would block", todo="remove it")
    if links := [path for path in inside if path.is_symlink() and path.name != CHECKPOINTS]:
        raise ConfigError(
            f"the run folder {folder} has links, and a run would write to their targets: "
            + ", ".join(f"{path.relative_to(folder)} -> {path.readlink()}" for path in links),
            accepted=f"files and folders of its own; {CHECKPOINTS} may be a link to a folder",
            todo="remove them, or replace each by a copy of its target",
        )


def check_unused(folder: Path, *, overwrite: bool) -> None:
    """Check that a folder holds no earlier run, or that its files may be replaced.

    Raises:
        ConfigError: it does, and they may not.
    """
    found = _result_names(folder)
    if found and not overwrite:
        raise ConfigError(
            f"the run folder {folder} holds an earlier run: {', '.join(found)}",
            accepted="a folder without a run",
            todo="leave out hydra.run.dir to get a new folder, or name another one; to continue "
            "the run: trainer.resume=auto; to replace it: trainer.overwrite=true",
        )


def _result_names(folder: Path) -> list[str]:
    """Return the names of results in a folder; folders count if they have unhidden contents."""

    def is_left(path: Path) -> bool:
        if path.is_dir():
            return any(not inside.name.startswith(".") for inside in path.iterdir())
        return path.exists()

    return [name for name in RUN_FILES if is_left(folder / name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderBefore:
    """The state of a run folder before a run, for files that are written before the run begins.

    A run that is refused restores it: otherwise `sbp-train resume=RUN` would read the refused
    settings.

    Args:
        folder: The run folder.
        is_new: Whether it did not exist.
        run_files: Results of an earlier run.
        first_files: Contents of the files that are written first; None for a missing file.
    """

    folder: Path
    is_new: bool
    run_files: frozenset[str]
    first_files: Mapping[Path, bytes | None]

    @classmethod
    def of(cls, folder: Path) -> FolderBefore:
        """Record the state of a folder.

        Raises:
            ConfigError: something in it cannot be read.
        """
        paths = [folder / name for name in _FIRST_FILES]
        read = partial(
            read_bytes, error=ConfigError, todo="name another folder: hydra.run.dir=FOLDER"
        )
        with _refusing(folder):
            return cls(
                folder=folder,
                is_new=not folder.exists(),
                run_files=frozenset(_result_names(folder)),
                first_files={path: read(path) if path.is_file() else None for path in paths},
            )

    def restore(self) -> None:
        """Restore the folder, unless a run has begun there in the meantime."""
        if not self.run_files.issuperset(_result_names(self.folder)):
            return
        with suppress(OSError):  # the reason of the refusal must be reported
            if self.is_new:
                shutil.rmtree(self.folder)
                return
            for path, content in self.first_files.items():
                if content is not None:
                    path.write_bytes(content)
                else:
                    path.unlink(missing_ok=True)


def as_typed(folder: Path) -> str:
    """Return the path of a folder to type in a command: relative if it is below this folder."""
    here = Path.cwd()
    # With hydra.job.chdir, the working folder is the run folder; nobody types paths from there.
    is_below = folder.is_relative_to(here) and folder != here
    return str(folder.relative_to(here) if is_below else folder)


def resume_command(folder: Path) -> str:
    """Return the command that resumes a run from its newest checkpoint."""
    return shlex.join(["sbp-train", f"resume={as_typed(folder)}"])


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise errors of writing in the `with` block as errors of a run folder.

    Raises:
        RunError: a file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be written: {error.strerror or error}",
            where=str(error.filename or ""),
            todo="free some space, or name a folder elsewhere: hydra.run.dir=FOLDER",
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
            accepted="a folder that exists or can be created, with free space",
            todo="name another one: hydra.run.dir=FOLDER",
        ) from error


#: Name of the config file in the run folder.
RUN_FILE = "config.yaml"

_HEAD = "# The settings of this run, as they were composed; every rank reads them here.\n"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc] # yaml has no types
    """Writes repeated values in full, because readers do not accept YAML aliases."""

    def ignore_aliases(self, data: object) -> bool:
        """See `yaml.Dumper`."""
        return True


def save_run(composed: ComposedConfig, folder: Path) -> None:
    """Write a composed config into a run folder."""
    values = {name: value for name, value in composed.values.items() if name in GROUPS}
    text = yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None
    )
    with writing_aside(folder / RUN_FILE) as file:
        file.write((_HEAD + text).encode())


def load_run(folder: Path) -> ComposedConfig:
    """Read the output of `save_run`.

    Raises:
        ConfigError: it is missing or cannot be read.
    """
    path = folder / RUN_FILE
    try:
        values, lines = read_yaml(read_text(path), str(path))
        if not isinstance(values, dict):
            raise ConfigError(f"it is {shown(values)}", where=lines.where([]), accepted="a mapping")
        for name in values:
            if name not in GROUPS:
                raise ConfigError(
                    f"there is no group {shown(name)}",
                    where=lines.where([str(name)]),
                    accepted=", ".join(GROUPS),
                    todo=suggestion(str(name), GROUPS),
                )
    except SbpError as error:
        raise error.replaced(
            ConfigError,
            what=f"the settings of the run cannot be read: {error.what}",
            todo="the run folder has to be on a disk that all hosts share: hydra.run.dir=FOLDER",
        ) from error
    files = dict.fromkeys(GROUPS, str(path))
    return ComposedConfig(values=values, files=files, overrides=())
