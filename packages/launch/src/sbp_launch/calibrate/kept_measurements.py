"""Find the parts of an old cluster file that a new calibration keeps: other backends, operators.

A cluster file has the measured speeds of one machine, for one number of ranks. Unless `overwrite`
is set, nothing in it is lost: a file whose contents cannot be kept is refused before anything is
measured.
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

#: Keys of `describe_machine` that identify a machine; versions of libraries do not.
_MACHINE = ("processor", "cores", "system")

_TODO = "choose another file with out=FILE, or overwrite=true to lose what this one says"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMeasurements:
    """The parts of a file that are kept.

    Args:
        calibrations: Calibrations of backends other than the one that is measured.
        operators: Operators of the measured backend, which `sbp-calibrate ops=` has added.
    """

    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    operators: tuple[MeasuredOperator, ...] = ()


def kept_measurements(out: str, ranks: int, boxing: str) -> KeptMeasurements:
    """Return the parts of a file that stay when a calibration of a backend is written to it.

    Args:
        out: The file, which need not exist.
        ranks: Number of ranks that are measured, >= 1.
        boxing: The backend that is measured.

    Raises:
        ConfigError: the file exists, but is not a cluster file, or is for another machine or
            another number of ranks.
    """
    path = Path(out)
    if not path.exists():
        return KeptMeasurements()
    # Imported here: config errors are reported without importing numpy.
    from sbp_core.cluster import Cluster

    try:
        old = Cluster.load(path)
    except ConfigError as error:
        raise ConfigError(
            f"out={out!r} exists, and is not a cluster file to add to: {error.what}",
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
            f"out={out!r} was measured on another machine, with {key} "
            f"{old.machine.get(key, '?')!r} and not {describe_machine(library='')[key]!r}",
            accepted="a file that was measured on this machine, or another file",
            todo=_TODO,
        )
    own = old.calibrations.get(boxing)
    return KeptMeasurements(
        calibrations={name: of for name, of in old.calibrations.items() if name != boxing},
        operators=own.operators if own else old.device.operators,
    )


def differing_part(cluster: Cluster, machine: Mapping[str, str]) -> str:
    """Return the first key in which a cluster's machine differs from another; "" if none."""
    return next((key for key in _MACHINE if cluster.machine.get(key) != machine.get(key)), "")
