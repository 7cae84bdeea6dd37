"""The hooks of this plugin: names, settings, and factories."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """Settings of the planner: the mesh axis that splits the batch, the first one if empty."""

    axis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Settings of the model."""

    vocabulary: int = 256
    context: int = 64
    hidden: int = 64
    rank: int = 16

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "hidden", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Settings of the data set."""

    vocabulary: int = 256
    context: int = 64
    num_samples: int = 10_000

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackConfig:
    """Settings of the callback: the loss to reach, and how slowly its average follows it."""

    loss: float = 1.0
    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"decay={self.decay} is not in [0, 1)")


@hookimpl
def sbp_planners() -> Mapping[str, Factory]:
    """Return name -> factory; users write the name after `planner=`."""
    return {
        "example": Factory(
            build="sbp_example_plugin.planner:build",
            config=PlannerConfig,
            summary="data parallel on one mesh axis",
        )
    }


@hookimpl
def sbp_models() -> Mapping[str, Factory]:
    """Return name -> factory; users write the name after `model=`."""
    return {
        "example": Factory(
            build="sbp_example_plugin.model:build",
            config=ModelConfig,
            summary="predicts each token from the one before",
        )
    }


@hookimpl
def sbp_datasets() -> Mapping[str, Factory]:
    """Return name -> factory; users write the name after `data=`."""
    return {
        "example": Factory(
            build="sbp_example_plugin.data:build",
            config=DataConfig,
            summary="sequences that count up",
        )
    }


@hookimpl
def sbp_callbacks() -> Mapping[str, Factory]:
    """Return name -> factory; users write the name in `trainer.callbacks`."""
    return {
        "example": Factory(
            build="sbp_example_plugin.callback:build",
            config=CallbackConfig,
            summary="end a run whose loss has reached a target",
        )
    }


def low_rank_notation(_: object) -> str:
    """Return the notation of the operator in `operator.py`: sums of products over i and r."""
    return "n i, i r, r o -> n o"


@hookimpl
def sbp_signatures() -> Mapping[str, Factory]:
    """Return operator -> factory of its rule: a notation, or a `sbp_core.signatures.Rule`."""
    return {
        "sbp_example.low_rank.default": Factory(
            build="sbp_example_plugin.plugin:low_rank_notation",
            summary="x·a·b, the product of three matrices",
        )
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Return the folder with `planner/example.yaml`, `model/example.yaml`, `data/example.yaml`."""
    return ["pkg://sbp_example_plugin.conf"]
