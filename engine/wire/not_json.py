"""Name what msgspec raises for bytes that it cannot decode.

It stands apart from engine.errors, which verbs that must start quickly import.
"""

import msgspec

NOT_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)
