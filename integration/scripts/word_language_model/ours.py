import torch
import torch.nn.functional as F
from parts import BATCH, RNNModel, parts, train_text, valid_text

from sbp_launch import parallelize


def loss(model, batch):
    data, targets = batch
    return F.cross_entropy(model(data).flatten(0, 1), targets.flatten())


def main():
    torch.manual_seed(1)
    model = RNNModel(BATCH)
    lr, best = 4.0, None
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    example = next(parts(train_text))
    with parallelize(model, loss, example, optimizer, update={"clip_norm": 0.25}) as step:
        for epoch in range(1, 4):
            for batch in parts(train_text):
                step(batch)
            step.copy_to(model)
            model.eval()
            model.init_hidden()
            total = torch.zeros(())
            with torch.no_grad():
                for batch in parts(valid_text):
                    total += loss(model, batch) / 5
            model.init_hidden()
            model.train()
            val_loss = total.item()
            if step.world.rank == 0:
                print(f"epoch {epoch}: lr {lr}, valid loss {val_loss:.3f}")
            if best is None or val_loss < best:
                best = val_loss
            else:
                lr /= 4.0
                optimizer.param_groups[0]["lr"] = lr


main()
