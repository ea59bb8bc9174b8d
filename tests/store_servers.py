"""Servers of shards on the loopback interface: moto's S3, and a web server with ranges that counts and fails."""

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "loopback", "AWS_SECRET_ACCESS_KEY": "no-secret", "AWS_DEFAULT_REGION": "us-east-1"}


class WebServer:
    """Serves the files of a folder by HTTP, with ranges and ETags, and lists nothing.

    Attributes:
        requests, sent: the number of requests and the bytes that were sent, by path.
        fault: is called with a path before each answer, and returns a status other than 200, "cut" to close the
            connection in the middle, a number of seconds to wait, or None.
        latency: seconds before each answer.
        ranges, versions: whether the server knows ranges and ETags.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder, self.port = folder, port
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.fault: Any = lambda path: None
        self.latency, self.ranges, self.versions = 0.0, True, True
        self.connections: list[socket.socket] = []
        self._server: Any = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer.connections.append(self.connection)

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                outer.answer(self, False)

            def do_GET(self) -> None:
                outer.answer(self, True)

        class Server(ThreadingHTTPServer):
            daemon_threads, block_on_close = True, False

            def handle_error(self, *arguments: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """End the server, and cut its connections."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def answer(self, handler: Any, with_content: bool) -> None:
        path = handler.path.lstrip("/")
        time.sleep(self.latency)
        if with_content:
            self.requests[path] += 1
        fault = self.fault(path) if with_content else None
        if isinstance(fault, float):
            time.sleep(fault)
            fault = None
        file = self.folder / path
        status = fault if isinstance(fault, int) else 200 if file.is_file() else 404
        content = file.read_bytes() if status == 200 else b""
        whole = len(content)
        etag = hashlib.md5(content).hexdigest()
        start = 0
        if self.ranges and (wanted := handler.headers.get("Range")):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(whole, int(last) + 1 if last else whole)
            status = (206 if start < whole else 416) if status == 200 else status
            content = content[start:stop]
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        if self.versions:
            handler.send_header("ETag", f'"{etag}"')
        if status == 206:
            handler.send_header("Content-Range", f"bytes {start}-{start + len(content) - 1}/{whole}")
        handler.end_headers()
        if not with_content:
            return
        if fault == "cut":
            content = content[: len(content) // 2]
            handler.close_connection = True
        self.sent[path] += len(content)
        handler.wfile.write(content)


@contextlib.contextmanager
def s3_server(bucket: str = "images") -> Iterator[dict[str, str]]:
    """Start moto's S3 with an empty bucket. Yield the environment of its clients."""
    moto = pytest.importorskip("moto.server", reason="pip install -e .[dev] brings moto")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    try:
        client(environment).create_bucket(Bucket=bucket)
        yield environment
    finally:
        server.stop()


def client(environment: dict[str, str]) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_DEFAULT_REGION"],
    )


def upload(folder: Path, environment: dict[str, str], prefix: str, bucket: str = "images") -> str:
    """Write the files of a folder to a bucket. Return their URL."""
    s3 = client(environment)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            s3.put_object(Bucket=bucket, Key=f"{prefix}/{path.relative_to(folder).as_posix()}", Body=path.read_bytes())
    return f"s3://{bucket}/{prefix}"


def web_server(folder: Path) -> WebServer:
    return WebServer(folder)


def files_in(folder: Path) -> list[str]:
    return sorted(os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file())
