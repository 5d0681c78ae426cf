"""What the processes of `programs` need not import: the command line with all that it reads."""

import torch

from grpo_lightning.cli import import_families
from grpo_lightning.engines import trial

torch.set_num_threads(1)
import_families()
trial.fault = lambda *args, **kwargs: ""  # as in `helpers.fitting.fit`
