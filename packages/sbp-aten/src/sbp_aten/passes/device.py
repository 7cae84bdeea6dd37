"""Convert a step that was captured on CPUs so that it runs on GPUs.

A step is always captured on fake CPU tensors: that needs no GPU, and PyTorch built for CPUs cannot
differentiate on fake GPU tensors. Two things in the graph refer to the CPU: the `device` of
factories, and the kernel of fused attention.
"""

from __future__ import annotations

from dataclasses import replace

from sbp_core.errors import GraphError
from sbp_core.graph import Argument, LogicalGraph, Node, Ref, Symbol, TensorType
from sbp_core.passes import GraphWriter

_FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
_EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"
_EFFICIENT_BACKWARD = "aten._scaled_dot_product_efficient_attention_backward.default"

#: dtypes that the memory-efficient kernels support.
_DTYPES = ("float32", "float16", "bfloat16")

#: Queries to a multiple of which the log-sum-exp is padded, and elements to which rows of a mask
#: are aligned. Source: PyTorch 2.13, aten/src/ATen/native/transformers/attention.cpp.
_PADDED_QUERIES, _ALIGNED_MASK = 32, 16


def place_on_device(graph: LogicalGraph, device: str) -> LogicalGraph:
    """Return the graph for tensors on another kind of device; for `cpu`, the graph itself.

    before: out, lse = _scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
            m = full([4, 4], 0.0, device=cpu)
    after:  out, lse, .. = _scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
            m = full([4, 4], 0.0, device=cuda)

    Args:
        graph: A graph captured on CPUs.
        device: `cpu` or `cuda`.

    Raises:
        GraphError: the graph has attention of a dtype for which GPUs have no fused kernel.
    """
    if device == "cpu":
        return graph
    writer = GraphWriter(graph)
    attention = _Attention(writer)
    for node in graph.nodes:
        if node.op == _FORWARD:
            attention.forward(node)
        elif node.op == _BACKWARD:
            attention.backward(node)
        else:
            writer.nodes.append(_on_device(node, device))
    return writer.written()


def _on_device(node: Node, device: str) -> Node:
    """Return a factory node for the device; any other node unchanged."""
    args = _moved(node.args, device)
    kwargs = {name: _moved(value, device) for name, value in node.kwargs.items()}
    same = args == node.args and kwargs == node.kwargs
    return node if same else replace(node, args=args, kwargs=kwargs)


def _moved(argument: Argument, device: str) -> Argument:
    """Return an argument with any device replaced by `device`."""
    if isinstance(argument, Symbol) and argument.kind == "device":
        return Symbol("device", device)
    if isinstance(argument, tuple):
        return tuple(_moved(part, device) for part in argument)
    return argument


class _Attention:
    """Writes attention with the memory-efficient kernels of GPUs.

    They support float32 and half precision, a mask or a causal mask. For dropout they save a seed
    and an offset, which are unused here, because capture writes dropout as a separate mask.
    """

    def __init__(self, writer: GraphWriter) -> None:
        self.writer = writer
        #: Name of a log-sum-exp -> its seed, its offset, and the mask.
        self._saved: dict[str, tuple[Ref, Ref, Argument]] = {}

    def forward(self, node: Node) -> None:
        """Write a call of the forward kernel."""
        query, key, value = node.args[:3]
        given = dict(zip(("dropout_p", "is_causal"), node.args[3:], strict=False))
        dropout, is_causal = given.get("dropout_p", 0.0), given.get("is_causal", False)
        mask = self._aligned(node, node.kwargs.get("attn_mask"))
        kind = self.writer.tensor(query.name)
        if kind.dtype not in _DTYPES:
            raise GraphError(
                f"GPUs have no fused attention in {kind.dtype}",
                where=(f"op {node.name!r}, module {node.module!r}", node.source),
                accepted=", ".join(_DTYPES),
                todo="convert the model, or call it inside "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
            )
        out, rows = node.outputs
        seed, offset = (Ref(f"{node.name}.{name}") for name in ("seed", "offset"))
        self.writer.types |= {ref.name: TensorType((), "int64") for ref in (seed, offset)}
        batch, heads, queries, _ = kind.shape
        padded = -(-queries // _PADDED_QUERIES) * _PADDED_QUERIES
        self.writer.types[rows] = TensorType((batch, heads, padded), "float32")
        self._saved[rows] = seed, offset, mask
        self.writer.nodes.append(
            replace(
                node,
                op=_EFFICIENT,
                args=(query, key, value, mask, True, dropout, is_causal),
                kwargs={key: node.kwargs[key] for key in node.kwargs if key == "scale"},
                outputs=(out, rows, seed.name, offset.name),
            )
        )

    def backward(self, node: Node) -> None:
        """Write a call of the backward kernel, without the gradient of the mask."""
        gradient, query, key, value, out, rows, dropout, is_causal = node.args
        seed, offset, mask = self._saved[rows.name]
        self.writer.nodes.append(
            replace(
                node,
                op=_EFFICIENT_BACKWARD,
                args=(
                    *(gradient, query, key, value, mask, out, rows, seed, offset, dropout),
                    (True, True, True, False),
                    is_causal,
                ),
                kwargs={key: node.kwargs[key] for key in node.kwargs if key == "scale"},
            )
        )

    def _aligned(self, node: Node, mask: Argument) -> Argument:
        """Return a mask of every batch entry and head, in rows that are aligned."""
        if not isinstance(mask, Ref):
            return mask
        kind = self.writer.tensor(mask.name)
        queries, keys = (self.writer.tensor(node.args[at].name).shape for at in (0, 1))
        rows = keys[-2]
        if rows % _ALIGNED_MASK:
            wide = (*kind.shape[:-1], -(-rows // _ALIGNED_MASK) * _ALIGNED_MASK)
            padding = (0, wide[-1] - rows)
            made = TensorType(wide, kind.dtype)
            mask = self.writer.call(node, "aten.constant_pad_nd.default", (mask, padding), made)
            args = (mask, len(wide) - 1, 0, rows)
            mask = self.writer.call(node, "aten.slice.Tensor", args, kind)
        shape = (*queries[:-2], queries[-2], rows)
        if kind.shape == shape:
            return mask
        made = TensorType(shape, kind.dtype)
        return self.writer.call(node, "aten.expand.default", (mask, shape), made)
