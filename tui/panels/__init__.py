"""Panels as pure functions from a view and a size to lines; nothing here knows Textual."""
