"""What can go wrong, and the exit code each kind ends the program with."""


class AccordError(Exception):
    """The run failed for a reason that a person can read (exit code 1)."""

    exit_code = 1


class UserError(AccordError):
    """The configuration or the data is wrong; nothing was started (exit code 2).

    The message names what, where (key, file:line, sample), what was expected and what to do.
    """

    exit_code = 2


class ConfigError(UserError):
    """A key, a value or a combination of values in the configuration is refused."""


class DataError(UserError):
    """A source, a row or what remains of the data cannot be used."""


class NonFiniteError(AccordError):
    """The loss or the gradient is not finite (ALGORITHMS §0.7); no weight was changed by that step."""


class OutOfMemoryError(AccordError):
    """What was asked for does not fit the device; the message says what would."""


class StoppedByAlarm(AccordError):
    """`ppo.on_alarm: stop`: the step was finished and a checkpoint written."""


class PeerLost(AccordError):
    """Another process of the run has stopped: the consequence, not the reason. A launcher tells it by its exit code, and shows that one's error."""

    exit_code = 70


class Interrupted(AccordError):
    """SIGINT or SIGTERM: the step was finished and a checkpoint written (exit code 130)."""

    exit_code = 130
