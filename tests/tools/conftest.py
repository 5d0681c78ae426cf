"""Tools import each other by name, as scripts in one folder do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
