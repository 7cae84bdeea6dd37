"""Run `sbp-train`, `sbp-plan` or `sbp-calibrate`: parse, check all settings, start Hydra's jobs.

A wrong setting is reported before Hydra starts a job: without run folder and traceback, with exit
code 2. The task of each command is a function of its `Application`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser  # of hydra.main; there is no public one
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sbp_core.errors import ConfigError, SbpError
from sbp_core.plugins import discover
from sbp_launch.apps.sweep import SweepJob, SweepNotes, objective, print_sweep
from sbp_launch.console import make_console
from sbp_launch.exit_codes import BAD_CONFIG, FAILED, INTERRUPTED, SIGNALS, ended_by
from sbp_launch.run.folder import (
    FolderBefore,
    check_unused,
    make_folder,
    save_run,
    take_folder,
    writing,
)
from sbp_launch.settings.catalog import PRIMARY, Catalog, make_catalog
from sbp_launch.settings.check import blaming
from sbp_launch.settings.compose import (
    VERSION_BASE,
    compose,
    expand_globs,
    read,
    refuse_conflicts,
    renamed_overrides,
    searching,
    sweep_jobs,
)
from sbp_launch.settings.config import Application, ConfigT
from sbp_launch.settings.help import overrides_of, render_help, render_topics, split_topics
from sbp_launch.settings.quoted_names import with_plain_names
from sbp_launch.settings.refusals import as_hydra_says, unknown_flag, unresolved_error
from sbp_launch.settings.resumed import quote

#: Failure of a run of a sweep as long as it has not ended.
_UNTOLD = "it is still running, or its process was killed before it could report why"

#: Environment variable of Hydra: with the value 1, errors are printed with their traceback.
FULL_ERROR = "HYDRA_FULL_ERROR"


def run(app: Application[ConfigT]) -> int:
    """Run a command on `sys.argv`.

    Returns:
        Exit code: 0, or 2 for a wrong setting, 1 for a run that failed, 130 after Ctrl-C. After
        SIGTERM or SIGHUP it raises `SystemExit` with 143 or 129.
    """
    try:
        return _run(app)
    except SbpError as error:
        return _report(app, error)
    except HydraException as error:
        return _report(app, as_hydra_says(error))
    except KeyboardInterrupt:
        # Libraries that were interrupted during their import would log statistics at exit.
        logging.disable(logging.INFO)
        sys.stderr.write(f"\n{app.name}: interrupted\n")
        return INTERRUPTED


def _report(app: Application[Any], error: SbpError) -> int:
    if os.environ.get(FULL_ERROR) == "1" and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    return ended_by(error, app.name)


def _run(app: Application[ConfigT]) -> int:
    arguments, topics = split_topics(sys.argv[1:])
    sys.argv[1:] = [with_plain_names(text) for text in flags_first(arguments)]
    parser = get_args_parser()
    options, unknown = parser.parse_known_args()
    if unknown:
        raise unknown_flag(unknown[0], parser)
    registry = discover()
    catalog = make_catalog(registry, options.config_dir)
    renamed = renamed_overrides(options.overrides, catalog)
    for text, new in renamed.items():
        sys.stderr.write(f"{app.name}: warning: {text} has a new name: {new}\n")
    expanded = expand_globs([renamed.get(text, text) for text in options.overrides], catalog)
    replaced = dict(zip(options.overrides, expanded, strict=True))
    sys.argv[1:] = [replaced.get(text, text) for text in sys.argv[1:]]
    options.overrides = expanded
    before = sweep = None
    if options.shell_completion:
        words = catalog.complete(os.environ.get("COMP_LINE", ""))
        if words is not None:
            sys.stdout.write("\n".join(words) + "\n")
            return 0
    # If the primary folder is replaced or an old job is rerun, the job itself is checked later.
    elif not (options.hydra_help or options.config_path or options.experimental_rerun):
        if options.config_name:
            app = replace(app, config_name=options.config_name)
        if options.help:
            overrides = [*options.overrides, *overrides_of(topics, catalog)]
            composed = read(compose(catalog, app, overrides), catalog)
            sys.stdout.write(
                render_topics(app, composed, catalog, topics)
                if topics
                else render_help(app, composed, catalog)
            )
            return 0
        before, sweep, overrides = _check_jobs(app, catalog, options)
        sys.argv += overrides
    for problem in registry.problems:
        sys.stderr.write(f"{app.name}: warning: plugin {problem}\n")
    with ExitStack() as stack:
        notes, jobs = None, []
        if app.sweep_goes_on and (sweep is not None or options.multirun):
            folder = tempfile.TemporaryDirectory(prefix=".sweep-", dir=sweep)
            notes = SweepNotes(Path(stack.enter_context(folder)))
        try:
            with searching(registry.config_folders()):
                hydra.main(
                    config_path=PRIMARY.path, config_name=app.config_name, version_base=VERSION_BASE
                )(_job(app, catalog, notes))()
        except SystemExit as error:
            if error.code == BAD_CONFIG and before is not None:
                before.restore()  # a run that is refused leaves no files
            raise
        finally:
            if notes is not None and (jobs := notes.read()):
                print_sweep(jobs, make_console())
    return FAILED if any(job.failure for job in jobs) else 0


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Move overrides after flags: argparse refuses `planner=toy -m trainer.steps=1,2`."""
    overrides = [text for text in arguments if text[:1] == "~" or re.match("[^-=][^=]*=", text)]
    return [text for text in arguments if text not in overrides] + overrides


def _check_jobs(
    app: Application[Any], catalog: Catalog, options: Namespace
) -> tuple[FolderBefore | None, Path | None, list[str]]:
    """Check every job of the command line; a job that is only printed need only compose.

    Returns:
        The former state of the folder of a single run, the folder of a sweep, and overrides to add
        that name the folder.

    Raises:
        ConfigError: a job or its folder is invalid.
    """
    _check_name(Path.cwd(), "the working folder")
    overrides = list(options.overrides)
    refuse_conflicts(overrides)
    sweep = options.multirun or "hydra.mode=MULTIRUN" in overrides
    jobs = sweep_jobs(overrides) if sweep else [tuple(overrides)]
    config = checked = None
    for job in jobs:
        single = [text for text in job if not text.startswith("hydra.mode=")]
        config = compose(catalog, app, single)
        if not options.cfg and not options.info:
            checked = app.check(read(config, catalog), catalog.registry)
    if config is None or checked is None:
        return None, None, []
    # The jobs of a sweep have their own subfolders.
    if sweep or config.hydra.mode == RunMode.MULTIRUN:
        made, more = _take_folder(config, "sweep", overwrite=True)
        return None, made.folder.absolute(), more
    if app.may_overwrite is None:
        _folder_of(config, "run")
        return None, None, []
    before, more = _take_folder(config, "run", overwrite=app.may_overwrite(checked))
    return before if app.reads_folder_alone else None, None, more


def _take_folder(
    config: DictConfig, mode: str, *, overwrite: bool
) -> tuple[FolderBefore, list[str]]:
    """Create the folder of a run or sweep; return its former state, and overrides that name it.

    A folder whose name contains the time gets a unique name: others may start in the same second.

    Args:
        config: Composed, with Hydra's own node.
        mode: `run` or `sweep`.
        overwrite: Whether the folder may contain an earlier run.

    Raises:
        ConfigError: see `_folder_of` and `take_folder`.
    """
    node, wanted = config.hydra[mode], _folder_of(config, mode)
    named = OmegaConf.to_container(node, resolve=False)
    if "${now" not in str(named["dir"] if isinstance(named, dict) else ""):
        before = FolderBefore.of(wanted)
        take_folder(wanted, overwrite=overwrite)
        return before, []
    made = make_folder(wanted)
    return replace(FolderBefore.of(made), is_new=True), [f"hydra.{mode}.dir={quote(str(made))}"]


def _folder_of(config: DictConfig, mode: str) -> Path:
    """Return the folder of a run or a sweep.

    Raises:
        ConfigError: its name has no value, or a value that Hydra would change.
    """
    key = f"hydra.{mode}.dir"
    try:
        folder = Path(str(config.hydra[mode].dir))
    except OmegaConfBaseException as error:
        raise unresolved_error(error, key, "the command line") from error
    _check_name(folder, key)
    return folder


def _check_name(folder: Path, where: str) -> None:
    """Refuse a folder whose name contains `${...}`, which Hydra would replace."""
    if "${" in str(folder):
        raise ConfigError(
            f"the folder {folder} cannot be written to: Hydra reads ${{...}} as a setting",
            where=where,
            todo="rename it, or take another folder",
        )


def _job(
    app: Application[ConfigT], catalog: Catalog, notes: SweepNotes | None
) -> Callable[[DictConfig], float | None]:
    """Return the function that Hydra calls for each job; `notes` records the jobs of a sweep."""

    def run_one(config: DictConfig, folder: Path) -> None:
        # Hydra prints a traceback for an exception of a job; errors of the user need none.
        whole = OmegaConf.merge({"hydra": HydraConfig.get()}, config)
        assert isinstance(whole, DictConfig), "a config and Hydra's node are mappings"
        composed = read(whole, catalog)
        with blaming(composed, catalog.registry):
            checked = app.check(composed, catalog.registry)
            if app.may_overwrite is not None:  # again: each job of a sweep has its own folder
                check_unused(folder, overwrite=app.may_overwrite(checked))
                with writing(folder):
                    save_run(composed, folder)
            app.task(checked, catalog.registry, folder)

    def job(config: DictConfig) -> float | None:
        node = HydraConfig.get()
        folder = Path(node.runtime.output_dir)
        if notes is None:
            try:
                run_one(config, folder)
            except SbpError as error:
                raise SystemExit(_report(app, error)) from error
            return None
        # A job must always return: with launcher plugins that run it in another process, an
        # exception would end the sweep.
        overrides = tuple(map(str, node.overrides.task))
        number, place = int(node.job.num), folder.absolute()
        begun = SweepJob(number=number, overrides=overrides, folder=place, failure=_UNTOLD)
        notes.write(begun)
        failure = "it was stopped"
        try:
            run_one(config, folder)
            failure = ""
        except SbpError as error:
            _report(app, error)
            failure = error.what
        except SystemExit as error:
            if not isinstance(error.code, int) or error.code > SIGNALS:
                raise
            failure = f"it ended with exit code {error.code}" if error.code else ""
        except Exception as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
        finally:
            notes.write(replace(begun, failure=failure))
        return objective(folder)

    return job
