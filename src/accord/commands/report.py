"""`accord report RUN`: write RUN/report.html and say where it is."""

from pathlib import Path


def report(run: str) -> None:
    """Write the report of a stage's or a pipeline's run. Raises UserError if `run` is no run's folder."""
    from accord.track.report import write_report

    print(write_report(Path(run)))
