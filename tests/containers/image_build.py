"""The image's builds: as the documents have it, by compose, and from an index with its own certificate authority."""

from __future__ import annotations

import functools
import json
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.containers.debian import ROOT
from tests.containers.engine import Engine

IMAGE = re.findall(r"^  image: (diptych:\S+)$", (ROOT / "docker-compose.yml").read_text(), re.MULTILINE)[0]
RECIPE = ("-f", "deploy/Dockerfile")


def build_documented(engine: Engine) -> str:
    """The command of docs/deploying.md; its seconds and the image's size."""
    began_s = time.monotonic()
    wheels = f"wheels={engine.downloads.wheels}"
    offline = ["--build-context", wheels, "--build-arg", "PIP_NO_INDEX=1", "--network", "none"]
    engine.run("docker", "build", *RECIPE, "-t", IMAGE, *offline, ".")
    took_s = time.monotonic() - began_s
    sizes = [
        int(engine.run("docker", "image", "inspect", "-f", "{{.Size}}", image))
        for image in (IMAGE, engine.base)
    ]
    return f"{took_s:.0f} s, {sizes[0] / 1e9:.2f} GB (base {sizes[1] / 1e6:.0f} MB)"


def forget_image(engine: Engine) -> None:
    """Remove the image; what its build has made stays in the cache."""
    engine.run("docker", "rmi", IMAGE)


@contextmanager
def offline_compose(engine: Engine) -> Iterator[list[str]]:
    """The files of compose for a build without a network: the checkout's, and one with the folder of wheels."""
    build = {
        "additional_contexts": {"wheels": str(engine.downloads.wheels)},
        "args": {"PIP_NO_INDEX": "1"},
        "network": "none",
    }
    file = engine.folder / "offline.json"
    file.write_text(json.dumps({"services": {"keys": {"build": build}}}))
    yield ["-f", "docker-compose.yml", "-f", str(file)]


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running_index(folder: Path, wheels: Path) -> Iterator[tuple[str, Path]]:
    """An index of the wheels over HTTPS on this machine: its URL, and its certificate authority."""
    for wheel in wheels.iterdir():
        name = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
        (folder / "simple" / name).mkdir(parents=True, exist_ok=True)
        (folder / "simple" / name / wheel.name).symlink_to(wheel)
    key, authority = folder / "key.pem", folder / "ca.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(authority),
        "-days",
        "2",
    ]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder)))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}/simple", authority
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def build_from_index(engine: Engine) -> str:
    """The recipe's first stage, with nothing but that index; and what the image has of the authority: nothing."""
    folder = engine.folder / "index"
    folder.mkdir()
    began_s = time.monotonic()
    with running_index(folder, engine.downloads.wheels) as (url, authority):
        given = ["--build-arg", f"PIP_INDEX_URL={url}", "--secret", f"id=ca,src={authority}"]
        engine.run(
            "docker", "build", *RECIPE, "-t", "from-index", "--network", "host", "--no-cache", *given, "."
        )
    took_s = time.monotonic() - began_s
    left = engine.run(
        "docker", "run", "--rm", "--entrypoint", "sh", "from-index", "-c", "ls -A /run/secrets 2>&1 || :"
    )
    assert "ca" not in left.split(), left
    return f"{took_s:.0f} s"
