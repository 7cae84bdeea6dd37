"""PyTorch's own ways, written as by its users: a step takes a batch and returns the loss.

Every process makes the whole batch and takes its part. It returns the loss of that part, or None if
the process computes no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from programs import LEARNING_RATE, Batch, Model, model_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2
MICRO_BATCHES = 4

Step = Callable[[Batch], Tensor | None]


class WithLoss(nn.Module):
    """A model whose forward returns the loss, as DDP and FSDP2 need."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        loss: Tensor = model_loss(self.model, batch)
        return loss


def own_part(batch: Batch) -> Batch:
    rank = dist.get_rank()
    return {name: value.chunk(NUM_RANKS)[rank] for name, value in batch.items()}


def plain_step(loss: Callable[[Batch], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        found = loss(batch)
        found.backward()
        optimizer.step()
        return found.detach()

    return step


def split_classes_step(loss: Callable[[Batch], Any], optimizer: torch.optim.Optimizer) -> Step:
    """Return a step whose loss gets logits that are split by class."""

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with loss_parallel():
            found = loss(batch)
            found.backward()
        optimizer.step()
        whole: Tensor = found.detach().full_tensor()
        return whole

    return step


def eager(model: Model, registry: Any) -> Step:
    program = model.program(registry)
    optimizer = model.make_optimizer(program.parameters())
    return plain_step(lambda batch: model_loss(program, batch), optimizer)


def ddp(model: Model, registry: Any) -> Step:
    whole = DistributedDataParallel(WithLoss(model.program(registry)))
    optimizer = model.make_optimizer(whole.parameters())
    return plain_step(lambda batch: whole(own_part(batch)), optimizer)


def zero_redundancy(model: Model, registry: Any) -> Step:
    whole = DistributedDataParallel(WithLoss(model.program(registry)))
    optimizer = ZeroRedundancyOptimizer(
        whole.parameters(), optimizer_class=model.optimizer, lr=LEARNING_RATE, **model.options
    )
    return plain_step(lambda batch: whole(own_part(batch)), optimizer)


def fsdp2(model: Model, registry: Any) -> Step:
    whole = WithLoss(model.program(registry))
    for block in whole.model.blocks:  # type: ignore[union-attr] # the zoo's GPT has them
        fully_shard(block)
    fully_shard(whole)
    optimizer = model.make_optimizer(whole.parameters())
    return plain_step(lambda batch: whole(own_part(batch)), optimizer)


def tensor_optimizer(model: Model, program: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups: fused kernels refuse to mix DTensors and tensors."""
    groups: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter in program.parameters():
        groups[isinstance(parameter, DTensor)].append(parameter)
    return model.make_optimizer([{"params": group} for group in groups if group])


def gpt_tensor_parallel(model: Model, registry: Any) -> Step:
    """Megatron's layout with the vocabulary split, as in PyTorch's tutorial on the subject."""
    program: Any = model.program(registry)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    ends = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(program, mesh, ends)
    for block in program.blocks:
        layers = {
            "attention.qkv": ColwiseParallel(),
            "attention.proj": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, layers)
    optimizer = tensor_optimizer(model, program)

    return split_classes_step(lambda batch: model_loss(program, batch), optimizer)


def dlrm_tensor_parallel(model: Model, registry: Any) -> Step:
    """The table split by columns; every rank computes all other layers on the whole batch."""
    program: Any = model.program(registry)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    table = ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(program, mesh, {"tables.0": table})
    optimizer = tensor_optimizer(model, program)
    return plain_step(lambda batch: model_loss(program, batch), optimizer)


def face_tensor_parallel(model: Model, registry: Any) -> Step:
    """The classes split; every rank computes the trunk on the whole batch."""
    program: Any = model.program(registry)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(program, mesh, {"head": head})
    optimizer = tensor_optimizer(model, program)

    return split_classes_step(lambda batch: model_loss(program, batch), optimizer)


class _Stage(nn.Module):
    """Some blocks of a GPT; the first stage has the embedding, the last one the head."""

    def __init__(self, gpt: Any, begin: int, end: int) -> None:
        super().__init__()
        self.embed = gpt.embed if begin == 0 else None
        self.blocks = gpt.blocks[begin:end]
        is_last = end == len(gpt.blocks)
        self.norm, self.head = (gpt.norm, gpt.head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if self.head is not None:
            x = self.head(self.norm(x))
        return x


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt_pipeline(schedule: Any, blocks: Sequence[int]) -> Callable[[Model, Any], Step]:
    """Return a maker of a pipeline with `blocks` in each stage; stages go to ranks in turn."""

    def make(model: Model, registry: Any) -> Step:
        gpt, rank, num_ranks = model.program(registry), dist.get_rank(), dist.get_world_size()
        ends = list(accumulate(blocks))
        own = {
            index: _Stage(gpt, end - blocks[index], end)
            for index, end in enumerate(ends)
            if index % num_ranks == rank
        }
        optimizer = model.make_optimizer(
            [parameter for part in own.values() for parameter in part.parameters()]
        )
        stages: Any = [
            PipelineStage(part, index, len(blocks), torch.device("cpu"))
            for index, part in own.items()
        ]
        if issubclass(schedule, PipelineScheduleSingle):
            (stages,) = stages
        run = schedule(stages, MICRO_BATCHES, loss_fn=_mean_loss)

        def step(batch: Batch) -> Tensor | None:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            given = (batch["tokens"],) if rank == 0 else ()
            if rank == num_ranks - 1:
                run.step(*given, target=batch["targets"], losses=losses)
            else:
                run.step(*given)
            optimizer.step()
            return torch.stack(losses).mean().detach() if losses else None

        return step

    return make


class _AllToAll(torch.autograd.Function):
    """An all-to-all from some columns of all samples to all columns of a rank's samples."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor) -> Tensor:  # (B, D / ranks) -> (B / ranks, D)
        received = torch.empty_like(columns)
        dist.all_to_all_single(received, columns.contiguous())
        return torch.cat(received.chunk(NUM_RANKS), dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        sent = torch.cat(gradients[0].chunk(NUM_RANKS, dim=1))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        # Each rank's loss is the mean over its samples; the whole loss is the mean over ranks.
        return received / NUM_RANKS


class _Rest(nn.Module):
    """A DLRM without its tables: the rows are inputs."""

    def __init__(self, dlrm: Any) -> None:
        super().__init__()
        self.bottom, self.top, self.pairs = dlrm.bottom, dlrm.top, dlrm.pairs

    def forward(self, batch: Batch, rows: Tensor) -> Tensor:
        bottom = self.bottom(batch["dense"])
        vectors = torch.stack([bottom, rows], dim=1)
        dots = vectors @ vectors.transpose(1, 2)
        pairs = dots.flatten(1).index_select(1, self.pairs)
        logits = self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, batch["clicks"])


def dlrm_hybrid(model: Model, registry: Any) -> Step:
    """By hand: the table split by columns, an all-to-all, and DDP around the MLPs."""
    dlrm: Any = model.program(registry)
    columns = dlrm.tables[0].weight.detach().chunk(NUM_RANKS, dim=1)[dist.get_rank()]
    table = nn.Parameter(columns.clone())
    rest = DistributedDataParallel(_Rest(dlrm))
    optimizer = model.make_optimizer(chain(rest.parameters(), [table]))

    def loss(batch: Batch) -> Tensor:
        rows = F.embedding(batch["sparse"][:, 0], table).sum(dim=1)
        found: Tensor = rest(own_part(batch), _AllToAll.apply(rows))
        return found

    return plain_step(loss, optimizer)


class _Gather(torch.autograd.Function):
    """Samples of all ranks; their gradients are summed over ranks and cut."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        whole = own.new_empty(NUM_RANKS * own.shape[0], *own.shape[1:])
        dist.all_gather_single(whole, own.contiguous())
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        whole = gradients[0].contiguous()
        own = whole.new_empty(whole.shape[0] // NUM_RANKS, *whole.shape[1:])
        dist.reduce_scatter_single(own, whole)
        # DDP will divide by the number of ranks, but this gradient is already a part of one loss.
        return own * NUM_RANKS


def face_hybrid(model: Model, registry: Any) -> Step:
    """By hand: DDP around the trunk, the classes split, their loss by `loss_parallel`."""
    face: Any = model.program(registry)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    classes = face.head.weight.detach().chunk(NUM_RANKS)[dist.get_rank()]
    head = nn.Parameter(classes.clone())
    trunk = DistributedDataParallel(face.trunk)
    optimizer = model.make_optimizer(chain(trunk.parameters(), [head]))

    def loss(batch: Batch) -> Tensor:
        features = _Gather.apply(trunk(own_part(batch)["x"]))
        logits = DTensor.from_local(features @ head.T, mesh, [Shard(1)])
        return F.cross_entropy(logits, batch["labels"])

    return split_classes_step(loss, optimizer)
