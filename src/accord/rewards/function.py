"""A reward that is a Python function: `{type: function, path: "module:function"}`.

    def score(prompt: str, response: str, reference: str | None) -> float: ...

It is called once a sample with those of these arguments that it names (or with all, if it takes **kwargs):
prompt (text of the last user turn), response (text), reference (the data's right answer, or None), meta (dict of the row's other
columns), messages (the whole conversation as [{"role", "content"}]), truncated (bool).
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import numbers
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from accord.errors import AccordError, ConfigError
from accord.rewards.base import Sample

log = logging.getLogger(__name__)

ARGUMENTS = ("prompt", "response", "reference", "meta", "messages", "truncated")


def load_function(path: str, key: str = "ppo.rewards") -> Callable[..., Any]:
    """The function that `module:function` names; the current folder is searched as well.

    Raises ConfigError, naming `key`, when the module or the function is missing, or is no function.
    """
    module_name, colon, function_name = path.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f'{key}: {path!r} is not of the form "module:function", such as "my_rewards:score".')
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            cure = f"Start in the folder that holds {missing.replace('.', '/')}.py, or install the package."
            raise ConfigError(f"{key}: there is no module {missing!r} for {path!r}. {cure}") from error
        raise ConfigError(
            f"{key}: importing {module_name!r} failed: it needs the module {missing!r}, which is not installed."
        ) from error
    except (Exception, SystemExit) as error:  # a script without a `__main__` guard may end the program
        raise ConfigError(f"{key}: importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    finally:
        if added:
            sys.path.remove(here)
    function: Any = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if function is None:
        names = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise ConfigError(f"{key}: {module_name!r} has no function {function_name!r}. It has: {', '.join(names[:12]) or 'none'}.")
    if not callable(function):
        raise ConfigError(f"{key}: {path!r} is a {type(function).__name__}, not a function.")
    return function


class FunctionReward:
    """Scores by calling a Python function once a sample.

    A call that raises, or gives no finite number, raises AccordError naming the sample; with a `fallback` it scores that instead,
    is counted in `failures`, and the first one is told. Raises ConfigError at construction when the function cannot be called with
    what a sample has.
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        weight: float = 1.0,
        name: str | None = None,
        key: str = "ppo.rewards",
        fallback: float | None = None,
    ) -> None:
        if isinstance(function, str):
            self.path = function
            function = load_function(function, key)
        else:
            self.path = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"{key}: {self.path} is asynchronous; expected an ordinary function.")
        self.function, self.weight, self.fallback = function, weight, fallback
        self.failures = 0
        self.name: str = name or str(getattr(function, "__name__", "function"))
        self.arguments = _arguments(function, self.path, key)

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [self._score_or_fall_back(sample) for sample in samples]

    def _score_or_fall_back(self, sample: Sample) -> float:
        try:
            return self._score_one(sample)
        except AccordError as error:
            if self.fallback is None:
                raise
            self.failures += 1
            if self.failures == 1:
                log.warning("%s It counts as the fallback, %s; further failures are only counted.", error, self.fallback)
            return self.fallback

    def _score_one(self, sample: Sample) -> float:
        values = {
            "prompt": _last_user_text(sample),
            "response": sample.response,
            "reference": sample.prompt.reference,
            "meta": dict(sample.prompt.meta),
            "messages": [message.as_dict() for message in sample.prompt.messages],
            "truncated": sample.truncated,
        }
        try:
            score = self.function(**{name: values[name] for name in self.arguments})
        except (Exception, SystemExit) as error:  # sys.exit() in it must not end the run as if it were done
            raise AccordError(
                f"reward {self.path} raised {type(error).__name__}: {error} on the sample {sample.name} "
                f"with the response {_short(sample.response)}."
            ) from error
        if hasattr(score, "item") and getattr(score, "ndim", None) == 0:
            score = score.item()  # a number of numpy's or torch's
        if not isinstance(score, numbers.Real):
            raise AccordError(
                f"reward {self.path} gave {_short(score)} ({type(score).__name__}) for the sample {sample.name}; expected a number."
            )
        try:
            number = float(score)
        except OverflowError:  # an integer or a fraction beyond the largest float
            number = math.inf
        if not math.isfinite(number):
            raise AccordError(f"reward {self.path} gave {number} for the sample {sample.name}; expected a finite number.")
        return number


def _arguments(function: Callable[..., Any], path: str, key: str) -> tuple[str, ...]:
    """Which of ARGUMENTS the function takes. Raises ConfigError when it requires anything else, or takes none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ("prompt", "response")  # written in C: it cannot be asked
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return ARGUMENTS
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [name for name in required if name not in ARGUMENTS or name not in {p.name for p in named}]
    if unknown:
        raise ConfigError(f"{key}: {path} wants {', '.join(unknown)}, but a sample has: {', '.join(ARGUMENTS)} (passed by name).")
    found = tuple(p.name for p in named if p.name in ARGUMENTS)
    if not found:
        raise ConfigError(f"{key}: {path} takes none of the arguments that a sample has: {', '.join(ARGUMENTS)}.")
    return found


def _last_user_text(sample: Sample) -> str:
    for message in reversed(sample.prompt.messages):
        if message.role == "user":
            return message.content
    return sample.prompt.messages[-1].content if sample.prompt.messages else ""


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
