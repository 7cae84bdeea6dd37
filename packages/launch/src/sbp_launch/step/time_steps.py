"""Warn of, or refuse, batches whose dim 0 is time, not samples: a parallel step would cut it.

warning   tensors differ in their size of dim 0; or a module iterates over dim 0 as time
error     a module iterates over dim 0, and the results would differ from those of whole sequences
"""

from __future__ import annotations

import logging
from math import prod
from typing import Any

from torch import nn

from sbp_aten.passes import samples_met
from sbp_core.errors import ConfigError
from sbp_core.graph import LogicalGraph, Node
from sbp_core.sbp import S
from sbp_core.strategy import Strategy
from sbp_launch.planning.flow import Planned
from sbp_torch.graph_capture import flatten_batch

logger = logging.getLogger(__name__)

#: Modules that iterate over the time steps, or positions, of their input.
_SEQUENTIAL = (nn.RNNBase, nn.MultiheadAttention)

_WAY_OUT = "give the dim of the samples, such as batch_dim=1"


def time_in_front(graph: LogicalGraph, model: nn.Module) -> Node | None:
    """Return a node where a module is known to iterate over dim 0 of the batch, or None."""
    modules = {path for path, one in model.named_modules() if isinstance(one, _SEQUENTIAL)}
    return samples_met(graph, modules)


def refuse_cut_time(
    found: Node | None, model: nn.Module, *, micro_batches: int, processes: int
) -> None:
    """Raise if micro-batches or parts of processes would cut or join sequences along time.

    Args:
        found: The node where a module iterates over dim 0 of the batch.
        model: Has the module.
        micro_batches: Number of micro-batches of a step.
        processes: Number of processes that each give a part of a batch.

    Raises:
        ConfigError: micro-batches, or the parts of processes, would be segments of one sequence.
    """
    if found is None:
        return
    is_recurrent = isinstance(model.get_submodule(found.module), nn.RNNBase)
    told = f"{_model_name(model, found)} takes dim 0 of the batch as time"
    if micro_batches > 1 and is_recurrent:
        raise ConfigError(
            f"{told}, and micro_batches={micro_batches} would cut it: each micro-batch would start "
            "without the state at the end of the previous one",
            where=found.where(),
            accepted="micro-batches of samples",
            todo=f"{_WAY_OUT}; or micro_batches=1",
        )
    if processes > 1:
        raise ConfigError(
            f"{told}, and with batch_is='local' the sequences of {processes} processes would "
            "follow each other as one",
            where=found.where(),
            accepted="samples along dim 0, or along the dim that batch_dim names",
            todo=f"{_WAY_OUT}; or pass the whole batch in each process: batch_is='global'",
        )


def tell_cut_time(planned: Planned, batch: Any, found: Node | None, model: nn.Module) -> None:
    """Warn if the dim that is cut may be time.

    Args:
        planned: The plan, which determines the cut tensors.
        batch: An example of the batch that a process gives.
        found: The node where a module iterates over dim 0 of the batch.
        model: Has the module.
    """
    rows = {name: value.shape[0] for name, value in flatten_batch(batch).items() if value.dim()}
    cut = [name for name in rows if num_cuts(planned.strategy, name) > 1]
    if not cut and planned.settings.micro_batches == 1:
        return
    if len({*rows.values()}) > 1:
        logger.warning(
            "tensors of the batch have different numbers of samples: %s. If these are time steps, "
            "as along dim 0 of nn.LSTM and nn.Transformer without batch_first, ranks and "
            "micro-batches cut time: %s",
            ", ".join(f"{name!r} {size}" for name, size in rows.items()),
            _WAY_OUT,
        )
    elif found is not None:
        parts = planned.settings.micro_batches > 1
        logger.warning(
            "%s takes dim 0 of the batch as time (%s), and %s: %s",
            _model_name(model, found),
            found.where()[0],
            "micro-batches split this dim, so each sees only some of the time steps"
            if parts
            else "ranks split this dim, and exchange the time steps that they need",
            _WAY_OUT,
        )


def num_cuts(strategy: Strategy, name: str) -> int:
    """Return the number of parts into which dim 0 of a batch tensor is split."""
    stored = strategy.storage[name]
    sizes = strategy.stages[stored.stage].mesh_shape
    return prod(size for sbp, size in zip(stored.sbp, sizes, strict=True) if sbp == S(0))


def _model_name(model: nn.Module, found: Node) -> str:
    kind = type(model.get_submodule(found.module))
    name = f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__
    return f"{name} {found.module or '(root)'!r}"
