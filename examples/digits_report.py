# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What digits.py shows: progress while it trains, then a table and a picture."""

import math
import sys
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

# Okabe and Ito's palette, which colour-blind readers tell apart; line styles tell runs apart in black and white.
COLOURS = ["#000000", "#E69F00", "#0072B2", "#009E73"]
STYLES = ["-", "--", "-.", ":"]
WIDTHS = [5.0, 3.2, 1.6, 1.2]  # curves of runs that agree coincide: the lower ones must remain visible at the sides


@dataclass
class History:
    """What a run measured: per step losses and loss scale, per epoch the test half's loss and accuracy."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    test_losses: list[float] = field(default_factory=list)
    test_accuracies: list[float] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0

    @classmethod
    def restore(cls, values: dict[str, Any]) -> "History":
        """From a checkpoint, which may be damaged."""
        history = cls(**values)
        for name in ("losses", "scales", "test_losses", "test_accuracies"):
            numbers = getattr(history, name)
            if not isinstance(numbers, list) or not all(isinstance(number, float) for number in numbers):
                raise TypeError(f"'{name}' is not a list of numbers")
        if len(history.test_losses) != len(history.test_accuracies) or not history.losses:
            raise ValueError("the measurements are not of whole epochs")
        return history

    @property
    def epochs_per_second(self) -> float:
        """Training alone, without the tests in between."""
        return len(self.test_losses) / self.seconds if self.seconds else math.nan


class Progress:
    """A bar on a terminal; elsewhere, in a log, one line per epoch."""

    def __init__(self, label: str, *, epochs: int, steps_per_epoch: int, done: int) -> None:
        self.label, self.epochs = label, epochs
        from tqdm import tqdm

        self.out: TextIO = sys.stdout
        if done:
            print(f"{label}: continuing after epoch {done} of {epochs}", file=self.out, flush=True)
        self.bar = tqdm(
            total=epochs * steps_per_epoch,
            initial=done * steps_per_epoch,
            desc=label,
            file=self.out,
            disable=not self.out.isatty(),
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]",
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.close()

    def step(self, history: History) -> None:
        """Moves on by one step and shows its loss, the scale and the number of skips."""
        self.bar.set_postfix_str(self.summary(history), refresh=False)
        self.bar.update()

    def epoch(self, history: History) -> None:
        """Says what an epoch gave, where no bar shows it."""
        if self.bar.disable:
            line = f"{self.label}: epoch {len(history.test_losses)}/{self.epochs}, {self.summary(history)}"
            print(f"{line}, test accuracy {history.test_accuracies[-1]:.2%}", file=self.out, flush=True)

    @staticmethod
    def summary(history: History) -> str:
        scale = f", scale {history.scales[-1]:.0f}, skips {history.skipped}" if history.scales else ""
        return f"loss {history.losses[-1]:.4f}{scale}"


def print_table(histories: dict[str, History], *, timed: bool) -> None:
    """One line per run; ``timed``: with epochs per second, and the speed over that of the first run."""
    rows: list[tuple[str, ...]] = [("run", "test accuracy", "skipped steps", "final loss scale")]
    rows[0] += ("epochs/s", "speed") if timed else ()
    first = next(iter(histories.values())).epochs_per_second
    for label, history in histories.items():
        scaled = bool(history.scales)
        row = (
            label,
            f"{history.test_accuracies[-1]:.2%}",
            str(history.skipped) if scaled else "-",
            f"{history.scales[-1]:.0f}" if scaled else "-",
        )
        speed = history.epochs_per_second
        rows.append((*row, f"{speed:.2f}", f"{speed / first:.2f}x") if timed else row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells))
        if number == 0:
            print("  ".join("-" * width for width in widths))
    print()


def save_plot(histories: dict[str, History], path: Path) -> None:
    """Training loss, test loss and loss scale of all runs, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # before pyplot: there may be no screen

    from matplotlib import pyplot

    figure, (train, test, scale) = pyplot.subplots(3, 1, figsize=(8, 9), layout="constrained")
    looks = [
        {"color": colour, "linestyle": style, "linewidth": width}
        for colour, style, width in zip(COLOURS, STYLES, WIDTHS, strict=True)
    ]
    for (label, history), look in zip(histories.items(), looks, strict=False):
        train.plot(smooth(history.losses), label=label, **look)
        test.plot(range(1, len(history.test_losses) + 1), history.test_losses, marker="o", label=label, **look)
        if history.scales:
            scale.plot(history.scales, label=label, **look)
    train.set(title="Training loss (running mean)", xlabel="step", ylabel="cross entropy", yscale="log")
    test.set(title="Test loss", xlabel="epoch", ylabel="cross entropy", yscale="log")
    scale.set(title="Loss scale", xlabel="step", ylabel="loss scale")
    scale.set_yscale("log", base=2)
    for axes in (train, test, scale):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def smooth(values: list[float], *, keep: float = 0.9) -> list[float]:
    """A running mean, so that three curves stay readable in one plot."""
    return list(accumulate(values, lambda mean, value: keep * mean + (1 - keep) * value))
