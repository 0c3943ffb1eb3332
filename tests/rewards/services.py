"""An HTTP service on this machine that answers as a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]  # status, JSON (or text as it is), headers


class Service:
    """Remembers what it was asked. `answer(request, number)` says what comes back; None: nothing ever does."""

    def __init__(self, answer: Callable[[Any, int], Answer | None]) -> None:
        self.answer = answer
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.running = self.most = 0
        self.lock, self.over = threading.Lock(), threading.Event()
        self.url = ""


@contextmanager
def serving(answer: Callable[[Any, int], Answer | None]) -> Iterator[Service]:
    service = Service(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with service.lock:
                number = len(service.requests)
                service.requests.append(body)
                service.headers.append(dict(self.headers))
                service.paths.append(self.path)
                service.running += 1
                service.most = max(service.most, service.running)
            try:
                answered = service.answer(body, number)
                if answered is None:
                    service.over.wait(60)
                    self.close_connection = True
                    return
                status, content, *headers = answered
                payload = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)
            finally:
                with service.lock:
                    service.running -= 1

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield service
    finally:
        service.over.set()
        server.shutdown()
        server.server_close()


def slowly(seconds: float, answer: Answer) -> Answer:
    time.sleep(seconds)
    return answer
