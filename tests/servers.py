"""Servers of MLflow that a test or a round of the fault campaign speaks to: a real one, one that fails or
falls silent, one that never answers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from conftest import free_port, wait_for_server


@contextmanager
def mlflow_server(folder: Path, python: str = sys.executable) -> Iterator[str]:
    """The address of a real `mlflow server` on loopback, which keeps what it has in this folder. MLflow's
    executor of jobs, whose five processes nothing here asks for, is off."""
    port = free_port()
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    command = [
        python,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        *store,
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for_server(process, port, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class Between(BaseHTTPRequestHandler):
    """Between relinear and a server: hands requests on, or answers with the errors that are left, or not at
    all."""

    server_address, url, failures, silent, asked = "", "", 0, False, 0

    def do_POST(self) -> None:
        of, body = type(self), self.rfile.read(int(self.headers.get("Content-Length") or 0))
        of.asked += 1
        if of.silent:
            return time.sleep(30)
        if of.failures:
            of.failures -= 1
            return self.answer(503, b"{}")
        request = urllib.request.Request(
            of.server_address + self.path, body or None, dict(self.headers), method=self.command
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                self.answer(reply.status, reply.read())
        except urllib.error.HTTPError as error:
            self.answer(error.code, error.read())

    do_GET = do_PATCH = do_PUT = do_POST

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@contextmanager
def standing_before(address: str) -> Iterator[type[Between]]:
    """The handler of a server that stands before the one at this address; its `url`, with a password, is
    where."""
    handler = type("Handler", (Between,), {"server_address": address})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        http.daemon_threads, http.block_on_close = True, False
        handler.url = f"http://name:secret@127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield handler
        http.shutdown()


@contextmanager
def slow_server() -> Iterator[str]:
    """The address, with a password, of a server that answers every request a byte a second."""

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with suppress(OSError):
                for byte in (
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n\r\n"
                    + b" " * 9000
                ):
                    self.wfile.write(bytes([byte]))
                    time.sleep(1)

        do_GET = do_PATCH = do_PUT = do_POST

        def log_message(self, *_) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as http:
        http.daemon_threads, http.block_on_close = True, False
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://user:secret@127.0.0.1:{http.server_port}"
        http.shutdown()


@contextmanager
def silent_server() -> Iterator[str]:
    """The address, with a password, of a server that takes connections and never answers."""
    server, kept = socket.create_server(("127.0.0.1", 0)), []

    def serve() -> None:
        with suppress(OSError):
            while True:
                kept.append(server.accept())

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://user:secret@127.0.0.1:{server.getsockname()[1]}"
    server.close()
