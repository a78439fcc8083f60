"""Without a Docker engine: the entrypoint is run as the script it is, and the files are read for what they promise."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"


@pytest.fixture
def container(tmp_path):
    """Runs the entrypoint with programs that tell how they were called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("moe-opt", "text-generation-launcher"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name}:$*:$PORT:${{MODEL_ID:-}}:${{HF_TOKEN:-}}:$HOSTNAME"\n')
        program.chmod(0o755)
    data = tmp_path / "data"
    data.mkdir()

    def run(*arguments, user_data=data, **environment):
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "HF_HOME": str(user_data), "PORT": "80", **environment}
        return subprocess.run(["sh", str(ENTRYPOINT), *arguments], env=env, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize(
    ("arguments", "environment", "called"),
    [
        ((), {"MODEL_ID": "m"}, "text-generation-launcher::80:m::0.0.0.0"),
        (("--model-id", "m"), {}, "text-generation-launcher:--model-id m:80:::0.0.0.0"),
        (("router", "--decode", "u"), {}, "moe-opt:router --decode u:80:::0.0.0.0"),
        ((), {"HF_MODEL_ID": "s"}, "text-generation-launcher::80:s::0.0.0.0"),
        ((), {"MODEL_ID": "m", "AIP_HTTP_PORT": "8080"}, "text-generation-launcher::8080:m::0.0.0.0"),
        ((), {"MODEL_ID": "m", "HUGGING_FACE_HUB_TOKEN": "t"}, "text-generation-launcher::80:m:t:0.0.0.0"),
        ((), {"MODEL_ID": "m", "HOSTNAME": "::"}, "text-generation-launcher::80:m::::"),
        ((), {"MODEL_ID": "m", "KUBERNETES_SERVICE_HOST": "x", "HOSTNAME": "pod-7"},
         "text-generation-launcher::80:m::0.0.0.0"),
    ],
)  # fmt: skip
def test_the_entrypoint_calls_what_tgis_would(container, arguments, environment, called):
    done = container(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(called)


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_said_at_once(tmp_path):
    data = tmp_path / "data"
    data.mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    command = ["sh", str(ENTRYPOINT)]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid", "65534", "--clear-groups", *command]
    script = ENTRYPOINT.read_text()
    done = subprocess.run(
        [*command[:-1], "-c", script], env={"PATH": os.environ["PATH"], "HF_HOME": str(data)}, capture_output=True,
        text=True, timeout=60, cwd="/",
    )  # fmt: skip
    assert done.returncode == 2
    assert "is not writable" in done.stderr


def test_the_health_check_fails_where_nobody_answers(container):
    done = container("healthcheck", PORT="1")
    assert done.returncode != 0
    assert "not healthy" in done.stderr


def test_the_real_launcher_behind_the_entrypoint_refuses_bad_settings(tmp_path):
    """With the real program: an unknown folder is one line and exit code 2."""
    program = tmp_path / "text-generation-launcher"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m moe_opt.serving.serve_command "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_HOME": str(tmp_path),
           "MODEL_ID": "/no/such/model", "PORT": "0", "HOSTNAME": "127.0.0.1"}  # fmt: skip
    done = subprocess.run(["sh", str(ENTRYPOINT)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no such folder" in done.stderr.splitlines()[-1]


def test_the_dockerfile_keeps_its_promises():
    text = (ROOT / "docker" / "Dockerfile").read_text()
    for needed in ("USER moe", "VOLUME /data", "HEALTHCHECK", "PORT=80", "HF_HOME=/data", "--shm-size", "STOPSIGNAL"):
        assert needed in text
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY") and "--chmod" not in line]
    for source in (name for names in copied for name in names):
        assert (ROOT / source).exists()
    extras = text.split(".[")[1].split("]")[0].split(",")
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras)


def test_compose_and_kubernetes_files_start_what_exists():
    from moe_opt.cli import COMMANDS

    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    router = compose["services"]["router"]["command"]
    assert router[0] in COMMANDS
    workers = {name for name in compose["services"] if name not in ("router", "shm")}
    told = {argument.split("=")[1] for argument in router if argument.startswith(("--prefill", "--decode"))}
    assert told == workers
    documents = list(yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text()))
    assert {d["kind"] for d in documents} == {"ConfigMap", "Service", "StatefulSet", "Deployment"}


def test_the_entrypoint_passes_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here")
    done = subprocess.run(
        ["shellcheck", str(ENTRYPOINT), str(ROOT / "scripts" / "install_vllm.sh")], capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()
