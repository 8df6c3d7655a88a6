"""Triton chooses its interpreter when it is first imported, so the tests choose it before anything else is."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
