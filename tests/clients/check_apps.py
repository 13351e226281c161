"""Apps as people install them: each does one task with a tool call, on its defaults, at 32k tokens.

The model is the scripted one, in three styles of chat template, so no model is needed. An app is
found on PATH, and skipped by its name where it is not there. What its makers would be told of its
use is switched off; nothing but loopback is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.daemons import ALONE, Daemon, make_keys
from tests.worlds.scripted_model import DONE, MARK, STYLES, write

TASK = "Write the mark."
LIMIT_S = 240
TOOL = {
    "type": "function",
    "function": {
        "name": "run_command",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


@dataclass(frozen=True)
class Server:
    """A daemon with the scripted model."""

    url: str
    key: str
    model: str


@dataclass(frozen=True)
class Desk:
    """Where an app runs: a home and a folder of its own."""

    folder: Path

    @property
    def work(self) -> Path:
        path = self.folder / "work"
        path.mkdir(exist_ok=True)
        return path

    def run(self, program: str, *arguments: str, **variables: str) -> str:
        """What the app says; its own tools run in `work`."""
        path = shutil.which(program)
        if path is None:
            pytest.skip(f"{program} is not installed")
        return self.run_at(path, *arguments, **variables)

    def run_at(self, path: str, *arguments: str, **variables: str) -> str:
        home = {name: str(self.folder) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
        home |= {"XDG_CACHE_HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder)}
        environ = {"PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C.UTF-8", **home}
        ended = subprocess.run(
            [path, *arguments],
            cwd=self.work,
            env=environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def assert_marked(self) -> None:
        """The tool has run here."""
        assert (self.work / "mark.txt").read_text().strip() == MARK


@pytest.fixture(scope="session", params=STYLES)
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    path, keys = make_keys(folder, laptop="user")
    daemon = Daemon(
        folder / "daemon", *ALONE, "--listen", "127.0.0.1:0", "--api-keys", str(path),
        "--model-aliases", "*", "--kv-memory", "256MiB",
        model=write(folder / "scripted", request.param),
    )  # fmt: skip
    yield Server(daemon.wait_ready().tcp_url, keys["laptop"], "scripted")
    daemon.assert_all_free()
    assert daemon.stop() == 0


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def test_claude_code(server, desk):
    said = desk.run(
        "claude", "-p", TASK, "--allowedTools", "Bash", "--output-format", "json",
        ANTHROPIC_BASE_URL=server.url, ANTHROPIC_API_KEY=server.key, DISABLE_AUTOUPDATER="1",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    assert json.loads(said)["result"] == DONE
    desk.assert_marked()


def test_codex(server, desk):
    provider = f'{{name="p",base_url="{server.url}/v1",env_key="KEY",wire_api="responses"}}'
    said = desk.run(
        "codex", "exec", "--json", "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox", "-m", "any", "-c", "model_provider=p",
        "-c", f"model_providers.p={provider}", "-c", "analytics.enabled=false", TASK,
        KEY=server.key,
    )  # fmt: skip
    texts = [json.loads(line).get("item", {}).get("text") for line in said.splitlines()]
    assert DONE in texts
    desk.assert_marked()


def test_opencode(server, desk):
    options = {"baseURL": f"{server.url}/v1", "apiKey": server.key}
    package = "@ai-sdk/openai-compatible"
    provider = {"npm": package, "options": options, "models": {"m": {"name": "m"}}}
    config = {"provider": {"p": provider}, "model": "p/m", "small_model": "p/m"}
    config |= {"share": "disabled", "autoupdate": False}
    said = desk.run(
        "opencode", "run", "--format", "json", TASK,
        OPENCODE_CONFIG_CONTENT=json.dumps(config), OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_LSP_DOWNLOAD="1",
    )  # fmt: skip
    assert DONE in said
    desk.assert_marked()


def test_qwen_code(server, desk):
    said = desk.run(
        "qwen", "--auth-type", "openai", "--approval-mode", "yolo", "-p", TASK,
        OPENAI_API_KEY=server.key, OPENAI_BASE_URL=f"{server.url}/v1", OPENAI_MODEL="any",
    )  # fmt: skip
    assert DONE in said
    desk.assert_marked()


def test_continue(server, desk):
    model = {"name": "m", "provider": "openai", "model": "any", "apiBase": f"{server.url}/v1"}
    model |= {"apiKey": server.key, "roles": ["chat"], "capabilities": ["tool_use"]}
    config = desk.folder / "config.yaml"  # of which JSON is a part
    about = {"name": "p", "version": "1.0.0", "schema": "v1"}
    config.write_text(json.dumps({**about, "models": [model]}))
    said = desk.run(
        "cn", "-p", TASK, "--config", str(config), "--auto", "--allow", "Bash",
        CONTINUE_TELEMETRY_ENABLED="0",
    )  # fmt: skip
    assert DONE in said
    desk.assert_marked()


def test_aider(server, desk):
    """It has no tools: the reply is a file, which it writes."""
    subprocess.run(["git", "init", "-q", "."], cwd=desk.work, check=True)
    desk.run(
        "aider", "--model", "openai/any", "--no-show-model-warnings", "--no-analytics",
        "--no-check-update", "--yes-always", "--no-auto-commits", "--message", TASK,
        OPENAI_API_BASE=f"{server.url}/v1", OPENAI_API_KEY=server.key,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )  # fmt: skip
    desk.assert_marked()


FUNCTION = f"""
import pathlib
def run_command(command: str) -> str:
    "Run a command."
    pathlib.Path("mark.txt").write_text({MARK!r})
    return {MARK!r}
"""


@pytest.mark.parametrize("way", ["openai", "ollama"])
def test_llm(server, desk, way):
    (desk.folder / "extra-openai-models.yaml").write_text(
        f"- {{model_id: pen, model_name: any, api_base: {server.url}/v1, api_key_name: pen,"
        " supports_tools: true}\n"
    )
    (desk.folder / "keys.json").write_text(json.dumps({"pen": server.key}))
    said = desk.run(
        "llm", "-m", "pen" if way == "openai" else f"ollama/{server.model}",
        "--functions", FUNCTION, TASK,
        LLM_USER_PATH=str(desk.folder),
        OLLAMA_HOST=server.url.replace("//", f"//x:{server.key}@"),
    )  # fmt: skip
    assert said.strip() == DONE
    desk.assert_marked()


LITELLM = """
import json, os, sys
import litellm
model, tool, task, mark = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
messages = [{"role": "user", "content": task}]
def ask(**more):
    return litellm.completion(model=model, messages=messages, tools=[tool], **more)
message = ask().choices[0].message
(call,) = message.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": mark, "name": "run_command"}
messages += [message, result]
pieces = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
print(json.loads(call.function.arguments)["command"] != "", "".join(pieces))
"""


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic", "ollama_chat"])
def test_litellm(server, desk, provider):
    program = shutil.which("litellm")
    if program is None:
        pytest.skip("litellm is not installed")
    python = str(Path(program).resolve().parent / "python")
    ending = "/v1" if provider in ("openai", "hosted_vllm") else ""
    said = desk.run_at(
        python, "-c", LITELLM, f"{provider}/{server.model}", json.dumps(TOOL), TASK, MARK,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        **{f"{provider.removesuffix('_chat').upper()}_API_BASE": f"{server.url}{ending}"},
        **{f"{provider.removesuffix('_chat').upper()}_API_KEY": server.key},
    )  # fmt: skip
    assert said.strip().endswith(f"True {DONE}")


# By their source: what these ask, without the apps.


@pytest.fixture
def http(server):
    headers = {"authorization": f"Bearer {server.key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=LIMIT_S) as http:
        yield http


def lines_of(reply: httpx.Response) -> list[dict]:
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def ollama_turns(http, model) -> str:
    """A tool call and its result, streamed; the last answer."""
    messages = [{"role": "user", "content": TASK}]
    body = {"model": model, "messages": messages, "tools": [TOOL], "options": {}}
    told = lines_of(http.post("/api/chat", json=body))
    (call,) = [call for line in told for call in line["message"].get("tool_calls", ())]
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    messages.append({"role": "tool", "tool_name": "run_command", "content": MARK})
    told = lines_of(http.post("/api/chat", json=body))
    assert told[-1]["done_reason"] == "stop"
    return "".join(line["message"]["content"] for line in told)


def test_ollamas_command_by_its_source(http, server):
    assert http.head("/").status_code == 200
    shown = http.post("/api/show", json={"model": server.model, "name": server.model}).json()
    assert "tools" in shown["capabilities"]
    (loaded,) = lines_of(http.post("/api/generate", json={"model": server.model, "prompt": ""}))
    assert loaded["done_reason"] == "load"
    assert ollama_turns(http, server.model) == DONE
    (listed,) = http.get("/api/tags").json()["models"]
    assert listed["digest"][:12] == http.get("/api/ps").json()["models"][0]["digest"][:12]


def test_open_webui_by_its_source(http, server):
    """Its two kinds of connections, with what it asks of each before a chat."""
    assert http.get("/api/version").json()["version"]
    assert (
        ollama_turns(http, f"{http.get('/api/tags').json()['models'][0]['model']}:latest") == DONE
    )
    (model,) = http.get("/v1/models").json()["data"]
    messages = [{"role": "user", "content": TASK}]
    body = {"model": model["id"], "messages": messages, "stream": True, "tools": [TOOL]}
    chunks = http.post("/v1/chat/completions", json=body)
    assert '"run_command"' in chunks.text
    messages.append({"role": "user", "content": MARK})
    reply = http.post("/v1/chat/completions", json={**body, "stream": False}).json()
    assert reply["choices"][0]["message"]["content"] == DONE


def test_copilot_zed_and_roo_code_by_their_source(http, server):
    """What each reads of the lists before its first chat, which is as Ollama's command's."""
    release = http.get("/api/version").json()["version"]
    assert tuple(map(int, release.split("."))) >= (0, 6, 4), "Copilot"
    (listed,) = http.get("/api/tags").json()["models"]
    assert {"name", "modified_at", "size", "digest", "details"} <= listed.keys()
    details = {"format", "family", "families", "parameter_size", "quantization_level"}
    assert all(listed["details"][name] for name in details)
    shown = http.post("/api/show", json={"model": listed["name"]}).json()
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 32768
    assert shown["model_info"]["general.basename"] == server.model
    assert {"modelfile", "template", "parameters", "details"} <= shown.keys()
