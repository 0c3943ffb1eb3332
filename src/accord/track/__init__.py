"""What a run leaves to be read: its folder, metrics, samples, console, TensorBoard and report."""

from accord.track.run import RunFolder, open_run
from accord.track.tracker import Tracker

__all__ = ["RunFolder", "Tracker", "open_run"]
