"""What HTTPS costs: the time of a request over that of the same one over plain HTTP.

    python -m benchmarks.tls [--json] [--short] [--pairs 200] [--tokens 16]

Two deployments of the embedded model, one with a certificate (ECDSA, P-256). A client sends each the same request in
turn, one at a time, first one and then the other first, over connections that stay open.

    tls_ratio       the median over pairs of: seconds over HTTPS / seconds over HTTP
    stream_ratio    the same of streamed answers
    connect_ratio   the same with a new connection, and so a handshake, for each request
"""

from __future__ import annotations

import datetime
import ipaddress
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import benchmarks.script_path  # noqa: F401
from benchmarks.load.command_line import figure_parser, print_figures
from benchmarks.load.deployment import ANSWER_S, START_S, serving_deployment
from benchmarks.load.short_form import add_short_form
from services.gateway.tls.trust import trust_certificate

MODEL, WARM_UP = "tiny", 8


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "benchmark")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number(), now - day, now + day
        )
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    certfile, keyfile = folder / "tls.crt", folder / "tls.key"
    keyfile.touch(0o600)
    keyfile.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    certfile.write_bytes(made.public_bytes(Encoding.PEM))
    return certfile, keyfile


def ask_once(http: httpx.Client, num_tokens: int, stream: bool) -> float:
    """Seconds of one request, until its whole answer was read. Raises httpx.HTTPError."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}
    begun_s = time.perf_counter()
    with http.stream("POST", "/v1/completions", json=body | {"stream": stream, "temperature": 0}) as answer:
        answer.raise_for_status()
        answer.read()
    return time.perf_counter() - begun_s


def paired_ratio(clients: Sequence[httpx.Client], num_pairs: int, num_tokens: int, stream: bool) -> float:
    """The median ratio of the second client's time to the first one's, over pairs in turned order."""
    ratios = []
    for number in range(-WARM_UP, num_pairs):
        order = (0, 1) if number % 2 else (1, 0)
        times_s = {which: ask_once(clients[which], num_tokens, stream) for which in order}
        if number >= 0:
            ratios.append(times_s[1] / times_s[0])
    return round(statistics.median(ratios), 4)


def wait_ready(http: httpx.Client) -> None:
    """Raises RuntimeError if a deployment is not ready in time."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        try:
            if http.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"not ready after {START_S:.0f} s")


def measure_tls(num_pairs: int, num_tokens: int) -> dict[str, float]:
    """Start both deployments, and compare them."""
    flags = ("--colocated", "1", "--kv-cache-memory-bytes", "128MiB", "--no-pin-cores")
    with tempfile.TemporaryDirectory() as folder:
        certfile, keyfile = make_certificate(Path(folder))
        secure = (*flags, "--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile))
        with serving_deployment(*flags) as plain, serving_deployment(*secure) as tls:
            urls = (plain.url, f"https://127.0.0.1:{tls.port}")

            def connect(keep: bool) -> list[httpx.Client]:
                limits = httpx.Limits(max_keepalive_connections=1 if keep else 0)
                return [
                    httpx.Client(
                        base_url=url,
                        trust_env=False,
                        timeout=ANSWER_S,
                        limits=limits,
                        verify=trust_certificate(str(certfile)),
                    )
                    for url in urls
                ]

            kept, fresh = connect(keep=True), connect(keep=False)
            for one in kept:
                wait_ready(one)
            found = {
                "tls_ratio": paired_ratio(kept, num_pairs, num_tokens, False),
                "stream_ratio": paired_ratio(kept, num_pairs, num_tokens, True),
                "connect_ratio": paired_ratio(fresh, num_pairs, num_tokens, False),
            }
            for one in (*kept, *fresh):
                one.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = figure_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    add_short_form(parser, pairs=40)
    options = parser.parse_args()
    print_figures({**measure_tls(options.pairs, options.tokens)}, options, "pairs", "tokens")


if __name__ == "__main__":
    main()
