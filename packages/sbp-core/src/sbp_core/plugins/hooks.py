"""The hooks of sbp: what a plugin module may implement, and the version they were written for.

A plugin is a module named by an entry point of group `sbp`. It imports nothing heavy, states
`SBP_API_VERSION = 1`, and implements any of the hooks below with `@hookimpl`; each returns
name -> `Factory` (or paths, for config folders). Kinds are described in `plugins.kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Protocol

import pluggy

from sbp_core.errors import SbpTypeError

#: Version of these hooks. A plugin states the version it was written for.
API_VERSION = 1

#: Project name of pluggy and group of the entry points.
PROJECT = "sbp"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class EmptyConfig:
    """The config of a plugin that has no settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """How to make one plugin object, without importing what it needs before it is asked for.

    Args:
        build: `"package.module:callable"`; called with an instance of `config`.
        config: Frozen dataclass of the plugin's settings, which its YAML is merged into; it lives
            in a module that imports nothing heavy.
        summary: One line for listings.
    """

    build: str
    config: type = EmptyConfig
    summary: str = ""

    def __post_init__(self) -> None:
        if self.build.count(":") != 1:
            raise SbpTypeError(
                f"build={self.build!r} names no callable", accepted='"package.module:callable"'
            )
        if not is_dataclass(self.config):
            raise SbpTypeError(
                f"config={self.config!r} of {self.build} is no dataclass",
                accepted="a frozen dataclass with one field for each setting",
            )


#: Plugin kinds: the Hydra group (or listing name) of each hook that returns factories.
KINDS = {
    "model": "sbp_models",
    "data": "sbp_datasets",
    "cluster": "sbp_clusters",
    "boxing": "sbp_boxing_backends",
    "runtime": "sbp_runtimes",
    "planner": "sbp_planners",
    "optimizer": "sbp_optimizers",
    "logger": "sbp_loggers",
    "pass": "sbp_passes",
    "signature": "sbp_signatures",
    "tensor_library": "sbp_tensor_libraries",
}


class HookSpecs(Protocol):
    """The hooks. Each returns name -> `Factory`."""

    @hookspec
    def sbp_models(self) -> Mapping[str, Factory]:
        """Models: `sbp_torch.kinds.TrainableModel`."""

    @hookspec
    def sbp_datasets(self) -> Mapping[str, Factory]:
        """Data sets: `sbp_torch.kinds.Dataset`."""

    @hookspec
    def sbp_clusters(self) -> Mapping[str, Factory]:
        """Cluster profiles: `kinds.ClusterFactory`."""

    @hookspec
    def sbp_boxing_backends(self) -> Mapping[str, Factory]:
        """Boxing backends: `sbp_core.boxing.BoxingBackend`."""

    @hookspec
    def sbp_runtimes(self) -> Mapping[str, Factory]:
        """Runtimes: `sbp_core.runtime.Runtime`."""

    @hookspec
    def sbp_planners(self) -> Mapping[str, Factory]:
        """Planners: `kinds.Planner`."""

    @hookspec
    def sbp_optimizers(self) -> Mapping[str, Factory]:
        """Optimizers: `sbp_torch.kinds.OptimizerFactory`."""

    @hookspec
    def sbp_loggers(self) -> Mapping[str, Factory]:
        """Metric sinks: `kinds.MetricSinkFactory`."""

    @hookspec
    def sbp_passes(self) -> Mapping[str, Factory]:
        """Graph passes: `kinds.GraphPass`."""

    @hookspec
    def sbp_signatures(self) -> Mapping[str, Factory]:
        """Op signatures: a rule by operator (`mylib.myop.default`), or a `RuleSet` by namespace."""

    @hookspec
    def sbp_tensor_libraries(self) -> Mapping[str, Factory]:
        """Libraries that execute operators: `signatures.library.CallLibrary`, `LayoutLibrary`."""

    @hookspec
    def sbp_config_folders(self) -> Sequence[str]:
        """Hydra search paths, such as `pkg://mypackage.conf`."""
