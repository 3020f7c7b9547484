"""deploy/proxy for real: TLS before a server, by nginx and by Caddy. Appends, long polls, event streams and WebSockets
come through as they are, request ids too, over HTTP/1.1 and HTTP/2. Skipped where the proxy or openssl is missing.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from trio_websocket import open_websocket_url

from topics import limits

from .client import unique
from .server import Server, eventually

pytestmark = pytest.mark.e2e
CONFIGS = Path(__file__).parents[2] / "deploy/proxy"


class Proxy(NamedTuple):
    kind: str
    port: int
    tls: ssl.SSLContext

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.port, context=self.tls, timeout=30)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[http.client.HTTPResponse, Any]:
        connection = self.connect()
        try:
            content = None if body is None else json.dumps(body)
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, content, {"Content-Type": "application/json", **named})
            answer = connection.getresponse()
            return answer, json.loads(answer.read())
        finally:
            connection.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run([*command, *named, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def _nginx(folder: Path, server: int, port: int, certificate: Path, key: Path) -> list[str]:
    text = (CONFIGS / "nginx.conf").read_text()
    for ours, here in (
        ("127.0.0.1:4000", f"127.0.0.1:{server}"),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/etc/ssl/topics/fullchain.pem", str(certificate)),
        ("/etc/ssl/topics/privkey.pem", str(key)),
        ("topics.example.com", "localhost"),
    ):
        assert ours in text
        text = text.replace(ours, here)
    places = "".join(
        f"{name} {folder}/{name};\n"
        for name in (
            "client_body_temp_path",
            "proxy_temp_path",
            "fastcgi_temp_path",
            "uwsgi_temp_path",
            "scgi_temp_path",
        )
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off;\nworker_processes 1;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{places}\n{text}\n}}\n"
    )
    nobody = ["-g", "user root;"] if os.getuid() == 0 else []
    return ["nginx", "-e", "stderr", "-c", str(config), *nobody]


def _caddy(folder: Path, server: int, port: int, certificate: Path, key: Path) -> list[str]:
    text = (CONFIGS / "Caddyfile").read_text()
    for ours, here in (
        ("127.0.0.1:4000", f"127.0.0.1:{server}"),
        ("topics.example.com {", f"https://localhost:{port} {{\n\ttls {certificate} {key}"),
    ):
        assert ours in text
        text = text.replace(ours, here)
    config = folder / "Caddyfile"
    config.write_text(f"{{\n\tadmin off\n\tauto_https off\n\tgrace_period 100ms\n}}\n{text}")
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(config)]


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def proxy(request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    for program in (request.param, "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    folder = tmp_path_factory.mktemp(request.param)
    certificate, key = _certificate(folder)
    port = _free_port()
    command = {"nginx": _nginx, "caddy": _caddy}[request.param](folder, server.port, port, certificate, key)
    log = folder / "log"
    with open(log, "wb") as out:
        running = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=os.environ | {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)},
            start_new_session=True,
        )
    try:
        found = Proxy(request.param, port, ssl.create_default_context(cafile=str(certificate)))

        def answers() -> bool:
            assert running.poll() is None, log.read_text()
            try:
                return found.ask("GET", "/v0/ready")[0].status == 200
            except OSError:
                return False

        eventually(answers, what=f"an answer through {request.param}")
        yield found
    finally:
        running.terminate()
        running.wait(30)


def test_appends_and_reads(proxy: Proxy) -> None:
    topic = unique()
    answer, said = proxy.ask("POST", f"/v0/topics/{topic}", {"records": [{"data": n} for n in range(3)]})
    assert answer.status == 201, said
    answer, said = proxy.ask("POST", f"/v0/topics/{topic}/diff", {})
    assert [record["data"] for record in said["records"]] == [0, 1, 2]


def test_request_ids(proxy: Proxy) -> None:
    answer, _ = proxy.ask("GET", "/v0/health", X_Request_Id="checkout-17")
    assert answer.headers["X-Request-Id"] == "checkout-17"
    first, second = (proxy.ask("GET", "/v0/health")[0].headers["X-Request-Id"] for _ in range(2))
    assert first != second
    assert len(first) >= 32  # the proxy's, which is in its log, too


def test_http2(proxy: Proxy) -> None:
    tls = ssl.create_default_context(cafile=None)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    tls.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", proxy.port)) as plain,
        tls.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        assert wrapped.selected_alpn_protocol() == "h2"
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    command = ["curl", "-sk", "--http2", "-w", "\n%{http_version}", f"https://localhost:{proxy.port}/v0/health"]
    body, _, version = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.rpartition("\n")
    assert version == "2"
    assert json.loads(body)["status"] == "ok"


def test_bodies_up_to_our_limit(proxy: Proxy) -> None:
    """What we would take is not refused on the way; what is larger is 413, whoever says so."""
    topic = unique()
    record = {"data": "x" * (limits.MAX_RECORD_BYTES - 100)}
    answer, said = proxy.ask("POST", f"/v0/topics/{topic}", {"records": [record] * 7})
    assert answer.status == 201, said
    connection = proxy.connect()
    connection.putrequest("POST", f"/v0/topics/{topic}")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(limits.MAX_BODY_BYTES + 1))
    connection.endheaders()
    if proxy.kind == "caddy":  # it finds out when it has read as much
        connection.close()
        return
    assert connection.getresponse().status == 413
    connection.close()


def test_a_long_poll_ends_when_something_comes(proxy: Proxy, server: Server) -> None:
    topic = unique()
    proxy.ask("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}]})
    connection = proxy.connect()
    connection.request(
        *("POST", f"/v0/topics/{topic}/diff", json.dumps({"from_seq": 1, "wait_ms": 20_000})),
        {"Content-Type": "application/json"},
    )
    with server.client() as api:
        api.append(topic, "late")
    begun = time.monotonic()
    said = json.loads(connection.getresponse().read())
    connection.close()
    assert [record["data"] for record in said["records"]] == ["late"]
    assert time.monotonic() - begun < 10


def test_events_come_one_by_one(proxy: Proxy) -> None:
    """Nothing waits in the proxy for more: each event is read before the next record is written."""
    topic = unique()
    proxy.ask("POST", f"/v0/topics/{topic}", {"records": [{"data": 0}]})
    _, made = proxy.ask("POST", "/v0/watch", {"topics": {topic: {"from_seq": 0}}})
    connection = proxy.connect()
    connection.request("GET", f"/v0/watch/{made['wid']}", headers={"Accept": "text/event-stream"})
    stream = connection.getresponse()
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    for number in range(4):
        if number:
            proxy.ask("POST", f"/v0/topics/{topic}", {"records": [{"data": number}]})
        begun = time.monotonic()
        while f'"data":{number}}}'.encode() not in stream.readline():
            assert time.monotonic() - begun < 20
        assert time.monotonic() - begun < 10
    connection.close()


def test_a_websocket(proxy: Proxy) -> None:
    topic = unique()

    async def talk() -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        address = f"wss://localhost:{proxy.port}/v0/ws"
        origin = [(b"Origin", f"https://localhost:{proxy.port}".encode())]  # a page that came through the proxy
        with trio.fail_after(30):
            async with open_websocket_url(address, ssl_context=proxy.tls, extra_headers=origin) as websocket:
                await websocket.send_message(json.dumps({"op": "publish", "topic": topic, "records": [{"data": 7}]}))
                said.append(json.loads(await websocket.get_message()))
                await websocket.send_message(json.dumps({"op": "ping"}))
                said.append(json.loads(await websocket.get_message()))
        return said

    published, pong = trio.run(talk)
    assert (published["op"], published["last_seq"]) == ("ack", 1)
    assert pong["op"] == "pong"
