"""The file of a machine: its devices, links and calibrations, with the raw measurements, as JSON.

    {"format": "sbp-cluster", "version": 2, "name": ..., "device": {...}, "intra_node": {...},
     "calibrations": {"torch": {"samples": [...], "curves": [...], ...}}, "machine": {...}, ...}

`sbp-calibrate` writes such files; they may be edited by hand. Numbers are in SI base units, as in
the classes that they are read into. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from sbp_core.calibration import Calibration
from sbp_core.errors import ConfigError
from sbp_core.placement import Cluster, Device, Link
from sbp_core.serialize import Document, Form


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A `Cluster` as the file has it, in this order."""

    name: str
    machine: Mapping[str, str] = field(default_factory=dict)
    num_devices: int
    devices_per_node: int
    device: Device
    intra_node: Link
    inter_node: Link
    intra_node_shared: bool
    inter_node_shared: bool
    backend: str = ""
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)


def _written(cluster: Cluster) -> _Written:
    return _Written(**{field.name: getattr(cluster, field.name) for field in fields(_Written)})


def _read(written: _Written) -> Cluster:
    return Cluster(**{field.name: getattr(written, field.name) for field in fields(_Written)})


_KIND: Any = Annotated[Cluster, Form(_Written, _written, _read)]

#: The file of a cluster.
CLUSTER: Document[Cluster] = Document(
    kind=_KIND,
    format="sbp-cluster",
    version=2,
    todo="correct that place, or measure again with sbp-calibrate",
    error=ConfigError,
)


def cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    """Return a JSON value that `cluster_from_json` reads."""
    return CLUSTER.dump(cluster)


def cluster_from_json(value: object, *, where: str = "") -> Cluster:
    """Read what `cluster_to_json` wrote.

    Args:
        value: The JSON value.
        where: Where it comes from, for the error.

    Raises:
        ConfigError: it is no cluster, of another version, or something in it is missing or cannot
            be meant.
    """
    return CLUSTER.load(value, where)


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster file: one line a sample and a curve, so that people can read and edit it."""
    CLUSTER.write(cluster, path)


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ConfigError: there is no such file, or it is no cluster file of this version.
    """
    return CLUSTER.read(path)
