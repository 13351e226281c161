"""Name what msgspec raises for bytes that it cannot decode.

Owns: this list, apart from engine.errors, which verbs that must start quickly import.
Never: decodes anything.
"""

import msgspec

NOT_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)
