"""Chat templates of the supported families: short ones, with the constructs that theirs use."""

from pathlib import Path

FAMILIES = {
    path.stem: path.read_text()
    for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
}
