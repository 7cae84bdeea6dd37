import torch
import torch.nn.functional as F
from parts import Net, test_set, train_set
from torch.utils.data import DataLoader, DistributedSampler

from sbp_launch import parallelize


def loss(model, batch):
    data, target = batch
    output = model(data)
    correct = (output.argmax(1) == target).float().mean()
    return F.nll_loss(output, target), {"accuracy": correct}


def main():
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    parallel = parallelize(model, loss, train_set[:16], optimizer, batch_is="local")
    with parallel as step:
        rank, size = step.data_parallel_rank, step.data_parallel_size
        sampler = DistributedSampler(train_set, size, rank)
        train_loader = DataLoader(train_set, batch_size=32 // size, sampler=sampler)
        test_loader = DataLoader(test_set, batch_size=128)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        for epoch in range(1, 3):
            sampler.set_epoch(epoch)
            for batch in train_loader:
                step(batch)
            test_loss, correct = 0.0, 0.0
            for batch in test_loader:
                output = step.evaluate(batch, batch_is="global")
                test_loss += output / len(test_loader)
                correct += output.metrics["accuracy"].item() / len(test_loader)
            if rank == 0:
                print(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {correct:.3f}")
            scheduler.step()
        step.copy_to(model)
        if rank == 0:
            torch.save(model.state_dict(), "mnist_cnn.pt")


main()
