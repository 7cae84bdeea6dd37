import torch
from parts import PAD, Seq2SeqTransformer, create_mask, sentences
from torch import nn


def main():
    torch.manual_seed(0)
    transformer = Seq2SeqTransformer()
    loss_fn = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(transformer.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    train = [sentences(16) for _ in range(10)]
    valid = sentences(32)
    for epoch in range(1, 4):
        transformer.train()
        losses = 0.0
        for src, tgt in train:
            tgt_input, tgt_out = tgt[:, :-1], tgt[:, 1:]
            optimizer.zero_grad()
            logits = transformer(src, tgt_input, *create_mask(src, tgt_input))
            loss = loss_fn(logits.flatten(0, 1), tgt_out.flatten())
            loss.backward()
            optimizer.step()
            losses += loss.item() / len(train)
        transformer.eval()
        with torch.no_grad():
            src, tgt = valid
            logits = transformer(src, tgt[:, :-1], *create_mask(src, tgt[:, :-1]))
            val_loss = loss_fn(logits.flatten(0, 1), tgt[:, 1:].flatten())
        print(f"epoch {epoch}: train loss {losses:.3f}, val loss {val_loss:.3f}")


main()
