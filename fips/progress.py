"""Progress on stderr: one bar per group, one line when a group is done."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


class Progress:
    """Shows what a long run is doing.

    Args:
        verbosity: -1 silent, 0 or more bars and notes.
    """

    def __init__(self, verbosity: int = 0) -> None:
        self.verbosity = verbosity
        self.total = 0
        self._done = 0
        self._started = time.monotonic()
        self._bar: tqdm[None] | None = None

    def note(self, text: str) -> None:
        """Prints a line unless silent."""
        if self.verbosity >= 0:
            tqdm.write(text, file=sys.stderr)

    def start_groups(self, total: int) -> None:
        """Starts the clock for the estimate of the time left."""
        self.total, self._done, self._started = total, 0, time.monotonic()

    def start_group(self, label: str, steps: int) -> None:
        """Opens the bar of a group."""
        hidden = self.verbosity < 0
        self._bar = tqdm(total=steps or None, desc=label, unit=" steps", file=sys.stderr, leave=False, disable=hidden)

    def step(self, steps: int, loss: float | None = None) -> None:
        """Advances the bar."""
        if self._bar is None:
            return
        if loss is not None:
            self._bar.set_postfix_str(f"error {loss:.4f}", refresh=False)
        self._bar.update(steps)

    def each(self, label: str, items: Iterable[T], total: int) -> Iterator[T]:
        """The items, with a bar of their number; whoever stops half-way closes it."""
        self.start_group(label, total)
        for item in items:
            yield item
            self.step(1)
        self.close()

    def end_group(self, label: str, before: float, after: float, seconds: float) -> None:
        """Closes the bar and prints the group's errors and the time left."""
        self.close()
        self._done += 1
        left = (time.monotonic() - self._started) / self._done * (self.total - self._done)
        more = f", about {_duration(left)} left" if self._done < self.total else ""
        self.note(f"{label}: error {before:.4f} -> {after:.4f} in {_duration(seconds)}{more}")

    def close(self) -> None:
        """Closes an open bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
