"""Which option somebody meant who wrote another name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.errors import nearest

#: What others call our options.
OTHER_OPTIONS: Mapping[str, str] = {
    "boxing=gloo": "torch",
    "cluster=cpu": "local",
    "data=file": "text",
    "optimizer=adam_w": "adamw",
    "planner=ddp": "data_parallel",
    "planner=deepspeed": "zero",
    "planner=dp": "data_parallel",
    "planner=fsdp": "zero",
    "planner=fsdp2": "zero",
    "planner=megatron": "tensor_parallel",
    "planner=pp": "pipeline",
    "planner=tp": "tensor_parallel",
    "planner=zero3": "zero",
}


def nearest_option(group: str, option: str, options: Sequence[str]) -> str:
    """Return the option that was meant, or `""`.

    >>> nearest_option("planner", "zero3", ["manual/zero", "osdp"])
    'manual/zero'
    >>> nearest_option("planner", "tensor_paralel", ["manual/tensor_parallel", "osdp"])
    'manual/tensor_parallel'
    """
    name = option.rpartition("/")[2]
    by_name = {one.rpartition("/")[2]: one for one in reversed(options)}
    ours = OTHER_OPTIONS.get(f"{group}={name.lower()}", name)
    near = nearest(option, options) or by_name.get(nearest(name, by_name), "")
    return by_name.get(ours) or near or by_name.get(name.lower(), "")
