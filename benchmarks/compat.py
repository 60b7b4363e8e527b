"""Whether the clients that people have are served: first requests, second turns, and rounds with a tool.

    python -m benchmarks.compat [--json] [--clients NAME ...] [--tools DIR]

Each client is the real one, installed once by pip or npm into DIR (.run/compat unless given), and talks through a proxy
to one deployment, 1 prefill and 1 decode worker, of the embedded model with a context of 65,536 tokens and
answers of at most 96 unless a client says more. Its tokens mean nothing beyond 2,048; a forced call is a valid one all
the same, since a grammar binds it.

    refused     answers with a status of 400 or more
    invalid     whole answers and events that the published schemas (the types of the packages openai and anthropic)
                do not take; routes that have no type there are not checked
    failed      clients that ended with an error
    clients     per client: its version, and how many of its requests were answered
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import benchmarks.script_path  # noqa: F401
from benchmarks.compat_clients.recording import RecordedAnswer, RecordingProxy
from benchmarks.load.deployment import serving_deployment

ROOT = Path(__file__).parents[1]
CLIENTS = Path(__file__).parent / "compat_clients"
MODEL, KEY, CONTEXT_TOKENS, ANSWER_TOKENS, CLIENT_S = "tiny", "sk-" + "c" * 40, 65_536, 96, 900.0


@dataclass(frozen=True, slots=True)
class CompatClient:
    """One client: the packages to install, and what to run in their folder.

    In `command`, `{url}`, `{model}`, `{key}`, `{python}` and `{clients}` are replaced. A client that says `accepted`
    was served, whatever its exit status: the embedded model may not end an answer by itself.
    """

    name: str
    registry: str  # pip or npm
    packages: tuple[str, ...]
    command: tuple[str, ...]
    environ: tuple[tuple[str, str], ...] = ()
    accepted: str = ""
    # What it was recorded from, of one that does not run here itself.
    recorded: str = ""


def python_client(name: str, *packages: str) -> CompatClient:
    """A client that `compat_clients/NAME_client.py` uses."""
    return CompatClient(name, "pip", packages, ("{python}", f"{{clients}}/{name}_client.py"))


def node_client(name: str, *packages: str) -> CompatClient:
    """A client that `compat_clients/NAME_client.mjs` uses."""
    return CompatClient(f"node_{name}", "npm", packages, ("node", f"{name}_client.mjs"))


CODEX = (
    "./node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--sandbox", "read-only",
    "-c", "model_provider=diptych", "-c", "model={model}",
    "-c", 'model_providers.diptych={{name="diptych",base_url="{url}/v1",wire_api="responses",env_key="KEY"}}',
    "say hello",
)  # fmt: skip
CLAUDE = ("./node_modules/.bin/claude", "--model", "{model}", "-p", "say hello")
ALL_CLIENTS = (
    python_client("openai", "openai"),
    python_client("anthropic", "anthropic"),
    python_client("langchain", "langchain-openai", "langchain-anthropic"),
    python_client("litellm", "litellm"),
    python_client("llamaindex", "llama-index-llms-openai-like"),
    # Open WebUI is a server of its own with a database and a browser: its requests are recorded.
    replace(python_client("open_webui", "httpx"), recorded="0.12, recorded"),
    python_client("lm_eval", "lm-eval[api]", "transformers"),
    python_client("guidellm", "guidellm"),
    node_client("openai", "openai"),
    node_client("anthropic", "@anthropic-ai/sdk"),
    node_client("vercel", "ai", "@ai-sdk/openai-compatible", "zod"),
    CompatClient("codex", "npm", ("@openai/codex",), CODEX, accepted="reason: max_output_tokens"),
    CompatClient(
        "claude_code", "npm", ("@anthropic-ai/claude-code",), CLAUDE,
        (("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"), ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "64")),
        accepted="output token maximum",
    ),
)  # fmt: skip


# Not a client: the types that answers are checked against.
SCHEMAS = CompatClient("schemas", "pip", ("openai", "anthropic"), ())


def torch_constraint() -> str:
    """The version of torch, should a client ask for it, as Diptych's own environment has it."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("torch=="))


def install_packages(folder: Path, client: CompatClient) -> str:
    """Install a client's packages where they are not, and return the version of the first one.

    Raises subprocess.CalledProcessError if pip or npm fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if client.registry == "pip":
        python = folder / "env" / "bin" / "python"
        if not (folder / "done").exists():
            subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
            limits = folder / "constraints.txt"
            limits.write_text(torch_constraint(), encoding="utf-8")
            pip = [str(python), "-m", "pip", "install", "-q", "--constraint", str(limits), *client.packages]
            subprocess.run(pip, check=True)
            (folder / "done").touch()
        name = client.packages[0].partition("[")[0]
        ask = f"from importlib.metadata import version; print(version({name!r}))"
        return subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    if not (folder / "done").exists():
        (folder / "package.json").write_text('{"private": true}', encoding="utf-8")
        npm = ["npm", "install", "--no-audit", "--no-fund", "--silent", *client.packages]
        subprocess.run(npm, check=True, cwd=folder)
        (folder / "done").touch()
    for script in CLIENTS.glob("*.mjs"):
        shutil.copy(script, folder)
    package = folder / "node_modules" / client.packages[0] / "package.json"
    return str(json.loads(package.read_text(encoding="utf-8"))["version"])


def run_client(client: CompatClient, folder: Path, url: str, model: Path) -> str:
    """Run a client against `url`; returns "" or the end of what it said when it failed."""
    names = {
        "url": url, "model": MODEL, "key": KEY, "clients": str(CLIENTS),
        "python": str(folder / "env/bin/python"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as home:
        environ = {
            "PATH": os.environ["PATH"], "HOME": home, "NO_PROXY": "*", "COMPAT_URL": url, "COMPAT_MODEL": MODEL,
            "COMPAT_FOLDER": str(model), "KEY": KEY,
            "OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": url, **dict(client.environ),
        }  # fmt: skip
        try:
            ended = subprocess.run(
                [part.format(**names) for part in client.command],
                cwd=folder, env=environ, capture_output=True, text=True, timeout=CLIENT_S, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not ended after {CLIENT_S} s"
    said = ended.stdout + ended.stderr
    served = ended.returncode == 0 or (client.accepted and client.accepted in said)
    return "" if served else said[-600:]


def make_long_model(folder: Path) -> Path:
    """The embedded model with a longer context."""
    copy = folder / MODEL
    shutil.copytree(ROOT / "models" / MODEL, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = CONTEXT_TOKENS
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generation = json.loads((copy / "generation_config.json").read_text(encoding="utf-8"))
    generation["max_new_tokens"] = ANSWER_TOKENS
    (copy / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    tokenizer = json.loads((copy / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer["model_max_length"] = CONTEXT_TOKENS
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return copy


def find_invalid(answers: list[RecordedAnswer], folder: Path) -> list[str]:
    """What the published schemas do not take, checked where these packages are installed."""
    checking = subprocess.run(
        [folder / "env/bin/python", CLIENTS / "check_answers.py"],
        input=json.dumps([answer.as_json() for answer in answers]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: list[str] = json.loads(checking.stdout)
    return found


def measure(clients: list[CompatClient], tools: Path) -> dict[str, Any]:
    """Run the clients one after the other."""
    versions = {client.name: install_packages(tools / client.name, client) for client in clients}
    install_packages(tools / SCHEMAS.name, SCHEMAS)
    found: dict[str, Any] = {"clients": {}, "failures": {}}
    answers: list[RecordedAnswer] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = make_long_model(Path(scratch))
        with serving_deployment(
            "--model", str(model), "--served-model-name", MODEL, "--prefill", "1", "--decode", "1",
            "--max-model-len", str(CONTEXT_TOKENS), "--api-key", KEY, "--kv-cache-memory-bytes", str(1 << 30),
        ) as deployment, RecordingProxy(deployment.url) as proxy:  # fmt: skip
            deployment.wait_ready()
            for client in clients:
                before = len(proxy.answers)
                if why := run_client(client, tools / client.name, proxy.url, model):
                    found["failures"][client.name] = why
                mine = proxy.answers[before:]
                answers += mine
                answered = sum(one.status < 400 for one in mine)
                found["clients"][client.name] = {
                    "version": client.recorded or versions[client.name], "answered": answered,
                }  # fmt: skip
    refused = [f"{one.path} {one.status}: {one.text[:300]}" for one in answers if one.status >= 400]
    invalid = find_invalid(answers, tools / SCHEMAS.name)
    return found | {
        "refused": len(refused), "invalid": len(invalid), "failed": len(found["failures"]),
        "refusals": refused[:20], "wrong": invalid[:20],
    }  # fmt: skip


def main() -> None:
    """Run the clients that were asked for and print what became of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    names = [client.name for client in ALL_CLIENTS]
    parser.add_argument("--clients", nargs="+", choices=names, default=names, help="which clients")
    parser.add_argument("--tools", type=Path, default=ROOT / ".run/compat", help="where they are installed")
    options = parser.parse_args()
    try:
        found = measure([one for one in ALL_CLIENTS if one.name in options.clients], options.tools.resolve())
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"a client cannot be installed or answers not checked: {error}\nIt needs pip, npm and their registries."
        )
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:>10}  {value}" for name, value in found.items()))
    sys.exit(bool(found["refused"] or found["invalid"] or found["failed"]))


if __name__ == "__main__":
    main()
