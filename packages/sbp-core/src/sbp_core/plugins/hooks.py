"""The hooks of sbp: the functions that a plugin module may implement, and the API version.

A plugin is a module named by an entry point of group `sbp`. It imports nothing heavy, states
`SBP_API_VERSION = 2`, and implements any of the hooks below with `@hookimpl`; each returns
name -> `Factory` (or paths, for config folders). Kinds are described in `plugins.kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Protocol

import pluggy

from sbp_core.errors import SbpTypeError

#: Version of these hooks. A plugin states the version it was written for. Since version 2, data
#: sets return samples by number (`num_samples`, `samples`); before, batches (`batch`).
API_VERSION = 2

#: Project name of pluggy and group of the entry points.
PROJECT = "sbp"

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a function of a plugin module as the implementation of the hook of its name.
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class EmptyConfig:
    """The config of a plugin that has no settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """The description of one plugin object; its modules are imported only when it is made.

    Args:
        build: `"package.module:callable"`; called with an instance of `config`.
        config: Frozen dataclass of the plugin's settings, which its YAML is merged into; it is in a
            module that imports nothing heavy.
        summary: One line for listings.
        former_names: Names that it had in an earlier release; they still work, with a warning.
    """

    build: str
    config: type = EmptyConfig
    summary: str = ""
    former_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.build, str) or self.build.count(":") != 1:
            raise SbpTypeError(
                f"build={self.build!r} names no callable", accepted='"package.module:callable"'
            )
        if not isinstance(self.summary, str):
            raise SbpTypeError(f"summary={self.summary!r} of {self.build} is no text")
        if not is_dataclass(self.config) or not isinstance(self.config, type):
            raise SbpTypeError(
                f"config={self.config!r} of {self.build} is no dataclass",
                accepted="a frozen dataclass with one field for each setting",
            )


def factories(build: str, plugins: Mapping[str, tuple[type, str]]) -> dict[str, Factory]:
    """Return the `Factory` of each plugin in a table.

    Args:
        build: `Factory.build`, where `{name}` stands for the name of the plugin, and `{Name}` for
            that name with a capital letter: `"my_package.{name}:{Name}Planner"`.
        plugins: The config and the summary of each plugin, by its name.
    """
    return {
        name: Factory(
            build=build.format(name=name, Name=name.capitalize()), config=of, summary=what
        )
        for name, (of, what) in plugins.items()
    }


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
    "storage": "sbp_storages",
    "callback": "sbp_callbacks",
    "launcher": "sbp_launchers",
    "pass": "sbp_passes",
    "signature": "sbp_signatures",
    "tensor_library": "sbp_tensor_libraries",
}


#: The method that an object of a kind must have; other kinds are checked where they are used.
METHODS = {
    "cluster": "__call__",
    "planner": "plan",
    "optimizer": "__call__",
    "logger": "__call__",
    "storage": "__call__",
    "launcher": "launch_specs",
    "pass": "__call__",
}


class HookSpecs(Protocol):
    """The hooks. Each returns name -> `Factory`; its docstring names the type that `build` returns.

    The pages `docs/reference/api/` are made of these docstrings: `Suite:` names the tests to run.
    """

    @hookspec
    def sbp_models(self) -> Mapping[str, Factory]:
        """Models: an `nn.Module` that is a `sbp_torch.kinds.TrainableModel`.

        Suite: `sbp_torch.testing.model.ModelConformance`.
        """

    @hookspec
    def sbp_datasets(self) -> Mapping[str, Factory]:
        """Data sets: `sbp_torch.kinds.Dataset`.

        Suite: `sbp_torch.testing.data.DatasetConformance`.
        """

    @hookspec
    def sbp_clusters(self) -> Mapping[str, Factory]:
        """Cluster profiles: `sbp_core.plugins.ClusterFactory`.

        Suite: `sbp_core.testing.cluster_suite.ClusterConformance`.
        """

    @hookspec
    def sbp_boxing_backends(self) -> Mapping[str, Factory]:
        """Boxing backends: `sbp_core.boxing.BoxingBackend`.

        Suite: `sbp_torch.testing.boxing.BoxingConformance`.
        """

    @hookspec
    def sbp_runtimes(self) -> Mapping[str, Factory]:
        """Runtimes: `sbp_core.runtime.Runtime`.

        Suite: `sbp_torch.testing.runtime.RuntimeConformance`.
        """

    @hookspec
    def sbp_planners(self) -> Mapping[str, Factory]:
        """Planners: `sbp_core.planning.Planner`, mostly a `sbp_core.planning.SearchedPlanner`.

        Suite: `sbp_core.testing.planner.PlannerConformance`.
        """

    @hookspec
    def sbp_optimizers(self) -> Mapping[str, Factory]:
        """Optimizers: `sbp_torch.kinds.OptimizerFactory`.

        Suite: `sbp_torch.testing.optimizer.OptimizerConformance`.
        """

    @hookspec
    def sbp_loggers(self) -> Mapping[str, Factory]:
        """Metric sinks (loggers): `sbp_core.plugins.MetricSinkFactory`.

        Suite: `sbp_core.testing.logger.MetricSinkConformance`.
        """

    @hookspec
    def sbp_storages(self) -> Mapping[str, Factory]:
        """Storages of checkpoints: `sbp_core.plugins.StorageFactory`.

        Suite: `sbp_core.testing.storage.StorageConformance`.
        """

    @hookspec
    def sbp_callbacks(self) -> Mapping[str, Factory]:
        """Callbacks of the trainer: `sbp_core.plugins.Callback`.

        Suite: `sbp_core.testing.callback.CallbackConformance`.
        """

    @hookspec
    def sbp_launchers(self) -> Mapping[str, Factory]:
        """Launchers: `sbp_core.processes.Launcher`.

        Suite: `sbp_core.testing.launcher.LauncherConformance`.
        """

    @hookspec
    def sbp_passes(self) -> Mapping[str, Factory]:
        """Graph passes: `sbp_core.plugins.GraphPass`.

        Suite: `sbp_torch.testing.graph_pass.GraphPassConformance`.
        """

    @hookspec
    def sbp_signatures(self) -> Mapping[str, Factory]:
        """`sbp_core.signatures.Rule` of `lib.op.default`; `sbp_core.signatures.RuleSet` of `lib`.

        Suite: `sbp_torch.testing.signatures.check_rule`.
        """

    @hookspec
    def sbp_tensor_libraries(self) -> Mapping[str, Factory]:
        """A `sbp_core.signatures.CallLibrary` that is also a `sbp_core.memory.LayoutLibrary`."""

    @hookspec
    def sbp_config_folders(self) -> Sequence[str]:
        """Hydra search paths, such as `pkg://mypackage.conf`."""
