"""One thread for arithmetic: the models of the tests are tiny, and several of their stages run side by side."""
from __future__ import annotations

import torch

torch.set_num_threads(1)
torch.set_grad_enabled(False)
