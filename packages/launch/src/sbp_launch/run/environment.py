"""Record, in the run folder, the environment of a run: versions, machine, variables, git state.

Only the environment variables in `VARIABLES` are recorded, because others may contain secrets.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from sbp_core.plugins import PluginRegistry
from sbp_launch.clusters.local import usable_cores
from sbp_launch.secret_settings import without_secrets

#: Name of the file of the record in a run folder.
ENVIRONMENT = "environment.json"

#: Distributions whose versions are recorded, in addition to those of plugins.
_DISTRIBUTIONS = ("torch", "numpy", "hydra-core", "omegaconf", "mpi4py", "safetensors", "triton")

#: Variables that are recorded if they are set: threads, devices, transports, launchers.
VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY"),
    *("PYTHONHASHSEED", "PYTHONPATH", "SBP_DISABLE_PLUGINS", "LD_PRELOAD"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR"),
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES"),
    "SLURM_STEP_NODELIST",
)

#: Timeout of git in seconds: for a very large or remote working tree, nothing is recorded.
_GIT_S = 5.0


def write_environment(folder: Path, registry: PluginRegistry) -> None:
    """Write the record of this process into a run folder.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(environment(registry), indent=1) + "\n"
    (folder / ENVIRONMENT).write_text(text, encoding="utf-8")


def environment(registry: PluginRegistry) -> dict[str, Any]:
    """Return the record of this process, as a JSON value."""
    plugins = {entry.distribution: entry.version for entry in registry.entries if entry.version}
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": [without_secrets(argument) for argument in sys.argv],
        "folder": str(Path.cwd()),
        "git": git_state(Path.cwd()),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": versions() | dict(sorted(plugins.items())),
        "machine": {
            "host": platform.node(),
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
        },
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def git_state(folder: Path) -> Mapping[str, object] | None:
    """Return commit, branch and changed files of the working tree of a folder, if there is one.

    Returns:
        `commit` (None before the first one), `branch` (None if detached), `is_dirty`, and `changed`
        in the format of `git status --short`; None outside of git, without git, or on a timeout.
    """
    status = _git(folder, "status", "--short", "--untracked-files=normal")
    if status is None:
        return None
    changed = status.splitlines()
    return {
        "commit": _git(folder, "rev-parse", "--verify", "--quiet", "HEAD") or None,
        "branch": _git(folder, "symbolic-ref", "--short", "--quiet", "HEAD") or None,
        "is_dirty": bool(changed),
        "changed": changed,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    # Without locks: somebody may be committing in this working tree.
    command = ("git", "--no-optional-locks", "-C", str(folder), *arguments)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").rstrip()


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that a run depends on."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
