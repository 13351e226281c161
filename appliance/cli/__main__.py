"""Run the command where it is not installed: `python -m appliance.cli`."""

from __future__ import annotations

from appliance.cli import main

if __name__ == "__main__":
    main()
