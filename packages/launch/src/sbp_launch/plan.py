"""The command `sbp-plan`: check the config, plan, and print the plan. Runs no step of training."""

from __future__ import annotations

import sys
from pathlib import Path

from sbp_core.plugins import PluginRegistry
from sbp_launch.app import run
from sbp_launch.check import check
from sbp_launch.config import Application, RunConfig


def _plan(config: RunConfig, registry: PluginRegistry, run_folder: Path) -> None:
    # Here and not above: a wrong setting is answered without waiting for torch.
    from sbp_launch.trainer import plan_only

    plan_only(config, registry)


def main() -> None:
    """Run `sbp-plan` and exit with its code."""
    app = Application(
        name="sbp-plan",
        about="plan a training step on many ranks, and print the plan without training",
        config_name="plan",
        check=check,
        task=_plan,
    )
    sys.exit(run(app))


if __name__ == "__main__":
    main()
