"""Let a rank of a training run fail at a chosen moment; Python imports this module when it starts.

Every process of a trial of `kills.training` has this folder in PYTHONPATH. The variable SBP_KILL is
JSON: the `rank` that fails, the `moment` of the failure, `how` it fails, and the `folder` for the
file `fired`, which contains the time. Without the variable nothing happens.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

#: The step, counted from 0, in which a rank fails in forward or in the update.
_STEP = 2

#: The piece of a checkpoint, counted from 0, after which a writing rank fails.
_PIECE = 3


class ToldToFailError(Exception):
    """The error of a rank that fails by raising."""


def _fail(settings: dict[str, Any]) -> None:
    """Fail, if this process is the chosen rank."""
    from sbp_launch.world import World

    world = World.of_environment()
    if world.size == 1 or world.rank != settings["rank"]:
        return
    fired = Path(settings["folder"]) / "fired"
    if fired.exists():
        return
    unfinished = fired.with_suffix(".part")
    unfinished.write_text(json.dumps([time.monotonic(), os.getpid()]), "utf-8")
    unfinished.rename(fired)
    if settings["how"] == "sys.exit":
        sys.exit(4)
    if settings["how"] == "sys.exit(0)":
        sys.exit(0)
    if settings["how"] == "os._exit(0)":
        os._exit(0)
    if settings["how"] == "exception":
        raise ToldToFailError("this rank was told to fail")
    os.kill(os.getpid(), getattr(signal, settings["how"]))


def _before(owner: Any, name: str, when: Callable[..., bool], settings: dict[str, Any]) -> None:
    """Let a function fail when it is called with arguments for which `when` is true."""
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def failing(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            _fail(settings)
        return whole(*args, **kwargs)

    setattr(owner, name, failing)


def _always(*args: object) -> bool:
    return True


def _in_forward(worker: object, post: Any, firing: object, order: Any, report: object) -> bool:
    return order.index == _STEP and post.actor.phase == "forward"


def _in_update(worker: object, post: Any, firing: object, order: Any, report: object) -> bool:
    return order.index == _STEP and bool(post.actor.writes)


def _patch_import(module: ModuleType, settings: dict[str, Any]) -> None:
    _fail(settings)


def _patch_capture(module: ModuleType, settings: dict[str, Any]) -> None:
    _before(module, "plan_program", _always, settings)


def _patch_first_step(module: Any, settings: dict[str, Any]) -> None:
    _before(module.ActorSession, "step", lambda session, *_: session.steps_done == 0, settings)


def _patch_forward(module: Any, settings: dict[str, Any]) -> None:
    _before(module.ActorThread, "_fire", _in_forward, settings)


def _patch_update(module: Any, settings: dict[str, Any]) -> None:
    _before(module.ActorThread, "_fire", _in_update, settings)


def _patch_writing(module: Any, settings: dict[str, Any]) -> None:
    # When a part of the file is written.
    calls = itertools.count()
    _before(module, "_write_piece", lambda *_: next(calls) == _PIECE, settings)


def _patch_commit(module: Any, settings: dict[str, Any]) -> None:
    # All ranks have reported that their files exist.
    _before(module._StagedLocal, "commit", _always, settings)


def _patch_end(module: ModuleType, settings: dict[str, Any]) -> None:
    _before(module, "save_states", _always, settings)


#: For each moment: the module to change after its import, and the change.
_MOMENTS: dict[str, tuple[str, Callable[[Any, dict[str, Any]], None]]] = {
    "import": ("sbp_launch.trainer.trainer", _patch_import),
    "capture": ("sbp_launch.trainer.trainer", _patch_capture),
    "first step": ("sbp_actor_runtime.session", _patch_first_step),
    "forward": ("sbp_actor_runtime.worker", _patch_forward),
    "update": ("sbp_actor_runtime.worker", _patch_update),
    "writing": ("sbp_launch.checkpoint.writing", _patch_writing),
    "commit": ("sbp_launch.checkpoint.folder_storage", _patch_commit),
    "end": ("sbp_launch.trainer.trainer", _patch_end),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module by the other finders, and changes it after its import."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.name, self.patch = _MOMENTS[settings["moment"]]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"{name} is installed"
        assert spec.loader is not None, f"{name} is a module"
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.patch(module, self.settings)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign] # for this module
        return spec


if "SBP_KILL" in os.environ:
    sys.meta_path.insert(0, _Finder(json.loads(os.environ["SBP_KILL"])))
