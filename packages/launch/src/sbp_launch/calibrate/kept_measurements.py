"""What stays of a cluster file that a calibration writes to: times of other backends, operators.

A file is for one machine and one number of ranks. Nothing that it says is lost unless that is asked
for: what cannot stay in it is refused before anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sbp_core.errors import ConfigError
from sbp_launch.machine import describe_machine

if TYPE_CHECKING:
    from sbp_core.calibration import Calibration
    from sbp_core.cluster import Cluster
    from sbp_core.operators import MeasuredOperator

#: What tells machines apart, of `describe_machine`: versions of libraries do not.
_MACHINE = ("processor", "cores", "system")

_TODO = "choose another file with out=FILE, or overwrite=true to lose what this one says"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMeasurements:
    """What stays in a file.

    Args:
        calibrations: Of other backends than the one that is measured.
        operators: What `sbp-calibrate ops=` has added of the one that is measured.
    """

    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    operators: tuple[MeasuredOperator, ...] = ()


def kept_measurements(out: str, ranks: int, boxing: str) -> KeptMeasurements:
    """Return what stays in a file that a calibration of a backend writes to.

    Args:
        out: The file, which need not exist.
        ranks: Ranks that are measured, >= 1.
        boxing: The backend that is measured.

    Raises:
        ConfigError: there is such a file, and it is no cluster file, or one of another machine or
            another number of ranks.
    """
    path = Path(out)
    if not path.exists():
        return KeptMeasurements()
    # Here and not above: config errors are answered without numpy.
    from sbp_core.cluster import Cluster

    try:
        old = Cluster.load(path)
    except ConfigError as error:
        raise ConfigError(
            f"out={out!r} exists, and is no cluster file that could be added to: {error.what}",
            where=error.where,
            accepted="a new file, or one that sbp-calibrate wrote",
            todo=_TODO,
        ) from error
    if old.num_devices != ranks:
        raise ConfigError(
            f"out={out!r} was measured with ranks={old.num_devices}, and "
            f"ranks={ranks}: a file is for one number of ranks",
            accepted=f"ranks={old.num_devices}, or another file",
            todo=_TODO,
        )
    key = differing_part(old, describe_machine(library=""))
    if key:
        raise ConfigError(
            f"out={out!r} is of another machine: {key} "
            f"{old.machine.get(key, 'not said')!r}, here {describe_machine(library='')[key]!r}",
            accepted="a file that was measured on this machine, or another file",
            todo=_TODO,
        )
    own = old.calibrations.get(boxing)
    return KeptMeasurements(
        calibrations={name: of for name, of in old.calibrations.items() if name != boxing},
        operators=own.operators if own else old.device.operators,
    )


def differing_part(cluster: Cluster, machine: Mapping[str, str]) -> str:
    """Return what tells the machine of a cluster file from another one; "" if it is the same."""
    return next((key for key in _MACHINE if cluster.machine.get(key) != machine.get(key)), "")
