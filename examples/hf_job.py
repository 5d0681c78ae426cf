# /// script
# requires-python = ">=3.11"
# dependencies = ["grpo-lightning", "huggingface_hub"]
#
# [tool.uv.sources]  # it is not on PyPI yet: your copy of the repository
# grpo-lightning = { git = "https://github.com/OWNER/grpo_lightning" }
# ///
"""Trains on a machine of the Hub and puts the policy into a repository; what follows its name is for `grpo fit`.

    hf jobs uv run --flavor a10g-small --timeout 4h --secrets HF_TOKEN examples/hf_job.py NAME/REPOSITORY \
        --config grpo_lightning:quickstart --trainer.accelerator gpu

`uv run examples/hf_job.py ...` does the same here.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from huggingface_hub import HfApi


def main(repository: str, *options: str) -> None:
    """Fits, exports, uploads; without the right to upload it ends before the training."""
    hub = HfApi()
    hub.create_repo(repository, private=True, exist_ok=True)
    hub.upload_file(repo_id=repository, path_in_repo="README.md", path_or_fileobj=b"In training.")
    grpo, folder = [sys.executable, "-m", "grpo_lightning"], Path(tempfile.mkdtemp(prefix="grpo"))
    print(f"the run and its export are in {folder}, also if the upload fails")
    run, policy = folder / "run", folder / "policy"
    subprocess.run([*grpo, "fit", *options, "--trainer.default_root_dir", str(run)], check=True)
    subprocess.run([*grpo, "export", str(run), "--out", str(policy)], check=True)
    print(hub.upload_folder(repo_id=repository, folder_path=policy))


if __name__ == "__main__":
    main(*sys.argv[1:])
