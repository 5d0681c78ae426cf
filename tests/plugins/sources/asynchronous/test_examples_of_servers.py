"""The job script and the compose file that start servers, as far as they can be tried here."""

import os
import re
import subprocess
from pathlib import Path

import yaml
from helpers.paths import ROOT
from helpers.waiting import LIMIT

SERVE = "--tokens-only --dtype bfloat16 --logprobs-mode processed_logprobs"
GREP = '#!/bin/bash\necho "$(basename $0) $*" >> {log}\n'
PROGRAMS = {
    "scontrol": "printf 'node1\\nnode2\\nnode3\\n'",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "vllm": "",
    "sleep": "exec /bin/sleep 0.05",
    "grpo": "/bin/sleep 1; exit 7",
}


def test_the_job_script_starts_servers_on_further_nodes_again(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(GREP.format(log=log) + text + "\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-3]",
    }
    script = ["bash", ROOT / "examples" / "slurm_servers.sh", "runs/policy", "--loop.source", "OneStepOffPolicy"]
    ended = subprocess.run(script, cwd=tmp_path, env=os.environ | variables, timeout=LIMIT, capture_output=True)
    assert ended.returncode == 7, ended.stderr
    lines = log.read_text().splitlines()
    served = [line for line in lines if line.startswith("vllm serve")]
    assert {*served} == {f"vllm serve runs/policy --port 8000 {SERVE}"} and len(served) > 4
    (trained,) = [line for line in lines if line.startswith("grpo fit")]
    assert trained.startswith("grpo fit --loop.source OneStepOffPolicy --model.policy.path runs/policy")
    assert "--model.engine.urls [http://node2:8000, http://node3:8000]" in trained
    assert "--model.engine.transfer.folder runs/7/weights" in trained and (tmp_path / "runs/7/weights").is_dir()


def test_the_compose_file_starts_the_servers_that_the_training_asks() -> None:
    services = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text())["services"]
    training = services.pop("training")
    urls = re.findall(r"http://(\w+):8000", training["command"])
    assert [*services] == urls and len(urls) == 2
    for server in services.values():
        assert SERVE in server["command"] and server["environment"] == {"VLLM_SERVER_DEV_MODE": "1"}
        assert server["restart"] == "always" and server["volumes"] == training["volumes"][:1]
    gpus = [service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for service in services.values()]
    assert gpus == [["1"], ["2"]]
