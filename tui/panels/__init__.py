"""Draw panels as pure functions from a view and a size to lines, without Textual."""
