import torch
import torch.distributed as dist
from parts import ToyModel, data_set
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def demo_checkpoint():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data_set, 40 // size, sampler=DistributedSampler(data_set, size, rank))
    if rank == 0:
        torch.save(model.state_dict(), "model.checkpoint")
    dist.barrier()
    model.load_state_dict(torch.load("model.checkpoint", weights_only=True))
    for epoch in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())
            if rank == 0:
                print(f"epoch {epoch}: loss {loss / size:.4f}")
    dist.destroy_process_group()


demo_checkpoint()
