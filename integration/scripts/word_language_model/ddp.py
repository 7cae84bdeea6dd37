import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts import BATCH, RNNModel, parts, train_text, valid_text
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    module = RNNModel(BATCH // size)
    model = DistributedDataParallel(module, broadcast_buffers=False)
    lr, best = 4.0, None
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(1, 4):
        model.train()
        for data, targets in parts(train_text.chunk(size)[rank]):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
        model.eval()
        module.init_hidden()
        total = torch.zeros(())
        with torch.no_grad():
            for data, targets in parts(valid_text.chunk(size)[rank]):
                total += F.cross_entropy(model(data).flatten(0, 1), targets.flatten()) / 5
        module.init_hidden()
        dist.all_reduce(total)
        val_loss = total.item() / size
        if rank == 0:
            print(f"epoch {epoch}: lr {lr}, valid loss {val_loss:.3f}")
        if best is None or val_loss < best:
            best = val_loss
        else:
            lr /= 4.0
            optimizer.param_groups[0]["lr"] = lr
    dist.destroy_process_group()


main()
