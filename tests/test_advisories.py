"""Advisories of pinned packages: found, accepted, or said not to have been checked. The database here is one
of this machine."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import advisories
import pytest
import releases


@contextmanager
def database() -> Iterator[str]:
    """An OSV database that knows of one advisory, of jinja2 3.1.0."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = {"id": "GHSA-0000", "summary": "x", "published": "2026-01-01T00:00:00Z", "affected": []}
            body = json.dumps(
                {"vulns": [known]}
                if (asked["package"]["name"], asked["version"]) == ("jinja2", "3.1.0")
                else {}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
    finally:
        server.shutdown()


@pytest.fixture(scope="module", autouse=True)
def tool():
    releases.or_skip(releases.installed, advisories.TOOL, True)


def test_a_pin_with_an_advisory_fails_unless_it_is_accepted(tmp_path, monkeypatch, capsys):
    lock = tmp_path / "requirements.lock"
    lock.write_text("jinja2==3.1.0\nnumpy==2.4.0 ; sys_platform == 'linux'\n")
    with database() as url:
        assert advisories.advisories(lock, url) == {"jinja2 3.1.0": ["GHSA-0000"]}
        assert (
            advisories.main(lock, url) == 1
            and "jinja2 3.1.0: GHSA-0000; possible: a newer version" in capsys.readouterr().out
        )
        monkeypatch.setitem(advisories.ACCEPTED, "GHSA-0000", "for this test")
        assert advisories.main(lock, url) == 0 and "0 that are not accepted" in capsys.readouterr().out


def test_the_whole_lock_is_read():
    with database() as url:
        assert advisories.advisories(database=url) == {}


def test_a_database_that_is_not_reached_is_said_loudly(tmp_path, capsys):
    lock = tmp_path / "requirements.lock"
    lock.write_text("jinja2==3.1.0\n")
    assert advisories.main(lock, "http://127.0.0.1:1/v1/query") == 0
    assert capsys.readouterr().out.startswith(
        "advisories: NOT CHECKED: pip-audit has no answer of http://127.0.0.1:1"
    )


def test_ci_checks_them():
    assert ".venv/bin/python tests/advisories.py" in (releases.ROOT / ".ci/run").read_text()
