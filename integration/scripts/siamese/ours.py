import torch
from parts import SiameseNetwork, test_set, train_set
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from sbp_launch import parallelize


def loss(model, batch):
    one, other, targets = batch
    outputs = model(one, other).squeeze(1)
    correct = (outputs.round() == targets).float().mean()
    return nn.BCELoss()(outputs, targets), {"accuracy": correct}


def main():
    torch.manual_seed(1)
    model = SiameseNetwork()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with parallelize(model, loss, train_set[:16], optimizer, batch_is="local") as step:
        rank, size = step.data_parallel_rank, step.data_parallel_size
        sampler = DistributedSampler(train_set, size, rank)
        train_loader = DataLoader(train_set, batch_size=32 // size, sampler=sampler)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        for epoch in range(1, 4):
            sampler.set_epoch(epoch)
            for batch in train_loader:
                step(batch)
            test_loss = step.evaluate(test_set[:], batch_is="global")
            correct = test_loss.metrics["accuracy"]
            if rank == 0:
                print(f"epoch {epoch}: test loss {test_loss:.3f}, accuracy {correct:.3f}")
            scheduler.step()


main()
