"""Plugins of sbp-launch: optimizers, clusters, loggers, callbacks, storages and launchers.

The registry finds this module by its entry point; each hook returns factories by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.plugins import EmptyConfig, Factory, factories, hookimpl
from sbp_launch.checkpoint.folder_storage import LocalStorageConfig
from sbp_launch.checkpoint.objects import FsspecConfig
from sbp_launch.clusters.local import LocalConfig, MeasuredConfig
from sbp_launch.clusters.nvidia import GpuConfig
from sbp_launch.launching.launchers import (
    AutoLauncherConfig,
    ProcessesConfig,
    SlurmConfig,
    ThreadsConfig,
)
from sbp_launch.metrics.files import CsvConfig, JsonlConfig, TensorboardConfig
from sbp_launch.optimizers import (
    AdafactorConfig,
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    LambConfig,
    LarsConfig,
    LionConfig,
    MuonConfig,
    RmspropConfig,
    RowWiseAdagradConfig,
    SgdConfig,
)
from sbp_launch.trainer.early_stop import EarlyStopConfig

SBP_API_VERSION = 2


@hookimpl
def sbp_optimizers() -> Mapping[str, Factory]:
    """Register optimizers of `torch.optim` and `sbp_torch.optim`."""
    kinds = {
        "adafactor": (AdafactorConfig, "Adam with factored squares, relative to the weights"),
        "adagrad": (AdagradConfig, "learning rates that fall with the sum of squares"),
        "adam": (AdamConfig, "mean and mean square of gradients"),
        "adamw": (AdamWConfig, "Adam with decoupled weight decay"),
        "lamb": (LambConfig, "Adam scaled to the norm of each parameter"),
        "lars": (LarsConfig, "momentum scaled to the norm of each parameter"),
        "lion": (LionConfig, "the sign of a momentum"),
        "muon": (MuonConfig, "orthogonal momentum for matrices, AdamW for the rest"),
        "rmsprop": (RmspropConfig, "gradients over the root of their mean square"),
        "row_wise_adagrad": (RowWiseAdagradConfig, "Adagrad with one sum of squares for each row"),
        "sgd": (SgdConfig, "stochastic gradient descent with momentum"),
    }
    return factories("sbp_launch.optimizers:build_{name}", kinds)


@hookimpl
def sbp_clusters() -> Mapping[str, Factory]:
    """Register the cluster of this machine, measured clusters, and nodes of GPUs."""
    gpus = {
        "v100": (GpuConfig, "nodes of 8 NVIDIA V100 SXM2 32 GB, as DGX-1"),
        "a100": (GpuConfig, "nodes of 8 NVIDIA A100 SXM 80 GB, as DGX A100"),
        "h100": (GpuConfig, "nodes of 8 NVIDIA H100 SXM 80 GB, as DGX H100"),
        "h200": (GpuConfig, "nodes of 8 NVIDIA H200 SXM 141 GB, as DGX H200"),
        "b200": (GpuConfig, "nodes of 8 NVIDIA B200 180 GB, as DGX B200"),
    }
    own = {
        "local": (LocalConfig, "the ranks of one process, one CPU core each"),
        "measured": (MeasuredConfig, "a machine that sbp-calibrate has measured"),
    }
    return {
        **factories("sbp_launch.clusters.nvidia:build_{name}", gpus),
        **factories("sbp_launch.clusters.local:build_{name}", own),
    }


@hookimpl
def sbp_loggers() -> Mapping[str, Factory]:
    """Register metric sinks."""
    files = {
        "jsonl": (JsonlConfig, "one JSON object a line and step"),
        "csv": (CsvConfig, "lines of step, metric, value"),
        "none": (EmptyConfig, "metrics are not kept"),
    }
    others = {"tensorboard": (TensorboardConfig, "event files for TensorBoard, and JSON lines")}
    return {
        **factories("sbp_launch.metrics.files:build_{name}", files),
        **factories("sbp_launch.metrics.tensorboard:build", others),
    }


@hookimpl
def sbp_callbacks() -> Mapping[str, Factory]:
    """Register callbacks of the trainer."""
    kinds = {"early_stop": (EarlyStopConfig, "end a run whose evaluations no longer improve")}
    return factories("sbp_launch.trainer.early_stop:EarlyStop", kinds)


@hookimpl
def sbp_storages() -> Mapping[str, Factory]:
    """Register storages of checkpoints."""
    local = {"local": (LocalStorageConfig, "a folder, by default of the run")}
    objects = {"fsspec": (FsspecConfig, "an object store, or another file system of fsspec")}
    return {
        **factories("sbp_launch.checkpoint.folder_storage:build_{name}", local),
        **factories("sbp_launch.checkpoint.objects:build_{name}", objects),
    }


@hookimpl
def sbp_launchers() -> Mapping[str, Factory]:
    """Register launchers, which start the processes of a run."""
    threads = {
        # For callers that do not know the boxing backend; otherwise `choose_launcher` resolves it.
        "auto": (AutoLauncherConfig, "as boxing needs it, or by the launcher that runs sbp-train"),
        "threads": (ThreadsConfig, "all ranks in one process, as threads"),
    }
    others = {
        "spawn": (ProcessesConfig, "one process a rank on this machine, watched by sbp-train"),
        "torchrun": (ProcessesConfig, "one process a rank under torchrun"),
        "mpiexec": (ProcessesConfig, "one process a rank under mpiexec"),
        "slurm": (SlurmConfig, "one process a rank on Slurm: under srun, or by submitit"),
    }
    return {
        **factories("sbp_launch.launching.launchers:Threads", threads),
        **factories("sbp_launch.launching.launchers:{Name}", others),
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Register the folder with the Hydra options of these plugins."""
    return ["pkg://sbp_launch.conf"]
