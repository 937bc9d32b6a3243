"""Lets the tests here import ``tiny_run``, which is a script as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
