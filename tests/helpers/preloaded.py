"""What the processes of `programs` need not import: the command line with all that it reads."""

import torch

from grpo_lightning.cli import import_families

torch.set_num_threads(1)
import_families()
