"""The program of `test_interrupts`: one rank of two, in whose loop Ctrl-C is pressed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from plain_training import batch_of, loss_of, make_model, make_optimizer

from sbp_launch import parallelize

NUM_STEPS = 6

#: Behind so many steps, who hears Ctrl-C: one process; or all of them, as of a terminal.
PRESSED = {2: [1], 4: [0, 1]}


def main() -> None:
    """Train as if nothing was, and print behind which steps an interrupt was raised."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = make_model()
    interrupted: list[object] = []
    pressed = dict(PRESSED)
    with parallelize(model, loss_of, batch_of(0), make_optimizer(model)) as step:
        while step.steps_done < NUM_STEPS:
            if step.world.rank in pressed.pop(step.steps_done, []):
                signal.raise_signal(signal.SIGINT)
            try:
                step(batch_of(step.steps_done))
            except KeyboardInterrupt:
                interrupted.append(step.steps_done)
        if step.world.rank == 0:
            signal.raise_signal(signal.SIGINT)
        try:
            step.evaluate(batch_of(0))
        except KeyboardInterrupt:
            interrupted.append("evaluation")
        states = step.model_state_dict()
    total = sum(float(value.double().sum()) for value in states.values())
    print(json.dumps({"interrupted": interrupted, "total": total}), flush=True)


if __name__ == "__main__":
    main()
