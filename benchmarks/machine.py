"""Where and with what numbers were made."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import torchdil


def machine() -> dict[str, Any]:
    """Versions, processor, threads."""
    return {
        "seed": 0,
        "torchdil": torchdil.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
