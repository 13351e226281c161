"""Turn text into token ids and back, and constrain outputs by grammars."""
