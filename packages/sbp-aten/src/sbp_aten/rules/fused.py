"""Our fused optimizer updates of one parameter: elementwise, with host numbers beside them."""

from __future__ import annotations

from sbp_core.signatures import Notation, OpCall, Rule, fresh_dims, linear


def _together(call: OpCall, *, sums: bool) -> Notation:
    """Split all tensors of the parameter's shape alike; a 0-d step belongs to all.

    Args:
        call: `sbp.fused_*(p, g, states..., [0-d step])`.
        sums: Whether new values are jointly linear in the old ones and the gradient.
    """
    dims = fresh_dims(len(call.inputs[0].shape))
    count = len(call.outputs) + 1  # the gradient is not returned
    inputs = tuple(dims if at < count else () for at in range(len(call.inputs)))
    return Notation(
        inputs=inputs,
        outputs=(dims,) * len(call.outputs),
        dependences=(linear(*range(count)),) if sums else (),
    )


_ADAPTIVE = Rule(lambda call: _together(call, sums=False))
_SGD = Rule(lambda call: _together(call, sums=True))

RULES = {
    "sbp.fused_adagrad.default": _ADAPTIVE,
    "sbp.fused_adagrad.tensor_step": _ADAPTIVE,
    "sbp.fused_adam.default": _ADAPTIVE,
    "sbp.fused_adam.tensor_step": _ADAPTIVE,
    "sbp.fused_sgd.default": _SGD,
}
