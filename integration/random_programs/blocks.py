"""The parts of models, batches and settings of random programs: code -> flags.

Flags describe how a block treats the samples of a batch. A block without a flag treats each sample
alone, or adds samples up, so that the loss of the whole batch follows from its parts:

    mixes     samples affect each other         place    depends on the place of a sample
    total     not linear in a sum over samples  size     depends on the number of samples
    first     needs a sum before the forward    backward not linear in the gradient
    state     changes a buffer in the forward   extra    a tensor of the batch without samples
    capture   a step with it cannot be captured

Other flags describe where a block fits: `vector` (rows are samples), `token` (samples have rows),
`flat` (the rows of all samples in one dim); the input of a stem, such as `floats`; `pair` (two
outputs of the model). In a layer, `$` is its module or parameter, made by the code before `=>`.
"""

from __future__ import annotations

from collections.abc import Mapping

Blocks = Mapping[str, str]

#: Flags about the meaning of a loss, rather than the place of a block.
MEANINGS = frozenset(
    ["mixes", "place", "total", "size", "first", "backward", "state", "extra", "capture"]
)

STEMS: Blocks = {
    "nn.Linear(D, H)": "vector floats", "nn.Linear(D, H) => $(x)": "token flat sequence",
    "nn.Embedding(C, H)": "token flat ids", "nn.Embedding(C, H) => $(x).mean(1)": "vector ids",
    "nn.Embedding(C, H, padding_idx=0) => $(x).sum(1)": "vector ids",
    "nn.Embedding(C, H, padding_idx=0) => $(x) * (x != 0)[..., None]": "token flat ids",
    "nn.Embedding(C, H, scale_grad_by_freq=True) => $(x).mean(1)": "vector ids backward",
    "nn.EmbeddingBag(C, H)": "vector ids", "nn.EmbeddingBag(C, H, mode='sum')": "vector ids",
    "nn.Parameter(torch.randn(C, H)) => $[x]": "token flat ids",
    "nn.Parameter(torch.randn(C, H)) => F.one_hot(x, C).to($.dtype) @ $": "token flat ids",
    "nn.Conv2d(2, H, 3, padding=1) => $(x).relu().mean((2, 3))": "vector image",
    "nn.Conv2d(2, H, 2, stride=2) => F.max_pool2d($(x), 2).flatten(1)": "vector image",
    "nn.Conv2d(2, H, 4) => $(x)[:, :, 0, 0]": "vector image",
    "nn.Conv1d(D, H, 3, padding=1) => $(x.transpose(1, 2)).transpose(1, 2)": "token flat sequence",
    "nn.LSTM(D, H, batch_first=True) => $(x)[1][0][-1]": "vector sequence",
    "nn.GRU(D, H) => $(x.transpose(0, 1))[1][0]": "vector sequence",
    "nn.RNN(D, H, batch_first=True) => $(x)[0][:, -1]": "vector sequence",
    "nn.GRU(D, H) => $(x)[1][0]": "vector sequence_first extra",
    "nn.Linear(T * D, H) => $(x.flatten(1))": "vector sequence",
    "nn.Linear(D, H) => $(x).amax(1)": "vector sequence",
    "nn.Linear(D, H) => $(x).logsumexp(1)": "vector sequence",
}  # fmt: skip

INPUTS: Blocks = {
    "x / 2": "", "x * 0.7 + 0.1": "", "x.flip(-1)": "", "x.clamp(-1, 1)": "", "x.detach()": "",
    "x.double().contiguous()": "", "torch.cat([x[..., 1:], x[..., :1]], -1)": "",
    "(x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 0.1)": "",
    "x.masked_fill(x > 1, 0.0)": "", "F.normalize(x, dim=-1)": "", "x * k": "",
    "x + 0.1 * torch.ones_like(x)": "", "x / math.sqrt(x.shape[-1])": "",
    "torch.where(x.abs() < 2, x, torch.zeros(()))": "", "x.requires_grad_(False)": "",
    "0.7 * x + 0.3 * x.flip(0)": "mixes", "0.7 * x + 0.3 * x[perm]": "mixes",
    "x.roll(1, 0)": "mixes", "(x - x.mean(0)) / (x.std(0) + 0.1)": "mixes", "x[perm]": "mixes",
    "torch.cat([x[..., :2], x.flip(0)[..., 2:]], -1)": "mixes", "x * (m.sum() / 10)": "first",
    "x / x.abs().mean()": "first", "x - x.mean()": "first", "x / x.norm()": "first",
    "x * (len(x) / 10)": "size", "torch.cat([x[:1], 0.5 * x[1:]])": "place",
}  # fmt: skip

FORMS: Blocks = {
    "z = model(x)": "", "z, u = model(x)": "pair",
    "z, u = model(x), model(0.9 * x)": "pair floats sequence image",
    "z, u = model(x), model(x).detach()": "pair",
    "z, u = model(torch.cat([x, 0.9 * x])).chunk(2)": "pair floats sequence image",
    "z, u = torch.cat([model(x), model(x)]).split(len(x))": "pair",
    "z, u = torch.stack([model(x), 0.5 * model(x)])": "pair",
    "z = torch.stack([model(row[None])[0] for row in x])": "",
    "z = torch.cat([model(part) for part in x.split(1)])": "",
    "z = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)": "",
    "z = torch.func.functional_call(model, dict(model.named_parameters()), (x,))": "",
    "z = torch.cat([model(part) for part in x.chunk(2)])": "place",
}  # fmt: skip

LAYERS: Blocks = {
    "frozen(nn.Linear(H, H))": "",
    "nn.Parameter(torch.randn(1, 1, H)) => torch.cat([$.expand(len(h), -1, -1), h], 1)[:, 1:]":
        "token flat",
    "=> torch.bmm(h.unsqueeze(2), h.unsqueeze(1)).sum(2)": "vector",
    "=> torch.cat([h, torch.zeros(len(h), 1)], -1)[..., 1:]": "vector",
    "=> torch.fft.irfft(torch.fft.rfft(h), n=H)": "",
    "=> h.reshape(h.size(0), -1).view(h.shape)": "",
    "=> h.unsqueeze(1).expand(-1, 2, *h.shape[1:]).mean(1)": "",
    "=> h.movedim(0, -1).movedim(-1, 0)": "", "nn.Tanh()": "", "nn.ReLU()": "", "nn.GELU()": "",
    "nn.SiLU()": "", "nn.Softplus()": "", "nn.LeakyReLU(0.1)": "", "nn.PReLU()": "",
    "nn.Hardtanh()": "", "nn.ELU()": "", "nn.Linear(H, H)": "", "nn.Linear(H, H, bias=False)": "",
    "nn.LayerNorm(H)": "", "nn.RMSNorm(H)": "", "nn.Dropout(0.0)": "", "nn.Identity()": "",
    "nn.Softmax(-1)": "", "nn.GroupNorm(2, H)": "vector",
    "nn.GroupNorm(2, H) => $(h.transpose(1, 2)).transpose(1, 2)": "token flat",
    "nn.InstanceNorm1d(H, affine=True) => $(h.transpose(1, 2)).transpose(1, 2)": "token flat",
    "nn.BatchNorm1d(H)": "mixes vector", "nn.BatchNorm1d(H, momentum=None)": "mixes vector",
    "nn.BatchNorm1d(H, track_running_stats=False)": "mixes vector",
    "nn.BatchNorm1d(H) => $(h.transpose(1, 2)).transpose(1, 2)": "mixes token flat",
    "nn.Linear(H, H) => h + $(h)": "", "nn.Linear(H, H) => h * $(h).sigmoid()": "",
    "nn.Linear(H, 2 * H) => F.glu($(h), -1)": "",
    "nn.Linear(H, 2 * H) => (lambda a, b: a * b.exp())(*$(h).tanh().chunk(2, -1))": "",
    "nn.Bilinear(H, H, H) => $(h, h)": "",
    "nn.Linear(H, H) => torch.utils.checkpoint.checkpoint($, h, use_reentrant=False)": "",
    "Experts(H)": "", "Codes(H)": "", "nn.Parameter(torch.zeros(())) => h * $.exp()": "",
    "nn.Parameter(torch.ones(H)) => h * $": "", "nn.Parameter(torch.eye(H)) => h @ $": "",
    "nn.Parameter(torch.eye(H)) => torch.einsum('...h,kh->...k', h, $)": "",
    "nn.Parameter(torch.ones(H)) => h + 0.1 * $.expand(len(h), -1)": "vector",
    "nn.Parameter(torch.ones(H)) => h + torch.zeros(len(h), H) + $": "vector",
    "nn.utils.parametrizations.weight_norm(nn.Linear(H, H))": "",
    "nn.utils.parametrizations.spectral_norm(nn.Linear(H, H))": "state",
    "nn.utils.parametrizations.orthogonal(nn.Linear(H, H))": "",
    "nn.GRU(H, H, batch_first=True) => $(h)[0]": "token flat",
    "nn.LSTM(H, H // 2, batch_first=True, bidirectional=True) => $(h)[0]": "token flat",
    "nn.GRU(H, H) => $(h.transpose(0, 1))[0].transpose(0, 1)": "token flat",
    "nn.GRUCell(H, H) => $(h, torch.zeros(len(h), H))": "vector",
    "nn.LSTMCell(H, H) => $(h)[0]": "vector",
    "nn.MultiheadAttention(H, 2, batch_first=True) => $(h, h, h, need_weights=False)[0]":
        "token flat",
    "nn.MultiheadAttention(H, 2, batch_first=True) => h + $(h, h, h)[0]": "token flat",
    "nn.MultiheadAttention(H, 2) => $(*[h.transpose(0, 1)] * 3)[0].transpose(0, 1)": "token flat",
    "nn.TransformerEncoderLayer(H, 2, 8, dropout=0.0, batch_first=True)": "token flat",
    "nn.TransformerEncoderLayer(H, 2, 8, 0.0, 'gelu', batch_first=True, norm_first=True)":
        "token flat",
    "nn.Linear(H, 3 * H) => attend(*$(h).chunk(3, -1))": "token flat",
    "nn.Linear(H, 3 * H) => F.scaled_dot_product_attention(*$(h).chunk(3, -1), is_causal=True)":
        "token flat",
    "nn.Conv1d(H, H, 3, padding=1) => $(h.transpose(1, 2)).transpose(1, 2)": "token flat",
    "nn.Embedding(T, H) => h + $(torch.arange(h.shape[1]))": "token flat",
    "nn.Parameter(torch.randn(1, T, H)) => h + $[:, : h.shape[1]]": "token flat",
    "=> h.cumsum(1)": "token flat", "=> h.flip(1)": "token flat", "=> h.roll(1, 1)": "token flat",
    "=> h - h.mean(1, keepdim=True)": "token flat",
    "=> h + torch.arange(h.shape[1])[:, None] / 10": "token flat",
    "=> h.transpose(0, 1).contiguous().transpose(0, 1)": "token flat",
    "=> torch.stack([row for row in h.unbind(1)], 1)": "token flat", "=> h / 2": "",
    "=> h / math.sqrt(H)": "", "=> h.clamp(-1, 1)": "", "=> h * (h > 0)": "",
    "=> F.normalize(h, dim=-1)": "", "=> h / (h.norm(dim=-1, keepdim=True) + 0.1)": "",
    "=> h.sort(-1).values": "", "=> h.topk(H, -1).values": "", "=> h.flip(-1)": "",
    "=> h.gather(-1, h.argsort(-1))": "", "=> h.cumsum(-1)": "", "=> F.pad(h, (1, 0))[..., :H]": "",
    "=> h.index_select(-1, torch.arange(H - 1, -1, -1))": "", "=> h.softmax(-1) * H": "",
    "=> torch.cat([h, h.flip(-1)], -1)[..., 1 : H + 1]": "", "=> torch.cat(h.split(1, -1), -1)": "",
    "=> torch.stack([row.tanh() for row in h])": "", "=> torch.vmap(torch.tanh)(h)": "",
    "=> h.masked_fill(h < -1, -1.0)": "", "=> torch.where(h > 0, h, 0.2 * h)": "",
    "=> h.detach() + 0.5 * (h - h.detach())": "", "=> h * h.detach().abs()": "",
    "=> torch.utils.checkpoint.checkpoint(torch.tanh, h, use_reentrant=False)": "",
    "=> GradReverse.apply(h)": "", "=> RoundThrough.apply(h)": "",
    "=> hooked(h, lambda grad: 2 * grad)": "", "=> GradClamp.apply(h)": "backward",
    "=> hooked(h, lambda grad: grad.sign())": "backward",
    "=> hooked(h, lambda grad: grad.clamp(-0.01, 0.01))": "backward",
    "=> hooked(h, lambda grad: grad / (grad.norm() + 1e-3))": "backward",
    "=> hooked(h, lambda grad: grad / (grad.norm(dim=-1, keepdim=True) + 1e-3))": "backward",
    "=> hooked(h, lambda grad: grad + 0.01)": "backward",
    "=> hooked(h, lambda grad: grad.nan_to_num())": "", "Count()": "state", "Seen()": "state",
    "MovingMean(H)": "state", "MovingPeak()": "state", "MeanCodes(H)": "state",
    "=> h - h.mean(0)": "mixes", "=> h + h.mean(0, keepdim=True)": "mixes",
    "=> h / h.norm()": "mixes", "=> h + h.flip(0)": "mixes", "=> h + h.roll(1, 0)": "mixes",
    "=> torch.cat([h[1:], h[:1]])": "mixes", "=> h / h.abs().amax()": "mixes",
    "=> h.softmax(0)": "mixes", "=> h.cumsum(0)": "mixes", "=> h.sort(0).values": "mixes",
    "=> (h @ h.T).softmax(-1) @ h": "mixes vector", "=> h[::2].repeat_interleave(2, 0)": "mixes",
    "=> h * torch.arange(len(h)).view(-1, *[1] * (h.ndim - 1))": "place",
    "=> torch.cat([2 * h[:1], h[1:]])": "place", "=> torch.cat(h.chunk(2))": "",
    "=> h / len(h)": "size", "=> h * len(h) ** 0.5": "size",
}  # fmt: skip

HEADS: Blocks = {
    "nn.Linear(H, C)": "", "nn.Linear(H, C, bias=False)": "",
    "nn.Parameter(torch.randn(C, H)) => F.normalize(h, dim=-1) @ F.normalize($, dim=-1).T / 0.07":
        "",
    "nn.Parameter(torch.randn(C, H)) => F.linear(h, $) / 30": "",
    "nn.Parameter(torch.randn(C, H)) => torch.tanh(h @ $.T / 30) * 30": "",
    "nn.Parameter(torch.randn(C, H)) => -(h.unsqueeze(-2) - $).square().sum(-1)": "",
    "nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, C))": "",
    "=> F.linear(h, self.stem.weight)": "tied",
}  # fmt: skip

OPTIMIZERS: Blocks = {
    "torch.optim.SGD({}, lr=0.05)": "",
    "torch.optim.SGD({}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)": "",
    "torch.optim.SGD({}, lr=0.05, momentum=0.9, dampening=0.1, maximize=False)": "",
    "torch.optim.Adam({}, lr=0.01)": "",
    "torch.optim.Adam({}, lr=0.01, amsgrad=True, weight_decay=0.01)": "",
    "torch.optim.AdamW({}, lr=0.01)": "",
    "torch.optim.AdamW({}, lr=0.01, foreach=False, betas=(0.8, 0.9))": "",
    "torch.optim.RMSprop({}, lr=0.01, centered=True, eps=1e-3)": "",
    "torch.optim.Adagrad({}, lr=0.01, eps=1e-3)": "",
    "torch.optim.Adadelta({}, lr=0.5, eps=1e-3)": "", "torch.optim.Adamax({}, lr=0.01)": "",
    "torch.optim.NAdam({}, lr=0.01)": "", "torch.optim.RAdam({}, lr=0.01)": "",
}  # fmt: skip

GROUPS: Blocks = {
    "model.parameters()": "", "[p for p in model.parameters() if p.requires_grad]": "",
    "[{'params': [p for p in model.parameters() if p.ndim > 1]}, {'params': [p for p in "
    "model.parameters() if p.ndim < 2], 'weight_decay': 0.0}]": "",
    "[{'params': list(model.stem.parameters()) if isinstance(model.stem, nn.Module) else "
    "[model.stem], 'lr': 0.002}, {'params': [p for n, p in "
    "model.named_parameters() if not n.startswith('stem')]}]": "",
}  # fmt: skip

BATCHES: Blocks = {"dict": "", "tuple": "", "nested": ""}

#: Settings of `parallelize`; STAGES are the modules of two stages.
LAYOUTS: Blocks = {
    "mesh=1": "",
    "mesh=1, planner='manual/data_parallel'": "",
    "mesh=2, planner='manual/data_parallel'": "",
    "mesh=2, planner='manual/zero'": "",
    "mesh=2, planner='manual/zero', runtime='reference'": "",
    "mesh=4, planner='manual/zero2'": "",
    "mesh={'tensor': 2}, planner='manual/tensor_parallel'": "",
    "mesh=2, planner='greedy'": "",
    "mesh=2": "",
    "mesh=(2, 2)": "",
    "mesh={'pipe': 2}, planner={'name': 'manual/pipeline', 'stage_patterns': STAGES}": "",
    "mesh={'pipe': 2, 'data': 2}, planner={'name': 'manual/pipeline', 'stage_patterns': "
    "STAGES}": "",
}
