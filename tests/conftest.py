"""Before anything else is imported: without a GPU, Triton's kernels run in its interpreter (it decides once, at import)."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
