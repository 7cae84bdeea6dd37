import torch
from parts import PAD, Seq2SeqTransformer, create_mask, sentences
from torch import nn

from sbp_launch import parallelize


def loss_fn(transformer, batch):
    src, tgt = batch
    tgt_input, tgt_out = tgt[:, :-1], tgt[:, 1:]
    logits = transformer(src, tgt_input, *create_mask(src, tgt_input))
    loss_fn = nn.CrossEntropyLoss(ignore_index=PAD)
    return loss_fn(logits.flatten(0, 1), tgt_out.flatten())


def main():
    torch.manual_seed(0)
    transformer = Seq2SeqTransformer()
    optimizer = torch.optim.Adam(transformer.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    train = [sentences(16) for _ in range(10)]
    valid = sentences(32)
    with parallelize(transformer, loss_fn, train[0], optimizer) as step:
        for epoch in range(1, 4):
            losses = 0.0
            for batch in train:
                losses += step(batch) / len(train)
            val_loss = step.evaluate(valid)
            if step.world.rank == 0:
                print(f"epoch {epoch}: train loss {losses:.3f}, val loss {val_loss:.3f}")


main()
