"""Compose the config of a command line of `sbp-train` in tests, notebooks and other programs.

Plain `hydra.compose` on the config folder of sbp-launch finds no planners, models or data sets,
because their options are in the folders of other packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, open_dict

from sbp_core.plugins import discover, warn_renamed
from sbp_launch.apps.train import make_application
from sbp_launch.settings import compose as settings
from sbp_launch.settings.catalog import make_catalog
from sbp_launch.settings.quoted_names import with_plain_names
from sbp_launch.world import World


def compose(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "config",
    config_dir: str | Path | None = None,
) -> DictConfig:
    """Compose and check a config as `sbp-train OVERRIDES` does; it needs no `hydra.initialize`.

    Args:
        overrides: Overrides of a command line: `["planner=manual/zero", "cluster.mesh=[2, 1]"]`.
        config_name: The primary config.
        config_dir: A folder with options of your own, as for `--config-dir`.

    Returns:
        The config by group, without Hydra's own node.

    Raises:
        ConfigError: an option or a setting is unknown, missing or refused.
    """
    app = replace(make_application(World()), config_name=config_name)
    catalog = make_catalog(discover(), None if config_dir is None else str(config_dir))
    overrides = [with_plain_names(text) for text in overrides]
    renamed = settings.renamed_overrides(overrides, catalog)
    for text, new in renamed.items():
        warn_renamed(text, new)
    overrides = [renamed.get(text, text) for text in overrides]
    settings.refuse_conflicts(overrides)
    config = settings.compose(catalog, app, overrides)
    app.check(settings.read(config, catalog), catalog.registry)
    with open_dict(config):
        del config["hydra"]
    return config
