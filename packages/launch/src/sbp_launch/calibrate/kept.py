"""What stays of a cluster file that a calibration writes to: the times of other backends.

A file is for one machine and one number of ranks. Nothing that it says is lost unless that is asked
for: what cannot stay in it is refused before anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sbp_core.errors import ConfigError
from sbp_launch.calibrate.machine import describe_machine

if TYPE_CHECKING:
    from sbp_core.calibration import Calibration

#: What tells machines apart, of `describe_machine`: versions of libraries do not.
_MACHINE = ("processor", "cores", "system")

_TODO = "choose another file with out=FILE, or overwrite=true to lose what this one says"


def kept_calibrations(out: str, ranks: int, boxing: str) -> Mapping[str, Calibration]:
    """Return the calibrations that stay in a file: those of other backends than this one.

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
        return {}
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
    here = describe_machine(library="")
    for key in _MACHINE:
        if old.machine.get(key) != here[key]:
            raise ConfigError(
                f"out={out!r} is of another machine: {key} "
                f"{old.machine.get(key, 'not said')!r}, here {here[key]!r}",
                accepted="a file that was measured on this machine, or another file",
                todo=_TODO,
            )
    return {name: of for name, of in old.calibrations.items() if name != boxing}
