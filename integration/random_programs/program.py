"""A random program as a value: drawn from a seed, printed as source, split into choices."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from random import Random

from random_programs import blocks, helpers, losses
from random_programs.blocks import MEANINGS, Blocks

ONE_RANK = next(iter(blocks.LAYOUTS))

#: Name of a tensor of the batch -> how it is made; ROWS are the rows that have their own loss.
_DATA = {
    "y": "torch.randint(0, C, SHAPE, generator=g)",
    "labels": "torch.randint(0, C, SHAPE, generator=g).masked_fill(hidden(ROWS), -100)",
    "t": "torch.randn(ROWS, C, generator=g)",
    "m": "(~hidden(ROWS)).double()",
    "w": "0.1 + torch.rand(ROWS, generator=g)",
    "lengths": "torch.randint(1, T + 1, (B,), generator=g)",
    "perm": "torch.randperm(B, generator=g)",
    "k": "torch.tensor(0.7)",
    "cw": "0.5 + torch.rand(C, generator=g)",
}
_GIVEN = {
    "floats": "torch.randn(B, D, generator=g)",
    "sequence": "torch.randn(B, T, D, generator=g)",
    "sequence_first": "torch.randn(T, B, D, generator=g)",
    "ids": "torch.randint(0, C, (B, T), generator=g)",
    "image": "torch.randn(B, 2, 4, 4, generator=g)",
}


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of the loss: a reduction of weighted errors; or a number without a reduction."""

    value: str
    error: str = ""
    weights: tuple[str, ...] = ()
    scale: str = "{}"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A one-device program and its settings; blocks are keys of the tables of `blocks`.

    Args:
        seed: Seed of its values.
        sizes: B, T, D, H and C: samples, places, inputs, features and classes.
        kind: The unit with its own error: `vector`, a sample; `token`, each place of a sample;
            `flat`, the same in one dim.
        clip: Largest norm of all gradients together, or None.
    """

    seed: int
    sizes: tuple[int, int, int, int, int]
    kind: str
    stem: str
    terms: tuple[Term, ...]
    batch: str = "dict"
    inputs: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    head: str = next(iter(blocks.HEADS))
    form: str = next(iter(blocks.FORMS))
    outputs: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    optimizer: str = next(iter(blocks.OPTIMIZERS))
    groups: str = next(iter(blocks.GROUPS))
    clip: float | None = None
    micro_batches: int = 1
    layout: str = ONE_RANK

    @property
    def choices(self) -> frozenset[str]:
        """Its blocks, each with its part of the program."""
        found = set()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "terms":
                for term in value:
                    found |= {f"value {term.value}", f"error {term.error}", f"scale {term.scale}"}
                    found |= {f"weight {weight}" for weight in term.weights}
            elif isinstance(value, tuple) and field.name != "sizes":
                found |= {f"{field.name} {part}" for part in value}
            elif field.name not in ("seed", "sizes", "kind", "micro_batches"):
                found.add(f"{field.name} {value}")
        return frozenset(found)

    @property
    def meanings(self) -> frozenset[str]:
        """The flags of its blocks for which its loss may not follow from its parts."""
        tables = (blocks.STEMS, blocks.INPUTS, blocks.FORMS, blocks.LAYERS, losses.OUTPUTS,
                  losses.ERRORS, losses.WEIGHTS, losses.REDUCTIONS, losses.WHOLE, losses.SCALES,
                  losses.METRICS)  # fmt: skip
        known = {name: flags for table in tables for name, flags in table.items()}
        names = (choice.partition(" ")[2] for choice in self.choices)
        return frozenset(flag for name in names for flag in known.get(name, "").split()) & MEANINGS

    @property
    def source(self) -> str:
        """Python source that runs in the folder `integration`."""
        return _source(self)

    @property
    def fits(self) -> bool:
        """Whether plain PyTorch can run it, and its stages have modules.

        Batch norm cannot train on a single row.
        """
        normed = any("BatchNorm" in layer for layer in self.layers)
        single = "[None]" in self.form or "split(1)" in self.form
        empty = "STAGES" in self.layout and ", []]" in self.source
        return not (normed and single) and not empty


def draw(
    seed: int, micro_batches: Sequence[int] = (1, 2, 4, 0), layouts: Sequence[str] = ()
) -> Program:
    """Return the program of a seed.

    Args:
        seed: The seed.
        micro_batches: Numbers to choose from; 0 is the number of samples.
        layouts: Layouts to choose from; by default all layouts, most often one rank.
    """
    tries = (_draw(Random(f"{seed} {n}"), seed, micro_batches, layouts) for n in count())
    return next(program for program in tries if program.fits)


def _draw(
    random: Random, seed: int, micro_batches: Sequence[int], layouts: Sequence[str]
) -> Program:
    kind = random.choice(("vector", "vector", "token", "flat"))
    clean = random.random() < 0.6
    sizes = (random.choice((4, 8, 8)), *(random.choice(some) for some in ((3, 4), (3, 4), (4, 6))),
             random.choice((3, 4, 5)))  # fmt: skip

    def one(table: Blocks, *more: str) -> str:
        allowed = {name: flags for name, flags in table.items() if _allowed(flags, kind, more)}
        marked = [name for name, flags in allowed.items() if not MEANINGS.isdisjoint(flags.split())]
        plain = [name for name in allowed if name not in marked]
        return random.choice(marked if marked and not clean and random.random() < 0.25 else plain)

    stem = one(blocks.STEMS)
    given = next(flag for flag in blocks.STEMS[stem].split() if flag in _GIVEN)
    form = one(blocks.FORMS, given, "pair") if random.random() < 0.5 else Program.form
    if given == "sequence_first":
        form = Program.form
    more = [given, "pair" if "pair" in blocks.FORMS[form] else "alone"]
    more.append("alone" if form == "z, u = model(x)" else "single")
    if "nn.Embedding(" in stem and sizes[3] > 0:
        more.append("tied")
    floats = given not in ("ids", "sequence_first")
    some = 3 if random.random() < 0.3 else 1
    whole, head = random.random() < 0.4, one(blocks.HEADS, *more)
    terms = []
    for _ in range(random.choice((1, 1, 1, 2, 2, 3))):
        scale = one(losses.SCALES) if random.random() < 0.3 else "{}"
        if random.random() < 0.35 or (whole and not terms):
            terms.append(Term(value=one(losses.WHOLE, *more), scale=scale))
            continue
        weights = [one(losses.WEIGHTS, *more) for _ in range(random.choice((0, 0, 1, 1, 2)))]
        reshaping = [w for w in weights if "reshapes" in losses.WEIGHTS[w]][:1]
        weights = [w for w in weights if "reshapes" not in losses.WEIGHTS[w]]
        weights.sort(key=lambda w: "last" in losses.WEIGHTS[w])
        weights += reshaping
        value = one(losses.REDUCTIONS, *more, *([] if reshaping else ["rows"]))
        error = one(losses.ERRORS, *more)
        if reshaping and "token" in losses.REDUCTIONS[value]:
            weights.remove(reshaping[0])
        terms.append(Term(value=value, error=error, weights=tuple(weights), scale=scale))
    num_parts = random.choice(micro_batches)
    few = random.random() < 0.5
    return Program(
        seed=seed,
        sizes=sizes,  # type: ignore[arg-type]
        kind=kind,
        stem=stem,
        terms=tuple(terms),
        batch=random.choice(list(blocks.BATCHES)),
        inputs=tuple(one(blocks.INPUTS) for _ in range(random.choice((0, 0, 0, 1, 2)) * floats)),
        layers=tuple(one(blocks.LAYERS) for _ in range(random.choice((0, 1, 2, some)))),
        head=head,
        form=form,
        outputs=tuple(one(losses.OUTPUTS, *more) for _ in range(random.choice((0, 0, 1, 2)))),
        metrics=tuple(one(losses.METRICS) for _ in range(random.choice((0, 0, 1, 3)))),
        optimizer=Program.optimizer if few else random.choice(list(blocks.OPTIMIZERS)),
        groups=Program.groups if few else random.choice(list(blocks.GROUPS)),
        clip=random.choice((None, None, 0.05, 100.0)),
        micro_batches=num_parts or sizes[0],
        layout=random.choice(layouts or [*[ONE_RANK] * len(blocks.LAYOUTS), *blocks.LAYOUTS]),
    )


@cache
def _allowed(flags: str, kind: str, more: tuple[str, ...]) -> bool:
    """Whether a block fits a kind of program: it has a matching flag of each group."""
    has = set(flags.split())
    kinds, inputs = {"vector", "token", "flat"} & has, set(_GIVEN) & has
    needs = {"pair", "single", "tied", "rows"} & has
    return (
        (not kinds or kind in kinds)
        and (not inputs or bool(inputs & set(more)) or not set(_GIVEN) & set(more))
        and needs <= set(more)
    )


def _uses(code: str, name: str) -> bool:
    return re.search(rf"(?<![\w.'])\b{name}\b(?!=)", code) is not None


def _loss_lines(program: Program) -> list[str]:
    """Return the lines of the loss, without those that unpack the batch."""
    lines = [f"x = {code}" for code in program.inputs] + [program.form]
    ends = [f"z = {code}" for code in program.outputs]
    for number, term in enumerate(program.terms):
        ends += [f"e = {code}" for code in (term.error, *term.weights) if code]
        ends.append(f"term{number} = {term.value}")
    sums = [t.scale.format(*[f"term{n}"] * 3) for n, t in enumerate(program.terms)]
    ends.append(f"loss = {' + '.join(sums)}")
    if program.metrics:
        named = ", ".join(f'"metric{n}": {code}' for n, code in enumerate(program.metrics))
        ends.append(f"return loss, {{{named}}}")
    else:
        ends.append("return loss")
    channels = "z.transpose(1, 2)" if program.kind == "token" else "z"
    ends = [re.sub(r"\bZC\b", channels, line) for line in ends]
    if program.kind == "flat":
        text = "\n".join(ends)
        names = [n for n in ("z", "u", "t") if _uses(text, n) and (n != "u" or " u" in lines[-1])]
        lines += [f"{name} = {name}.flatten(0, 1)" for name in names]
        lines += [f"{n} = {n}.flatten()" for n in ("y", "labels", "m", "w") if _uses(text, n)]
    return lines + ends


def _layer_lines(name: str, code: str) -> tuple[str, str]:
    """Return the lines of a module that make a layer and that call it."""
    made, arrow, call = (part.strip() for part in code.partition("=>"))
    itself = f"self.{name}"
    call = (call if arrow else "$(h)").replace("$", itself)
    return (f"{itself} = {made}" if made else ""), call


def _source(program: Program) -> str:
    loss_lines = _loss_lines(program)
    stem_made, stem = _layer_lines("stem", program.stem)
    made, calls = [stem_made], [f"h = {stem if '=>' in program.stem else 'self.stem(x)'}"]
    for number, layer in enumerate(program.layers):
        init, call = _layer_lines(f"layer{number}", layer)
        made.append(init)
        calls.append(f"h = {call}")
    init, head = _layer_lines("head", program.head)
    made.append(init)
    if program.form == "z, u = model(x)":
        made.append("self.second = nn.Linear(H, C)")
        head = f"{head}, self.second(h)"
    calls.append(f"return {head}")
    text = "\n".join([*loss_lines, *made, *calls])
    modules = re.findall(r"self\.(\w+) = (?!nn\.Parameter)", "\n".join(made))
    stages = str([modules[:1], modules[1:]])
    names = ["x", *(name for name in _DATA if _uses("\n".join(loss_lines), name))]
    rows = "B" if program.kind == "vector" else "B, T"
    given = next(flag for flag in blocks.STEMS[program.stem].split() if flag in _GIVEN)
    made_of = {"SHAPE": f"({rows},)" if rows == "B" else f"({rows})", "ROWS": rows}
    data = {
        name: re.sub("SHAPE|ROWS", lambda found: made_of[found[0]], code)
        for name, code in {"x": _GIVEN[given], **_DATA}.items()
    }
    form = {
        "dict": ({name: f'"{name}": {name}' for name in names}, "{{{}}}", 'batch["{}"]'),
        "nested": ({name: f'"{name}": ({name},)' for name in names}, "{{{}}}", 'batch["{}"][0]'),
        "tuple": ({name: name for name in names}, "({})" if names[1:] else "({},)", "batch[{}]"),
    }[program.batch]
    unpack = [
        f"{name} = {form[2].format(n if program.batch == 'tuple' else name)}"
        for n, name in enumerate(names)
    ]
    sizes, layout = ", ".join(map(str, program.sizes)), program.layout.replace("STAGES", stages)
    parts = [
        "import math\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn",
        "torch.set_default_dtype(torch.float64)\n"
        f"B, T, D, H, C = {sizes}  # samples, places, inputs, features, classes"
        + ("\nCW = torch.linspace(0.5, 1.5, C)" if _uses(text, "CW") else ""),
        *_helpers(text),
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + _indented(made, 8)
        + "\n\n    def forward(self, x):\n"
        + _indented(calls, 8),
        f"def make_model():\n    torch.manual_seed({program.seed})\n    return Model()",
        "def make_optimizer(model):\n    return " + program.optimizer.format(program.groups),
        f"def make_batch(step):\n    g = torch.Generator().manual_seed({program.seed} + step)\n"
        + ("    def hidden(*shape):\n        found = torch.rand(shape, generator=g) < 0.4\n"
           "        found[0] = False\n        return found\n" if {"m", "labels"} & {*names} else "")
        + _indented([f"{name} = {data[name]}" for name in names], 4)
        + "\n    return " + form[1].format(", ".join(form[0].values())),
        "def loss(model, batch):\n" + _indented(unpack + loss_lines, 4),
        f"SETTINGS = dict({layout}, micro_batches={program.micro_batches}, "
        f"update={{'clip_norm': {program.clip}}})",
        'if __name__ == "__main__":\n    from random_programs.trial import compare\n\n'
        "    print(compare(globals()))",
    ]  # fmt: skip
    return "\n\n\n".join(parts) + "\n"


def _indented(lines: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines if line)


def _helpers(text: str) -> list[str]:
    """Return the source of the functions and classes of `helpers` that a text needs."""
    found: list[str] = []
    for name, value in vars(helpers).items():
        own = getattr(value, "__module__", "") == helpers.__name__
        if own and _uses(text, name):
            found.append(inspect.getsource(value).strip())
    more = "\n".join(found)
    used = [n for n, v in vars(helpers).items() if getattr(v, "__module__", "") == helpers.__name__]
    return _helpers(f"{text}\n{more}") if any(
        _uses(more, name) and not _uses(text, name) for name in used
    ) else found  # fmt: skip
