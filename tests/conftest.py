"""One torch thread: on a busy small machine two are many times slower than one."""

import torch

torch.set_num_threads(1)
