"""Run `sbp-calibrate`: measure this machine for planning. Torch is imported only to measure."""

from __future__ import annotations

import sys
from pathlib import Path

from sbp_core.output import standard_output
from sbp_core.plugins import PluginRegistry
from sbp_launch.apps.hydra_app import run
from sbp_launch.calibrate.calibration_config import GROUPS, CalibrateRun, check_calibrate
from sbp_launch.settings.config import Application


def _calibrate(config: CalibrateRun, registry: PluginRegistry, run_folder: Path) -> None:
    # Imported here: a wrong setting is reported without waiting for torch.
    from sbp_launch.calibrate.calibration import calibrate_machine, measure_calls
    from sbp_launch.calibrate.operators import save_operators

    if config.with_operators is not None:
        save_operators(config.with_operators, config.settings.out)
    elif config.calls:
        measure_calls(config, registry)
    else:
        calibrate_machine(config, registry)


@standard_output("sbp-calibrate", outlives=True)
def main() -> None:
    """Run `sbp-calibrate` and exit with its code."""
    app = Application(
        name="sbp-calibrate",
        about="measure this machine through a boxing backend, and write a cluster file",
        config_name="calibrate",
        check=check_calibrate,
        task=_calibrate,
        groups=GROUPS,
    )
    sys.exit(run(app))


if __name__ == "__main__":
    main()
