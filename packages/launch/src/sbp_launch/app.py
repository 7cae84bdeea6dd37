"""What the apps share: read the command line, check everything cheap, then hand over to Hydra.

A wrong setting is answered before Hydra starts a job: no run folder, no traceback, exit code 2.
What a run does is the trainer's. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import hydra
from hydra._internal.utils import get_args_parser  # the parser that hydra.main itself uses
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from sbp_core.errors import ConfigError, SbpError
from sbp_core.plugins import Registry, discover
from sbp_launch.catalog import PRIMARY, Catalog, config_folders
from sbp_launch.completion import complete
from sbp_launch.compose import VERSION_BASE, compose, read, session, sweep_jobs
from sbp_launch.config import Composed
from sbp_launch.help import render_help

#: Exit codes: a setting is wrong; a run failed; the user pressed Ctrl-C.
BAD_CONFIG, FAILED, INTERRUPTED = 2, 1, 130

#: The checked config of an app.
ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, slots=True, kw_only=True)
class App(Generic[ConfigT]):
    """One command.

    Args:
        name: Its name: `sbp-train`.
        about: What it does, in one sentence.
        config_name: Its primary config.
        check: Makes its checked config of what Hydra composed; raises `ConfigError`.
        task: What it does with that, the plugins and the run folder; called inside a Hydra job.
        groups: The config groups that it has; empty for all.
    """

    name: str
    about: str
    config_name: str
    check: Callable[[Composed, Registry], ConfigT]
    task: Callable[[ConfigT, Registry, Path], None]
    groups: tuple[str, ...] = ()


def run(app: App[ConfigT]) -> int:
    """Run a command on `sys.argv`.

    Returns:
        Exit code: 0, or 2 for a wrong setting, 1 for a run that failed, 130 after Ctrl-C.
    """
    try:
        return _run(app)
    except SbpError as error:
        return _report(app, error)
    except HydraException as error:
        return _report(app, ConfigError(str(error).partition("\n")[0], where="the command line"))
    except KeyboardInterrupt:
        # Libraries that were interrupted half imported would log statistics at exit.
        logging.disable(logging.INFO)
        sys.stderr.write(f"\n{app.name}: interrupted\n")
        return INTERRUPTED


def _report(app: App[Any], error: SbpError) -> int:
    sys.stderr.write(f"{app.name}: {error}\n")
    return BAD_CONFIG if isinstance(error, ConfigError) else FAILED


def _run(app: App[ConfigT]) -> int:
    sys.argv[1:] = flags_first(sys.argv[1:])
    parser = get_args_parser()
    options = parser.parse_args()
    registry = discover()
    if options.shell_completion:
        with session(registry) as catalog:
            words = complete(os.environ.get("COMP_LINE", ""), catalog)
        if words is not None:
            sys.stdout.write("\n".join(words) + "\n")
            return 0
    if _can_check(options):
        with session(registry, options.config_dir) as catalog:
            config_name = options.config_name or app.config_name
            if options.help:
                config = compose(catalog, registry, config_name, options.overrides)
                text = render_help(
                    app.name,
                    app.about,
                    read(config, catalog),
                    catalog,
                    registry,
                    parser,
                    groups=app.groups,
                    config_name=config_name,
                )
                sys.stdout.write(text)
                return 0
            _check_jobs(app, catalog, registry, config_name, options)
    with config_folders(registry.config_folders()):
        hydra.main(config_path=PRIMARY, config_name=app.config_name, version_base=VERSION_BASE)(
            _job(app, registry)
        )()
    return 0


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Move overrides behind flags: argparse refuses `planner=toy -m trainer.steps=1,2`."""
    overrides = [text for text in arguments if text[:1] == "~" or re.match("[^-=][^=]*=", text)]
    return [text for text in arguments if text not in overrides] + overrides


def _can_check(options: Any) -> bool:
    """Return whether the command line is one that can be composed beforehand.

    A half-typed line that a shell wants completed cannot, nor one that replaces the primary folder
    or reruns an old job; those are checked when the job starts.
    """
    return not (
        options.shell_completion
        or options.hydra_help
        or options.config_path
        or options.experimental_rerun
    )


def _check_jobs(
    app: App[ConfigT], catalog: Catalog, registry: Registry, config_name: str, options: Any
) -> None:
    """Check every job that the command line asks for; one that is only shown must just compose.

    Raises:
        ConfigError: something is wrong with one of them.
    """
    overrides = list(options.overrides)
    sweep = options.multirun or "hydra.mode=MULTIRUN" in overrides
    jobs = sweep_jobs(overrides) if sweep else [tuple(overrides)]
    for job in jobs:
        single = [text for text in job if not text.startswith("hydra.mode=")]
        config = compose(catalog, registry, config_name, single)
        if not options.cfg and not options.info:
            app.check(read(config, catalog), registry)


def _job(app: App[ConfigT], registry: Registry) -> Callable[[DictConfig], None]:
    """Return what Hydra calls for each job."""

    def job(config: DictConfig) -> None:
        # Hydra prints a traceback for what a job raises; what a user can mend needs none.
        try:
            run_folder = Path(HydraConfig.get().runtime.output_dir)
            app.task(_checked(app, config, registry), registry, run_folder)
        except SbpError as error:
            raise SystemExit(_report(app, error)) from error

    return job


def _checked(app: App[ConfigT], config: DictConfig, registry: Registry) -> ConfigT:
    whole = OmegaConf.create({"hydra": HydraConfig.get()})
    with open_dict(config):
        config.hydra = whole.hydra
    return app.check(read(config, Catalog(GlobalHydra.instance().config_loader())), registry)
