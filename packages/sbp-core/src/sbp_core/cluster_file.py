"""The file of a machine: its devices, links and calibrations, with the raw measurements, as JSON.

    {"format": "sbp-cluster", "version": 1, "name": ..., "device": {...}, "intra_node": {...},
     "calibrations": {"torch": {"samples": [...], "curves": [...], ...}}, "machine": {...}, ...}

`sbp-calibrate` writes such files; they may be edited by hand. Numbers are in SI base units, as in
the classes that they are read into. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sbp_core.calibration import Calibration
from sbp_core.errors import ConfigError, SbpError
from sbp_core.placement import Cluster, Device, Link

#: What the file says it is.
FORMAT = "sbp-cluster"

#: Version of the format that is written, and the only one that is read.
VERSION = 1


def cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    """Return a JSON value that `cluster_from_json` reads."""
    device = cluster.device
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": cluster.name,
        "machine": dict(cluster.machine),
        "num_devices": cluster.num_devices,
        "devices_per_node": cluster.devices_per_node,
        "device": {
            "kind": device.kind,
            "memory_bytes": device.memory_bytes,
            "flop_per_s": dict(device.flop_per_s),
            "memory_bytes_per_s": device.memory_bytes_per_s,
            "launch_s": device.launch_s,
        },
        "intra_node": asdict(cluster.intra_node),
        "inter_node": asdict(cluster.inter_node),
        "intra_node_shared": cluster.intra_node_shared,
        "inter_node_shared": cluster.inter_node_shared,
        "backend": cluster.backend,
        "calibrations": {name: of.to_json() for name, of in cluster.calibrations.items()},
    }


def cluster_from_json(value: Mapping[str, Any], *, where: str = "") -> Cluster:
    """Read what `cluster_to_json` wrote.

    Args:
        value: The JSON value.
        where: Where it comes from, for the error.

    Raises:
        ConfigError: it is no cluster, of another version, or something in it is missing or cannot
            be meant.
    """
    if not isinstance(value, Mapping) or value.get("format") != FORMAT:
        raise ConfigError(
            "this is no cluster file",
            where=where,
            accepted=f'a JSON object with "format": "{FORMAT}"',
            todo="write one with sbp-calibrate",
        )
    if value.get("version") != VERSION:
        raise ConfigError(
            f"a cluster file of version {value.get('version')!r}",
            where=where,
            accepted=f"version {VERSION}",
            todo="measure again with this version of sbp-calibrate",
        )
    try:
        return Cluster(
            name=value["name"],
            machine=dict(value["machine"]),
            num_devices=value["num_devices"],
            devices_per_node=value["devices_per_node"],
            device=Device(**value["device"]),
            intra_node=Link(**value["intra_node"]),
            inter_node=Link(**value["inter_node"]),
            intra_node_shared=value["intra_node_shared"],
            inter_node_shared=value["inter_node_shared"],
            backend=value["backend"],
            calibrations={
                name: Calibration.from_json(of) for name, of in value["calibrations"].items()
            },
        )
    except SbpError as error:
        raise ConfigError(
            f"the cluster file says what cannot be meant: {error.what}",
            where=(where, *error.where),
            accepted=error.accepted,
            todo=error.todo,
        ) from error
    except KeyError as error:
        raise ConfigError(
            f"the cluster file says nothing of {error.args[0]!r}",
            where=where,
            todo="add it, or measure again with sbp-calibrate",
        ) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the cluster file is broken: {error}",
            where=where,
            todo="measure again with sbp-calibrate",
        ) from error


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster file: one line a sample and a curve, so that people can read and edit it."""
    path.write_text(_pretty(cluster_to_json(cluster)) + "\n", encoding="utf-8")


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ConfigError: there is no such file, or it is no cluster file of this version.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the cluster file cannot be read: {error.strerror}",
            where=str(path),
            accepted="a file that sbp-calibrate wrote",
            todo="measure this machine with sbp-calibrate, or mend the path",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"the cluster file is no JSON: {error}",
            where=str(path),
            todo="correct that entry, or measure again with sbp-calibrate",
        ) from error
    return cluster_from_json(value, where=str(path))


def _pretty(value: Any, indent: str = "") -> str:
    """Return JSON with one line for each value that holds no objects and no long lists."""
    line = json.dumps(value)
    if len(indent) + len(line) <= 96 or not _has_parts(value):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_pretty(part, deeper)}" for key, part in value.items()]
        return "{\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + json.dumps(part) for part in value) + f"\n{indent}]"


def _has_parts(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(part, dict | list) for part in parts)
