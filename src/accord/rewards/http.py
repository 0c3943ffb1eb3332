"""Requests to services that score: JSON there, JSON back, again after what may pass. Secrets stay out of every message."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from accord.errors import ConfigError

FIRST_WAIT_SECONDS = 0.5  # before the first further attempt; doubled before each next one
LONGEST_WAIT_SECONDS = 30.0
PASSING = (408, 429)  # beside 5xx, what another attempt may cure


class RequestFailed(Exception):
    """No usable answer came; the text says what came instead, to follow the address."""


def secret(variable: str, key: str) -> str:
    """The value of an environment variable. Raises ConfigError where it is not set."""
    value = os.environ.get(variable)
    if not value or not value.strip():
        raise ConfigError(f"{key}: the environment variable {variable} is not set.")
    if not value.isascii() or any(ord(c) < 32 for c in value):
        raise ConfigError(f"{key}: the environment variable {variable} holds a character that no HTTP header can carry.")
    return value


class Endpoint:
    """One address that is sent JSON with POST."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float, retries: int) -> None:
        """`headers` are taken for secrets. `timeout`: seconds of one attempt in all. `retries`: further attempts."""
        self.url, self.timeout, self.retries = url, timeout, retries
        self._headers = {"Content-Type": "application/json", **headers}
        self._secrets = sorted({part for value in headers.values() for part in (value, value.split()[-1])}, key=len, reverse=True)
        self._client: httpx2.AsyncClient | None = None

    @property
    def name(self) -> str:
        """The address for messages, without what follows a question mark."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"

    async def post(self, body: Any) -> Any:
        """The answer's JSON. After no answer, 408, 429 and 5xx it is asked again, at growing distances.

        Raises RequestFailed.
        """
        content = json.dumps(body, allow_nan=False).encode()
        for attempt in range(self.retries + 1):
            try:
                return await self._attempt(content)
            except _MayPass as error:
                if attempt == self.retries:
                    tries = f" (attempt {attempt + 1} of {self.retries + 1})" if self.retries else ""
                    raise RequestFailed(f"{self.clean(str(error))}{tries}") from None
                wait = min(FIRST_WAIT_SECONDS * 2**attempt, LONGEST_WAIT_SECONDS)
                await asyncio.sleep(max(wait, min(error.retry_after, LONGEST_WAIT_SECONDS)))
        raise AssertionError

    async def _attempt(self, content: bytes) -> Any:
        if self._client is None:
            self._client = httpx2.AsyncClient(timeout=None)  # the whole attempt is timed, not its parts
        try:
            async with asyncio.timeout(self.timeout):
                response = await self._client.post(self.url, content=content, headers=self._headers)
        except TimeoutError:
            raise _MayPass(f"did not answer within {self.timeout:g} seconds") from None
        except httpx2.TransportError as error:
            raise _MayPass(f"could not be reached: {type(error).__name__}: {error}") from None
        except httpx2.HTTPError as error:
            raise RequestFailed(self.clean(f"failed: {type(error).__name__}: {error}")) from None
        status = response.status_code
        if status != 200:
            said = f"answered {status} {response.reason_phrase}: {_excerpt(response.text)}"
            if status in PASSING or status >= 500:
                raise _MayPass(said, _seconds(response.headers.get("retry-after")))
            raise RequestFailed(self.clean(said))
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError):
            raise RequestFailed(self.clean(f"answered no JSON: {_excerpt(response.text)}")) from None

    def clean(self, text: str) -> str:
        """The text without the secrets, which a service may repeat."""
        for value in self._secrets:
            text = text.replace(value, "***")
        return text


class _MayPass(Exception):
    """A failure that another attempt may not have."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def _seconds(header: str | None) -> float:
    try:
        seconds = float(header or 0)
    except ValueError:  # a date
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


def _excerpt(text: str, limit: int = 200) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def jsonable(value: Any) -> Any:
    """The value as JSON can carry it: a number that is not finite becomes null, what JSON has no word for (a date) its text."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
