import torch
import torch.distributed as dist
from parts import SiameseNetwork, test_set, train_set
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(SiameseNetwork())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.BCELoss()
    sampler = DistributedSampler(train_set, size, rank)
    train_loader = DataLoader(train_set, batch_size=32 // size, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 4):
        sampler.set_epoch(epoch)
        model.train()
        for one, other, targets in train_loader:
            optimizer.zero_grad()
            outputs = model(one, other).squeeze(1)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            one, other, targets = test_set[:]
            outputs = model(one, other).squeeze(1)
            test_loss = criterion(outputs, targets)
            correct = (outputs.round() == targets).float().mean()
        if rank == 0:
            print(f"epoch {epoch}: test loss {test_loss:.3f}, accuracy {correct:.3f}")
        scheduler.step()
    dist.destroy_process_group()


main()
