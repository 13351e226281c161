"""Hold what people see to files.

`PENSTOCK_UPDATE_GOLDEN=1 pytest FILE` accepts what there is now; read the diff.
"""

import os
from pathlib import Path

SENTENCES = Path(__file__).parent / "appliance" / "golden"


def check(path: Path, shown: str) -> None:
    """Compare, character for character."""
    if os.environ.get("PENSTOCK_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")
