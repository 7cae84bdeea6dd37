"""The command `sbp-train`: check the config, then train. Imports no torch until it trains."""

from __future__ import annotations

import sys
from pathlib import Path

from sbp_core.plugins import PluginRegistry
from sbp_launch.app import run
from sbp_launch.check import check
from sbp_launch.config import Application, RunConfig


def _train(config: RunConfig, registry: PluginRegistry, run_folder: Path) -> None:
    # Here and not above: a wrong setting is answered without waiting for torch.
    from sbp_launch.trainer import train

    train(config, registry, run_folder)


def main() -> None:
    """Run `sbp-train` and exit with its code."""
    app = Application(
        name="sbp-train",
        about="train a model on many ranks as if on one device",
        config_name="config",
        check=check,
        task=_train,
        may_overwrite=lambda config: config.trainer.overwrite,
    )
    sys.exit(run(app))


if __name__ == "__main__":
    main()
