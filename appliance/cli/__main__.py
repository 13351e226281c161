"""`python -m appliance.cli`: the command where it is not installed.

Owns: nothing. Never: anything of its own.
"""

from __future__ import annotations

from appliance.cli import main

if __name__ == "__main__":
    main()
