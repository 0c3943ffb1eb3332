"""A reward that is a Python function: `{type: function, path: "module:function"}`.

    def score(prompt: str, response: str, reference: str | None) -> float: ...
    async def score(prompt: str, response: str) -> float: ...                        # several samples are awaited at once
    def score(response: str, tokens: list[str]) -> list[float]: ...                   # per_token: true

It is called once a sample with those of these arguments that it names (or with all, if it takes **kwargs):
prompt (text of the last user turn), response (text), reference (the data's right answer, or None), meta (dict of the row's other
columns), messages (the whole conversation as [{"role", "content"}]), truncated (bool), tokens (the text of each response token).
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from accord.errors import AccordError, ConfigError
from accord.rewards.base import Fallback, MayFail, Sample, as_number, short
from accord.rewards.waiting import OPEN, Background, Stalled, within

ARGUMENTS = ("prompt", "response", "reference", "meta", "messages", "truncated", "tokens")
CONCURRENCY = 16  # of an async function, where nothing else is asked for
T = TypeVar("T")
Decode = Callable[[Sequence[int]], str]  # all of a response's tokens, special ones too


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


class FunctionReward(MayFail):
    """Scores by calling a Python function once a sample; calls of an async function, `concurrency` at once.

    A call that raises, takes longer than `timeout` seconds, or gives no finite number (with `per_token`: a list of one for each
    response token) raises AccordError naming the sample; with a `fallback` it scores that instead, is counted in `failures`, and the
    first one is told. A fallback for a per-token list stands at the response's last token, with zeros before it.
    An ordinary function that takes too long is left running in its thread: Python cannot end it.

    `decode` is needed by functions that name `tokens`. Raises ConfigError at construction when the function cannot be called with
    what a sample has.
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        weight: float = 1.0,
        name: str | None = None,
        key: str = "ppo.rewards",
        fallback: float | None = None,
        *,
        per_token: bool = False,
        timeout: float | None = None,
        concurrency: int | None = None,
        decode: Decode | None = None,
    ) -> None:
        if isinstance(function, str):
            self.path = function
            function = load_function(function, key)
        else:
            self.path = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"
        self.function, self.weight, self.key = function, weight, key
        self.per_token, self.timeout, self.decode = per_token, timeout, decode
        self.name: str = name or str(getattr(function, "__name__", "function"))
        self.arguments = _arguments(function, self.path, key, has_tokens=decode is not None)
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        if concurrency is not None and not self._async:
            raise ConfigError(f"{key}: {self.path} is no async function, so its calls come one by one. Leave concurrency out.")
        self.concurrency = concurrency or CONCURRENCY
        self._background = Background()
        self._fallback = Fallback(fallback)

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One number a sample; of a per-token function the sum of each list."""
        if self.per_token:
            return [math.fsum(scores) for scores in self.token_scores(samples)]
        return self._collect(samples, self._number, lambda sample, fallback: fallback)

    def token_scores(self, samples: Sequence[Sample]) -> list[list[float]]:
        """For each sample one number for each of its response tokens."""
        return self._collect(
            samples,
            self._numbers,
            lambda sample, fallback: [0.0] * (len(sample.response_ids) - 1) + [fallback] * (len(sample.response_ids) > 0),
        )

    def _collect(
        self, samples: Sequence[Sample], read: Callable[[Sample, Any], T], instead: Callable[[Sample, float], T]
    ) -> list[T]:
        outcomes = self._ask(samples)
        results: dict[int, T] = {}
        # Those that raised come first: where there is no fallback, the calls after them were not made.
        for i in sorted(range(len(samples)), key=lambda i: not isinstance(outcomes[i], BaseException)):
            try:
                results[i] = read(samples[i], outcomes[i])
            except AccordError as error:
                results[i] = instead(samples[i], self._fallback.use(error))
        return [results[i] for i in range(len(samples))]

    def _ask(self, samples: Sequence[Sample]) -> list[Any]:
        """What the function gave for each sample, or the exception that it ended with. Without a fallback the first one ends it."""
        stop_at_error = self.fallback is None
        if self._async:
            calls = [lambda sample=sample: self.function(**self._values(sample)) for sample in samples]
            return self._background.run(calls, self.concurrency, self.timeout, stop_at_error)
        outcomes: list[Any] = [OPEN] * len(samples)
        for i, sample in enumerate(samples):
            values = self._values(sample)
            try:
                outcomes[i] = within(self.timeout, lambda values=values: self.function(**values))  # type: ignore[misc]
            except (Exception, SystemExit) as error:  # sys.exit() in it must not end the run as if it were done
                outcomes[i] = error
                if stop_at_error:
                    break
        return outcomes

    def _values(self, sample: Sample) -> dict[str, Any]:
        make: dict[str, Callable[[], Any]] = {
            "prompt": lambda: sample.question,
            "response": lambda: sample.response,
            "reference": lambda: sample.prompt.reference,
            "meta": lambda: dict(sample.prompt.meta),
            "messages": lambda: [message.as_dict() for message in sample.prompt.messages],
            "truncated": lambda: sample.truncated,
            "tokens": lambda: token_texts(sample.response_ids, self.decode),  # type: ignore[arg-type]
        }
        return {name: make[name]() for name in self.arguments}

    def _number(self, sample: Sample, outcome: Any) -> float:
        self._check(sample, outcome)
        try:
            return as_number(outcome)
        except ValueError as error:
            if isinstance(outcome, list | tuple) and outcome:
                error = ValueError(f"{error} (a list of one number for each token needs per_token: true)")
            raise AccordError(f"{self.key}: {self.path} gave {error} for the sample {sample.name}.") from None

    def _numbers(self, sample: Sample, outcome: Any) -> list[float]:
        self._check(sample, outcome)
        if hasattr(outcome, "tolist"):  # NumPy's and torch's arrays
            outcome = outcome.tolist()
        count = len(sample.response_ids)
        if not isinstance(outcome, list | tuple):
            raise AccordError(
                f"{self.key}: {self.path} gave a {type(outcome).__name__} ({short(outcome)}) for the sample {sample.name}; with "
                f"per_token: true a list of {count} numbers is expected, one for each response token."
            )
        if len(outcome) != count:
            raise AccordError(
                f"{self.key}: {self.path} gave a list of {len(outcome)} for the {count} response tokens of the sample {sample.name}."
            )
        try:
            return [as_number(value) for value in outcome]
        except ValueError as error:
            raise AccordError(f"{self.key}: {self.path} gave {error} in its list for the sample {sample.name}.") from None

    def _check(self, sample: Sample, outcome: Any) -> None:
        """Raises AccordError for a call that did not end well."""
        where = f"on the sample {sample.name} with the response {short(sample.response)}."
        if isinstance(outcome, Stalled):
            raise AccordError(f"{self.key}: {self.path} took longer than its timeout of {self.timeout:g} seconds {where}")
        if isinstance(outcome, BaseException):
            raise AccordError(f"{self.key}: {self.path} raised {type(outcome).__name__}: {outcome} {where}") from outcome
        if inspect.iscoroutine(outcome):
            outcome.close()
            raise AccordError(f"{self.key}: {self.path} gave a coroutine {where} Write it as `async def`.")


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds; together they are `decode(ids)`. A character of several tokens is added by its last one."""
    texts: list[str] = []
    start = told = 0  # a token may look different at the beginning of a text, so each is decoded behind the one before it
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith("\ufffd") and end < len(ids):  # the bytes of an unfinished character
            texts.append("")
            continue
        texts.append(text[len(decode(ids[start:told])) :])
        start, told = told, end
    return texts


def _arguments(function: Callable[..., Any], path: str, key: str, has_tokens: bool) -> tuple[str, ...]:
    """Which of ARGUMENTS the function takes. Raises ConfigError when it requires anything else, or takes none."""
    offered = ARGUMENTS if has_tokens else ARGUMENTS[:-1]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ("prompt", "response")  # written in C: it cannot be asked
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [name for name in required if name not in offered or name not in {p.name for p in named}]
    if unknown:
        raise ConfigError(f"{key}: {path} wants {', '.join(unknown)}, but a sample has: {', '.join(offered)} (passed by name).")
    found = tuple(p.name for p in named if p.name in offered)
    if not found:
        raise ConfigError(f"{key}: {path} takes none of the arguments that a sample has: {', '.join(offered)}.")
    return found
