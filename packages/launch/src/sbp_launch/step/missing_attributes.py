"""Tell users who call `step.backward()` or `step.parameters()` on a parallel step what to use.

A step is not a module, loss or optimizer, and its output is not a tensor. Using their attributes
raises an `AttributeError` that names the replacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sbp_core.errors import SbpAttributeError

_STEP_DOES_IT = "step(batch) does forward, backward and update; leave this call out"
_OF_MODEL = "use this attribute of the model, whose tensors show the trained values"
_OF_OPTIMIZER = "use this attribute of the optimizer given to parallelize; the step follows it"

#: Attributes that steps do not have, and what to do instead.
OF_STEPS: Mapping[str, str] = {
    "backward": _STEP_DOES_IT,
    "zero_grad": _STEP_DOES_IT,
    "step": _STEP_DOES_IT,
    "forward": "step(batch) takes a step; step.evaluate(batch) returns the loss alone",
    "eval": "step.evaluate(batch) returns loss and metrics in evaluation mode; the mode of the "
    "model need not be switched for it",
    "train": "leave this call out: a step trains in the mode that the model is in, and "
    "step.evaluate(batch) does not change that; model.train() switches it",
    **dict.fromkeys(
        ("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules"),
        _OF_MODEL,
    ),
    "module": "use the model that was given to parallelize",
    "model": "use the model that was given to parallelize",
    "param_groups": _OF_OPTIMIZER,
    "state": _OF_OPTIMIZER,
    "optimizer": "use the optimizer that was given to parallelize",
    "clip_grad_norm_": "give update={'clip_norm': ...} to parallelize",
    **dict.fromkeys(
        ("to", "cuda", "cpu"),
        "cluster=... of parallelize says on which devices the ranks are: "
        "cluster={'name': 'local', 'device': 'cuda'}",
    ),
}

_OF_FIRST = (
    "use the first step, which parallelize returned: it has the states of all steps and "
    "starts, saves and ends them together"
)

#: Attributes that the steps returned by `add_step` do not have, and what to do instead.
OF_ADDED_STEPS: Mapping[str, str] = {
    **OF_STEPS,
    **dict.fromkeys(
        (
            "add_step",
            "beside",
            "close",
            "copy_to",
            "finish_saving",
            "load",
            "load_model",
            "load_state_dict",
            "model_state_dict",
            "optimizer_state_dict",
            "save",
            "session",
            "start",
            "state_dict",
            "steps_done",
        ),
        _OF_FIRST,
    ),
}

#: Attributes that outputs of steps do not have, and what to do instead.
OF_OUTPUTS: Mapping[str, str] = {
    "backward": "leave this call out, and optimizer.step() after it: step(batch) has taken the "
    "backward and the update",
    **{
        name: f"the loss is a number here; its tensor has that: output.loss.{name}"
        for name in dir(Tensor)
        if not name.startswith("_") and name != "backward"
    },
}


def missing_attribute(owner: object, name: str, remedies: Mapping[str, str]) -> Any:
    """Raise the error for an attribute that an object does not have, from its `__getattr__`.

    Args:
        owner: The object.
        name: The name of the attribute.
        remedies: What to do instead, by names of attributes.

    Raises:
        AttributeError: always.
    """
    if name not in remedies or hasattr(type(owner), name):
        # This raises Python's own error, or the error that a property raised.
        return object.__getattribute__(owner, name)
    raise SbpAttributeError(f"a {type(owner).__name__} has no {name!r}", todo=remedies[name])
