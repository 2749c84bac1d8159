"""Which tag is loaded: the newest whole one, the same on all ranks."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dos.checkpoint.commit import LATEST
from dos.errors import CheckpointError, DOSError, FormatError
from dos.integrations.deepspeed_engine import DOSCheckpointEngine
from dos.integrations.deepspeed_tags import is_tag, open_tag

_log = logging.getLogger(__name__)
