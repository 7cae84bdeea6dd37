import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts import Net, test_set, train_set
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    sampler = DistributedSampler(train_set, size, rank)
    train_loader = DataLoader(train_set, batch_size=32 // size, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=128)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        sampler.set_epoch(epoch)
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
        model.eval()
        test_loss, correct = 0.0, 0.0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target).item() / len(test_loader)
                correct += (output.argmax(1) == target).float().mean().item() / len(test_loader)
        if rank == 0:
            print(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {correct:.3f}")
        scheduler.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "mnist_cnn.pt")
    dist.destroy_process_group()


main()
