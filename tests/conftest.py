"""Before anything is imported: without a GPU, Triton's kernels run in its interpreter (it decides when it is first imported)."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
