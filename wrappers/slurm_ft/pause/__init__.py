"""Coordinated pause: all ranks hold, or all go on."""
