"""What sbp-launch itself offers: optimizers, clusters, sinks, storages, callbacks, launchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.plugins import Factory, hookimpl
from sbp_launch.checkpoint.local import LocalStorageConfig
from sbp_launch.checkpoint.objects import FsspecConfig
from sbp_launch.clusters.local import LocalConfig
from sbp_launch.clusters.measured import MeasuredConfig
from sbp_launch.clusters.nvidia import GpuConfig
from sbp_launch.launching.launchers import AutoConfig, ProcessesConfig, SlurmConfig, ThreadsConfig
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
    SgdConfig,
)
from sbp_launch.trainer.early_stop import EarlyStopConfig

SBP_API_VERSION = 2


@hookimpl
def sbp_optimizers() -> Mapping[str, Factory]:
    """Offer optimizers of `torch.optim` and `sbp_torch.optim`."""
    kinds: dict[str, tuple[type, str]] = {
        "adafactor": (AdafactorConfig, "Adam with factored squares, relative to the weights"),
        "adagrad": (AdagradConfig, "rates that fall with the sum of squares"),
        "adam": (AdamConfig, "mean and mean square of gradients"),
        "adamw": (AdamWConfig, "Adam with decoupled weight decay"),
        "lamb": (LambConfig, "Adam scaled to the norm of each parameter"),
        "lars": (LarsConfig, "momentum scaled to the norm of each parameter"),
        "lion": (LionConfig, "the sign of a momentum"),
        "muon": (MuonConfig, "orthogonal momentum for matrices, AdamW for the rest"),
        "rmsprop": (RmspropConfig, "gradients over the root of their mean square"),
        "sgd": (SgdConfig, "stochastic gradient descent with momentum"),
    }
    return {
        name: Factory(build=f"sbp_launch.optimizers:build_{name}", config=config, summary=summary)
        for name, (config, summary) in kinds.items()
    }


@hookimpl
def sbp_clusters() -> Mapping[str, Factory]:
    """Offer the cluster that is one process, those that were measured, and nodes of GPUs."""
    gpus = {
        "v100": "nodes of 8 NVIDIA V100 SXM2 32 GB, as DGX-1",
        "a100": "nodes of 8 NVIDIA A100 SXM 80 GB, as DGX A100",
        "h100": "nodes of 8 NVIDIA H100 SXM 80 GB, as DGX H100",
        "h200": "nodes of 8 NVIDIA H200 SXM 141 GB, as DGX H200",
        "b200": "nodes of 8 NVIDIA B200 180 GB, as DGX B200",
    }
    return {
        **{
            name: Factory(
                build=f"sbp_launch.clusters.nvidia:build_{name}", config=GpuConfig, summary=summary
            )
            for name, summary in gpus.items()
        },
        "local": Factory(
            build="sbp_launch.clusters.local:build_local",
            config=LocalConfig,
            summary="the ranks of one process, one CPU core each",
        ),
        "measured": Factory(
            build="sbp_launch.clusters.measured:build_measured",
            config=MeasuredConfig,
            summary="a machine that sbp-calibrate has measured",
        ),
    }


@hookimpl
def sbp_loggers() -> Mapping[str, Factory]:
    """Offer metric sinks."""
    return {
        "jsonl": Factory(
            build="sbp_launch.metrics.files:build_jsonl",
            config=JsonlConfig,
            summary="one JSON object a line and step",
        ),
        "csv": Factory(
            build="sbp_launch.metrics.files:build_csv",
            config=CsvConfig,
            summary="lines of step, metric, value",
        ),
        "tensorboard": Factory(
            build="sbp_launch.metrics.tensorboard:build",
            config=TensorboardConfig,
            summary="event files for TensorBoard, and JSON lines",
        ),
        "none": Factory(
            build="sbp_launch.metrics.files:build_none", summary="metrics are not kept"
        ),
    }


@hookimpl
def sbp_callbacks() -> Mapping[str, Factory]:
    """Offer callbacks of the trainer."""
    return {
        "early_stop": Factory(
            build="sbp_launch.trainer.early_stop:build_early_stop",
            config=EarlyStopConfig,
            summary="end a run that no longer becomes better",
        )
    }


@hookimpl
def sbp_storages() -> Mapping[str, Factory]:
    """Offer places of checkpoints."""
    return {
        "local": Factory(
            build="sbp_launch.checkpoint.local:build_local",
            config=LocalStorageConfig,
            summary="a folder, of the run if it is not named",
        ),
        "fsspec": Factory(
            build="sbp_launch.checkpoint.objects:build_fsspec",
            config=FsspecConfig,
            summary="an object store, or whatever else fsspec reaches",
        ),
    }


@hookimpl
def sbp_launchers() -> Mapping[str, Factory]:
    """Offer what starts the processes of a run."""
    kinds: dict[str, tuple[type, str]] = {
        "auto": (AutoConfig, "as boxing needs it, and by who started sbp-train"),
        "threads": (ThreadsConfig, "all ranks in one process, as threads"),
        "spawn": (ProcessesConfig, "one process a rank on this machine, watched by sbp-train"),
        "torchrun": (ProcessesConfig, "one process a rank under torchrun"),
        "mpiexec": (ProcessesConfig, "one process a rank under mpiexec"),
        "slurm": (SlurmConfig, "one process a rank on Slurm: under srun, or by submitit"),
    }
    return {
        name: Factory(
            build=f"sbp_launch.launching.launchers:build_{name}", config=config, summary=summary
        )
        for name, (config, summary) in kinds.items()
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Offer the Hydra options of the above."""
    return ["pkg://sbp_launch.conf"]
