"""Doors to other libraries; each is imported by whoever needs it."""
