"""Leave out what only torch's compiler needs: a fifth of the time that a worker's start takes.

Interpreters with this folder on PYTHONPATH read this first. Serving on CPUs would fail if it used
what is left out.
"""

import sys
import types

for _name in ("torch._meta_registrations", "torch.export"):
    sys.modules[_name] = types.ModuleType(_name)
